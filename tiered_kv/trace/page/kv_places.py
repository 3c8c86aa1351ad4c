"""Places of jobs' KV over time, as far as they can be derived from a trace.

A trace records when KV was pinned, and in which tiers a turn found it at admission. Between these
times, the KV is assumed to be where the job's next turn found most of it or, without a next turn,
in the tier that was decided for it.

This module also chooses the jobs that get a lane, and computes the bars of their turns and their
KV. The number of lanes on a page is limited: the slowest jobs, and an even sample of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tiered_kv.trace.traced_jobs import TracedJobs
from tiered_kv.trace.turn_table import Column, TurnTable


class Place(Enum):
    """Place of a job's KV."""

    RUNNING = "in VRAM, in use by a turn"
    PINNED = "in VRAM, pinned"
    VRAM = "in VRAM, not pinned"
    CPU = "in CPU memory"
    SSD = "on SSD"
    NOWHERE = "nowhere"
    UNKNOWN = "not known"


PLACES = tuple(Place)
_FOUND = {
    "tokens.vram": Place.VRAM,
    "tokens.cpu": Place.CPU,
    "tokens.ssd": Place.SSD,
    "tokens.lost": Place.NOWHERE,
}
"""Fields of the next turn's record that show where the KV was."""
_MEANT = {"cpu": Place.CPU, "store": Place.SSD, "drop": Place.NOWHERE}
"""Places by decision, for KV that no later turn looked up."""


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """Periods (stays) in which the KV of a turn's context was in one place. All columns have shape
    (stays,).

    Attributes:
        row: row, in the table of turns, of the turn whose KV stays.
        place: index in ``PLACES``.
        begin, end: start and end of the stay, seconds after the first arrival of the trace.
    """

    row: Column
    place: Column
    begin: Column
    end: Column

    @classmethod
    def of(cls, table: TurnTable, jobs: TracedJobs) -> Stays:
        """Return the stays of all jobs' turns. A turn's stays last until the next turn is
        admitted, or ends without admission. The stays of a job's last turn last until its gap ends.
        """
        rows = jobs.rows
        if not len(rows):
            return cls(*[np.zeros(0, int)] * 2, *[np.zeros(0)] * 2)
        arrived = table["arrived"][rows] - table["arrived"].min()
        end_s = table["times.end_s"][rows].astype(float)
        admitted_s = table["times.admitted_s"][rows].astype(float)
        ended = arrived + end_s
        waited_s = np.where(np.isnan(admitted_s), end_s, admitted_s)
        until = ended + table["gap.gap_s"][rows]  # NaN without a gap
        later = jobs.followed & ~np.isnan(until)
        until[later] = np.maximum(until, np.roll(arrived + waited_s, -1))[later]
        pinned_s = np.where(table.says("pin.end", None)[rows], 0.0, table["pin.held_s"][rows])
        rests_from = ended + np.clip(pinned_s, 0.0, np.nan_to_num(until - ended))
        place = _resting_place(table, jobs)
        ahead = (table["pages.ahead"][rows] > 0) & table.says("decision.tier", "store")[rows]
        back = ended + table["decision.back_s"][rows]
        comes_up = ahead & (place == PLACES.index(Place.CPU)) & (back > rests_from)
        up_at = np.where(comes_up, np.minimum(back, until), rests_from)
        parts: list[tuple[Any, Column, Column]] = [
            (PLACES.index(Place.RUNNING), arrived + admitted_s, ended),
            (PLACES.index(Place.PINNED), ended, rests_from),
            (PLACES.index(Place.SSD), rests_from, up_at),
            (place, up_at, until),
        ]
        whole = cls(
            row=np.tile(rows, len(parts)),
            place=np.concatenate([np.broadcast_to(place, len(rows)) for place, _, _ in parts]),
            begin=np.concatenate([begin for _, begin, _ in parts]),
            end=np.concatenate([end for _, _, end in parts]),
        )
        return whole.among(whole.end > whole.begin)

    def among(self, chosen: Column) -> Stays:
        """Return the selected stays.

        Args:
            chosen: a mask, or indices.
        """
        return Stays(self.row[chosen], self.place[chosen], self.begin[chosen], self.end[chosen])


def _resting_place(table: TurnTable, jobs: TracedJobs) -> Column:
    """Return the place of each turn's KV while it is not pinned, as an index in ``PLACES``."""
    rows = jobs.rows
    place = np.full(len(rows), PLACES.index(Place.UNKNOWN))
    for tier, meant in _MEANT.items():
        place[table.says("decision.tier", tier)[rows]] = PLACES.index(meant)
    found = np.stack([np.roll(table[name][rows], -1) for name in _FOUND])
    seen = jobs.followed & (found.max(axis=0) > 0)
    by_field = np.array([PLACES.index(one) for one in _FOUND.values()])
    place[seen] = by_field[found.argmax(axis=0)][seen]
    return place


MOST_LANES = 40
"""Maximum number of jobs that are drawn."""
MOST_TURNS = 6_000
"""Maximum number of turns that are drawn, in all lanes together."""
APART = 12
"""Ratio of a trace's length to the jobs' median completion time above which the time of each lane
starts with its job."""


class Phase(Enum):
    """Phase of a turn."""

    WAITING = "waits"
    RESTORING = "restores"
    COMPUTING = "computes its prompt"
    ANSWERING = "answers"


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """Bars of one type. All columns have shape (bars,).

    Attributes:
        lane: index of the lane, from 0.
        begin, end: start and end of the bar, seconds on the lanes' axis.
        turn: number of the turn in its job.
    """

    lane: Column
    begin: Column
    end: Column
    turn: Column


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Lanes of a trace, ordered by the start of their jobs.

    Attributes:
        job: index of each lane's job. Shape (lanes,).
        began: start of each lane's job, seconds after the first arrival.
        drawn: number of turns that are drawn in each lane, the first turns of the job.
        slowest: number of lanes chosen because their jobs took longest; 0 if all jobs have lanes.
        left_out: number of jobs without a lane.
        apart: True if the time of each lane starts with its job, False if it starts with the trace.
        bars: bars by the phase of the turn, or by the place of the KV.
    """

    job: Column
    began: Column
    drawn: Column
    slowest: int
    left_out: int
    apart: bool
    bars: Mapping[Phase | Place, Bars]

    @classmethod
    def of(cls, table: TurnTable, jobs: TracedJobs, stays: Stays) -> Lanes:
        """Choose the lanes of a trace, and compute their bars."""
        arrived = table["arrived"] - table["arrived"].min(initial=np.inf)
        begins = arrived[jobs.rows[jobs.begins]]
        job, slowest = _chosen(jobs, begins)
        drawn = np.minimum(jobs.turns[job], MOST_TURNS // max(len(job), 1)).astype(int)
        lane_of = np.full(len(table), -1)
        for lane, (one, count) in enumerate(zip(job.tolist(), drawn.tolist(), strict=True)):
            first = jobs.begins[one]
            lane_of[jobs.rows[first : first + count]] = lane
        span_s = float((arrived + table["times.end_s"]).max(initial=0.0))
        apart = bool(len(job)) and span_s > APART * float(np.median(jobs.completion_s[job]))
        origin = begins[job] if apart else np.zeros(len(job))

        def bars(rows: Column, begin: Column, end: Column) -> Bars:
            lane = lane_of[rows]
            since = origin[lane] if len(lane) else 0.0
            return Bars(lane, begin - since, end - since, table["turn"][rows])

        turns = _phases(table, np.flatnonzero(lane_of >= 0), arrived, bars)
        return cls(
            job=job,
            began=begins[job],
            drawn=drawn,
            slowest=slowest,
            left_out=len(begins) - len(job),
            apart=apart,
            bars=dict([*_places(stays, lane_of, bars), *turns]),
        )


def _chosen(jobs: TracedJobs, begins: Column) -> tuple[Column, int]:
    """Return the jobs to draw, ordered by start, and the number of jobs chosen as the slowest."""
    order = np.argsort(begins, kind="stable")
    if len(order) <= MOST_LANES:
        return order, 0
    longest = np.where(jobs.whole.astype(bool), jobs.completion_s, -1.0)
    slow = np.argsort(-longest, kind="stable")[: MOST_LANES // 2]
    others = order[~np.isin(order, slow)]
    at = np.linspace(0, len(others) - 1, MOST_LANES - len(slow)).round().astype(int)
    chosen = np.concatenate([slow, others[at]])
    return chosen[np.argsort(begins[chosen], kind="stable")], len(slow)


def _places(
    stays: Stays, lane_of: Column, bars: Callable[[Column, Column, Column], Bars]
) -> Iterator[tuple[Place, Bars]]:
    """Yield the bars that show where KV was kept while no turn used it."""
    drawn = stays.among(lane_of[stays.row] >= 0)
    for index, place in enumerate(PLACES):
        if place is not Place.RUNNING:
            some = drawn.among(drawn.place == index)
            yield place, bars(some.row, some.begin, some.end)


def _phases(
    table: TurnTable, rows: Column, arrived: Column, bars: Callable[[Column, Column, Column], Bars]
) -> Iterator[tuple[Phase, Bars]]:
    """Yield the bars of each phase of turns. A phase whose end is unknown gets all the remaining
    time of the turn."""
    end_s = table["times.end_s"][rows].astype(float)
    names = ("times.admitted_s", "times.scheduled_s", "times.first_token_s")
    ends = [table[name][rows].astype(float) for name in names]
    begin_s = np.zeros(len(rows))
    for phase, known in zip(Phase, [*ends, end_s], strict=True):
        until_s = np.minimum(np.where(np.isnan(known), end_s, known), end_s)
        until_s = np.maximum(until_s, begin_s)
        some = until_s > begin_s
        begin, end = arrived[rows] + begin_s, arrived[rows] + until_s
        yield phase, bars(rows[some], begin[some], end[some])
        begin_s = until_s
