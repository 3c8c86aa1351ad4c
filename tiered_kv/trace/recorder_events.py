"""Export of a trace in the shape of Continuum's recorder, its file ``scheduler_timestamps``.

That is one JSON object: a list of events for each job, each event an object with its moment, in
seconds since the epoch, under its name. All seven names of the recorder are written. Of a request
that was preempted more than ``FIRST_PREEMPTIONS`` times, the later times are not in the trace.
"""

from __future__ import annotations

from collections.abc import Iterable

from .turn_record import TurnRecord

Event = dict[str, float | int]


def recorder_events(records: Iterable[TurnRecord]) -> dict[str, list[Event]]:
    """Events by job, those of a job in their order. Turns of no job are left out, and jobs of one
    name are one, as there."""
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
