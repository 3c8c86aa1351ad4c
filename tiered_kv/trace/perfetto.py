"""Export of a trace for Perfetto and Chrome's ``chrome://tracing``, with a track for each job and
each tier.

The format is Chrome's "Trace Event Format", with times in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .turn_record import TurnRecord

JOBS, TIERS = 1, 2
"""Groups of tracks, which the format calls processes."""
_TIERS = {"VRAM": "vram", "CPU memory": "cpu", "SSD": "ssd", "computed": "recomputed"}
_PINNED = "pinned blocks"

Event = Mapping[str, Any]


def perfetto_events(records: Iterable[TurnRecord]) -> Iterator[Event]:
    """Yield the events of a trace: names of tracks, then slices of turns and gaps, then counters.

    A job has a second track if two of its turns ran concurrently. The track of a tier shows the
    cumulative number of prompt tokens found in the tier; another track shows the number of pinned
    blocks.
    """
    turns = sorted(records, key=lambda one: one.arrived)
    yield from (_named(group, name) for group, name in ((JOBS, "jobs"), (TIERS, "tiers")))
    lanes = _Lanes()
    for one in turns:
        track, is_new = lanes.place(one)
        if is_new:
            yield _named(JOBS, one.job or "(no job)", track)
        yield from _slices(one, track)
    yield from _counters(turns)


class _Lanes:
    """Tracks of jobs. A job gets an additional track if two of its turns overlap."""

    def __init__(self) -> None:
        self._free_from: dict[tuple[object, ...], list[tuple[int, float]]] = {}
        self._tracks = 0

    def place(self, one: TurnRecord) -> tuple[int, bool]:
        """Return the track of a turn, and True if the track is new."""
        job = (one.job, one.client, one.replica, "" if one.job is not None else one.request)
        lanes = self._free_from.setdefault(job, [])
        # The next turn arrives when the gap ends, up to rounding.
        until = one.ended + (one.gap.gap_s or 0.0) - 1e-3
        for at, (track, free_from) in enumerate(lanes):
            if free_from <= one.arrived:
                lanes[at] = (track, until)
                return track, False
        self._tracks += 1
        lanes.append((self._tracks, until))
        return self._tracks, True


def _named(group: int, name: str, track: int | None = None) -> Event:
    event = {"ph": "M", "pid": group, "args": {"name": name}}
    if track is None:
        return {**event, "name": "process_name"}
    return {**event, "name": "thread_name", "tid": track}


def _slices(one: TurnRecord, track: int) -> Iterator[Event]:
    times, gap, pin = one.times, one.gap, one.pin

    def slice_of(name: str, begin_s: float, end_s: float, **told: Any) -> Event:
        return {
            "ph": "X",
            "pid": JOBS,
            "tid": track,
            "name": name,
            "ts": round(1e6 * (one.arrived + begin_s)),
            "dur": round(1e6 * max(0.0, end_s - begin_s)),
            "args": told,
        }

    told = {"request": one.request, "finish": one.finish, "prompt": one.tokens.prompt}
    yield slice_of(f"turn {one.turn}", 0.0, times.end_s, **told)
    moments = {
        "waiting": times.admitted_s,
        "restoring": times.scheduled_s,
        "prompt": times.first_token_s,
        "answer": times.end_s,
    }
    begin_s = 0.0
    for name, end_s in moments.items():
        if end_s is not None:
            if end_s > begin_s:
                yield slice_of(name, begin_s, end_s)
            begin_s = end_s
        else:
            begin_s = times.end_s
    back_s = [*one.preempted.back_s, times.end_s]
    for at_s, until_s in zip(one.preempted.at_s, back_s, strict=False):
        yield slice_of("preempted", at_s, until_s)
    if gap.gap_s:
        tool = one.tool[-1] if one.tool else "gap"
        told = {"tier": one.decision.tier, "end": gap.end.value, "saved_s": gap.saved_s}
        yield slice_of(tool, times.end_s, times.end_s + gap.gap_s, **told)
        if pin.end is not None and pin.held_s:
            held_s = times.end_s + min(pin.held_s, gap.gap_s)
            yield slice_of("pinned", times.end_s, held_s, blocks=pin.blocks, end=pin.end.value)


def _counters(turns: Iterable[TurnRecord]) -> Iterator[Event]:
    changes = list[tuple[float, str, int]]()
    for one in turns:
        for name, source in _TIERS.items():
            if count := getattr(one.tokens, source):
                changes.append((one.arrived + (one.times.admitted_s or 0.0), name, count))
        if one.pin.blocks:
            changes.append((one.ended, _PINNED, one.pin.blocks))
            changes.append((one.ended + one.pin.held_s, _PINNED, -one.pin.blocks))
    so_far = dict.fromkeys([*_TIERS, _PINNED], 0)
    for at, name, more in sorted(changes):
        so_far[name] += more
        unit = "blocks" if name == _PINNED else "tokens"
        args = {unit: so_far[name]}
        if math.isfinite(at):
            yield {"ph": "C", "pid": TIERS, "name": name, "ts": round(1e6 * at), "args": args}
