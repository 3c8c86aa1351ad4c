"""The turns that waited longest for their first token, and the reasons in sentences."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tiered_kv.trace.job_story import secs
from tiered_kv.trace.turn_record import StoryEnd, TurnRecord

MOST = 10
"""Turns that are kept."""
MOST_JOBS = 8_192
"""Jobs whose last turn is remembered: an engine waits for no more."""
_TELLING = 0.05
"""Share of a wait from which on a reason is told."""


@dataclass(frozen=True, slots=True)
class WorstTurn:
    """A turn that waited long.

    Attributes:
        before: the job's turn before it; None if it is not known.
    """

    turn: TurnRecord
    before: TurnRecord | None

    @property
    def waited_s(self) -> float:
        """Seconds until its first token, or until its end if it had none."""
        return _waited_s(self.turn)

    def reasons(self) -> list[str]:
        """Reasons of its wait, the longest first, a sentence each."""
        parts = sorted(_parts(self), key=lambda part: -part[0])
        whole = max(self.waited_s, 1e-9)
        first, told = _first(self.turn), list[str]()
        for took_s, why in parts:
            if took_s / whole >= _TELLING:
                told.append(f"For {secs(took_s)} ({took_s / whole:.0%}) {why}.")
        return [first, *told]


class WorstTurns:
    """The worst turns of records that pass by. They take little memory, whatever their number."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, WorstTurn]] = []
        self._last: OrderedDict[tuple[object, ...], TurnRecord] = OrderedDict()
        self._seen = 0

    def watch(self, records: Iterable[TurnRecord]) -> Iterator[TurnRecord]:
        """Pass records on, and keep the worst."""
        for one in records:
            job = (one.job, one.client, one.replica)
            before = self._last.pop(job, None) if one.job is not None else None
            known = before if before is not None and before.turn < one.turn else None
            self._seen += 1
            entry = (_waited_s(one), -self._seen, WorstTurn(one, known))
            if len(self._heap) < MOST:
                heapq.heappush(self._heap, entry)
            elif entry[0] > self._heap[0][0]:
                heapq.heapreplace(self._heap, entry)
            if one.job is not None and one.gap.end is not StoryEnd.OVER:
                self._last[job] = one
                if len(self._last) > MOST_JOBS:
                    self._last.popitem(last=False)
            yield one

    def found(self) -> list[WorstTurn]:
        """The worst turns so far, the worst first."""
        return [entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _waited_s(one: TurnRecord) -> float:
    first_s = one.times.first_token_s
    return one.times.end_s if first_s is None else first_s


def _first(one: TurnRecord) -> str:
    if one.times.admitted_s is None:
        return f"It was never admitted, and ended after {secs(one.times.end_s)}."
    if one.times.first_token_s is None:
        return f"It ended after {secs(one.times.end_s)} without a first token."
    return f"Its first token came after {secs(one.times.first_token_s)}."


def _parts(worst: WorstTurn) -> Iterator[tuple[float, str]]:
    """Parts of the wait, seconds, and what each was for."""
    times, whole_s = worst.turn.times, worst.waited_s
    admitted_s = whole_s if times.admitted_s is None else times.admitted_s
    scheduled_s = whole_s if times.scheduled_s is None else times.scheduled_s
    yield times.held_s, "it was held, as there was no room for a new job"
    yield times.pages_s, "it waited for pages to come up from the tiers below CPU memory"
    yield admitted_s - times.held_s - times.pages_s, "it waited for blocks of VRAM"
    if times.admitted_s is not None:
        yield scheduled_s - admitted_s, _restored(worst.turn)
        yield whole_s - scheduled_s, _computed(worst)


def _restored(one: TurnRecord) -> str:
    count = one.tokens.cpu + one.tokens.ssd
    return f"its {count:,} tokens outside VRAM were restored" if count else "it waited for a step"


def _computed(worst: WorstTurn) -> str:
    tokens, before = worst.turn.tokens, worst.before
    what = f"it computed {tokens.recomputed:,} of its {tokens.prompt:,} prompt tokens"
    if not tokens.lost:
        return f"{what}, {tokens.new:,} of which were new" if tokens.new else what
    had = f"{what}, {tokens.lost:,} of which the job had had before"
    if before is None:
        return had
    pin = before.pin.end
    how = f"its pin ended ({pin.value})" if pin is not None else "it was not pinned"
    return f"{had}: its KV was lost in the gap of {secs(before.gap.gap_s or 0.0)}, where {how}"
