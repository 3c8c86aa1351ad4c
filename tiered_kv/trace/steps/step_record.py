"""Schema 1 of the trace: a step of the engine, as JSON of at most 1 KiB. See docs/trace.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_kv.json_fields import cut, read, said

_WORD_ROOM, _MOST_NAMES = 32, 8
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """State of the engine when a step was scheduled.

    Attributes:
        step: number of the step, from 1.
        at: scheduling time, in seconds since the epoch.
        replica: index among data-parallel engines.
        running: requests with allocated blocks, and preempted requests.
        waiting: requests without blocks, except the requests in ``held``.
        held: requests of new jobs that are held back.
        scheduled: requests in this step.
        prefill: computed prompt tokens, and all tokens recomputed after a preemption.
        decode: computed answer tokens.
        free, pinned: unreferenced VRAM blocks, and pinned VRAM blocks.
        cached: VRAM blocks, in use or free, that prompts can hit.
        nbytes: page bytes per tier outside VRAM, over all ranks.
        orders: orders in flight: ``save``, ``load``, ``pack`` (compress), ``demote``, ``promote``,
            ``lookup``, and ``export`` and ``import`` of snapshots.
    """

    step: int
    at: float
    replica: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    scheduled: int = 0
    prefill: int = 0
    decode: int = 0
    free: int = 0
    cached: int = 0
    pinned: int = 0
    nbytes: Mapping[str, int] = field(default_factory=dict)
    orders: Mapping[str, int] = field(default_factory=dict)

    def to_line(self) -> str:
        """Return the record as a line of less than 1 KiB, without its line break."""
        written = said(self) | {"at": round(self.at, 4)}
        for name in ("nbytes", "orders"):
            if name in written:
                written[name] = _short(getattr(self, name))
        return _encode({name: one for name, one in written.items() if one != {}})

    @classmethod
    def from_json(cls, found: object) -> StepRecord:
        """Read a record. Unknown fields are ignored.

        Raises:
            ValueError: the value is not a record. The message gives the reason.
        """
        return read(cls, found)


def _short(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts that are not 0, with shortened names."""
    found = [(name, count) for name, count in counts.items() if count]
    return {cut(name, _WORD_ROOM): count for name, count in found[:_MOST_NAMES]}
