"""Header of a trace: the first line of each file, and the first line that each engine writes to it.

This module also exports a trace in the format of ``scheduler_timestamps``, the file that
Continuum's recorder writes: one JSON object with a list of events per job. Each event is an object
that has the event's time, in seconds since the epoch, under the event's name. All seven event names
of the recorder are written. Preemptions of a request after the first ``FIRST_PREEMPTIONS`` are
missing, because the trace does not record their times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tiered_kv.json_fields import cut, read, said

from .turn_record import TurnRecord

SCHEMA = 1
"""Version of the record schema. Later releases may add fields, but never change the meaning of a
field."""

_MODEL_ROOM, _WORD_ROOM, _SHORT_ROOM = 224, 48, 24
_MOST_TIERS, _MOST_GROUPS = 4, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The engine that wrote the following records.

    Attributes:
        version: tiered-kv's version.
        started, clock: start of this engine's trace, in seconds since the epoch, and on the
            engine's monotonic clock.
        model: name or folder of the model.
        policy, eviction, admission: the settings in effect; ``admission`` is ``off`` unless the
            policy is ``occupancy``.
        replica: index among data-parallel engines.
        block_size: tokens per block.
        vram_blocks: VRAM blocks for requests.
        tiers_bytes: capacity of each tier outside VRAM, over all ranks, bytes; 0 if unlimited or
            unknown.
        mode: ``observe`` in observe mode, otherwise left out.
        page_bytes: size of a block's pages, over all ranks, bytes.
        groups: KV types of the page groups: ``full``, ``window``, ``chunk`` or ``state``.
        step_tokens, running, context_tokens: vLLM's limits for tokens per step, running requests,
            and tokens per context.
        job_order: true under ``ContinuumScheduler``.
    """

    version: str
    started: float
    clock: float
    model: str = ""
    policy: str
    replica: int = 0
    block_size: int
    vram_blocks: int
    tiers_bytes: Mapping[str, int] = field(default_factory=dict)
    mode: str = "manage"
    page_bytes: int = 0
    groups: tuple[str, ...] = ()
    step_tokens: int = 0
    running: int = 0
    context_tokens: int = 0
    job_order: bool = False
    admission: str = ""
    eviction: str = ""

    def to_line(self) -> str:
        """Return the header as a line of less than 1 KiB, without its line break."""
        tiers = list(self.tiers_bytes.items())[:_MOST_TIERS]
        short = replace(
            self,
            version=cut(self.version, _SHORT_ROOM),
            model=cut(self.model, _MODEL_ROOM),
            policy=cut(self.policy, _WORD_ROOM),
            mode=cut(self.mode, _SHORT_ROOM),
            tiers_bytes={cut(name, _SHORT_ROOM): nbytes for name, nbytes in tiers},
            groups=self.groups[:_MOST_GROUPS],
            admission=cut(self.admission, _SHORT_ROOM),
            eviction=cut(self.eviction, _WORD_ROOM),
        )
        written = {"schema": SCHEMA} | said(short)
        written |= {"started": round(self.started, 3), "clock": round(self.clock, 3)}
        return json.dumps(written, separators=(",", ":"))

    @classmethod
    def from_json(cls, found: object) -> TraceHeader:
        """Read a header. Unknown fields are ignored.

        Raises:
            ValueError: the value is not a header. The message gives the reason.
        """
        return read(cls, found)


Event = dict[str, float | int]


def recorder_events(records: Iterable[TurnRecord]) -> dict[str, list[Event]]:
    """Return the recorder's events by job name, sorted by time within each job. Turns without a job
    are left out, and jobs with the same name are merged.
    """
    found: dict[str, list[tuple[float, Event]]] = {}
    for one in sorted(records, key=lambda one: one.arrived):
        if one.job is not None:
            found.setdefault(one.job, []).extend(_events(one))
    return {
        job: [event for _, event in sorted(events, key=lambda event: event[0])]
        for job, events in found.items()
    }


def _events(one: TurnRecord) -> list[tuple[float, Event]]:
    tokens, arrived, ended = one.tokens, one.arrived, one.ended
    events: list[tuple[float, Event]] = [(arrived, {"Request_arrival_time": arrived})]
    if one.times.admitted_s is not None:
        at = arrived + one.times.admitted_s
        lengths = {
            "prompt_length": tokens.prompt,
            "hit_length": tokens.vram + tokens.cpu + tokens.ssd,
        }
        events.append((at, {"waiting_to_running": at, **lengths}))
    for at_s in one.preempted.at_s:
        events.append((arrived + at_s, {"Request_evicted_from_running_queue_time": arrived + at_s}))
    for back_s, found in zip(one.preempted.back_s, one.preempted.found, strict=False):
        lengths = {"prompt_length": tokens.prompt, "hit_length": found}
        events.append((arrived + back_s, {"evicted_to_running": arrived + back_s, **lengths}))
    events.append((ended, {"Request_departure_time": ended}))
    if one.pin.end is not None:
        over = ended + one.pin.held_s
        events += [(ended, {"pinned_time": ended}), (over, {"unpinned_time": over})]
    return events
