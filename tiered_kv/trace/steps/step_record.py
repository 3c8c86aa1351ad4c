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
    """The engine as a step was scheduled.

    Attributes:
        step: number of the step since the engine began with its trace, from 1.
        at: seconds since the epoch.
        replica: index of the engine among data-parallel ones.
        running: requests that were given blocks and have not ended; preempted ones included.
        waiting: requests that were not, without those that are held.
        held: requests of new jobs for which there is no room.
        scheduled: requests that compute in the step.
        prefill, decode: tokens that they compute: of prompts (or, after a preemption, of all that
            is computed again), and of answers.
        free: blocks that nobody holds.
        cached: hashes under which blocks can be found, held ones included.
        pinned: blocks that pins hold.
        nbytes: bytes that pages take in each tier outside VRAM, all ranks together.
        orders: orders under way by kind: ``save``, ``load``, ``pack``, ``demote``, ``promote``,
            ``lookup``; of snapshots ``export``, ``import``.
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
        """The record as a line of less than 1 KiB, its end not included."""
        written = said(self) | {"at": round(self.at, 4)}
        for name in ("nbytes", "orders"):
            if name in written:
                written[name] = _short(getattr(self, name))
        return _encode({name: one for name, one in written.items() if one != {}})

    @classmethod
    def from_json(cls, found: object) -> StepRecord:
        """Read a record; fields that are not known are passed over.

        Raises:
            ValueError: it is none; the message tells why.
        """
        return read(cls, found)


def _short(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that are not 0."""
    found = [(name, count) for name, count in counts.items() if count]
    return {cut(name, _WORD_ROOM): count for name, count in found[:_MOST_NAMES]}
