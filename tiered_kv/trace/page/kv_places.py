"""Places of jobs' KV over time, as far as a trace tells.

A trace says when KV was pinned, and where a turn found it as it was admitted. Between these moments
it is taken to have lain where the job's next turn found most of it; without a next turn, where it
was to wait.
"""

from __future__ import annotations

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
"""Fields of the next turn that tell where the KV lay."""
_MEANT = {"cpu": Place.CPU, "store": Place.SSD, "drop": Place.NOWHERE}
"""Decisions that tell where it lies if nobody looked."""


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """Stays of turns' KV in places. All columns have shape (stays,).

    Attributes:
        row: turn whose context it is, a row of the table.
        place: index in ``PLACES``.
        begin, end: seconds after the first arrival of the trace.
    """

    row: Column
    place: Column
    begin: Column
    end: Column

    @classmethod
    def of(cls, table: TurnTable, jobs: TracedJobs) -> Stays:
        """The stays of all jobs' turns. A stay ends when the next turn is admitted, or ends
        without that; the last one with its gap."""
        rows = jobs.rows
        if not len(rows):
            return cls(*[np.zeros(0, int)] * 2, *[np.zeros(0)] * 2)
        moments = _Moments.of(table, jobs)
        place = _resting_place(table, jobs)
        rests_from = moments.ended + moments.pinned_s
        ahead = (table["pages.ahead"][rows] > 0) & table.says("decision.tier", "store")[rows]
        back = moments.ended + table["decision.back_s"][rows]
        comes_up = ahead & (place == PLACES.index(Place.CPU)) & (back > rests_from)
        up_at = np.where(comes_up, np.minimum(back, moments.until), rests_from)
        parts: list[tuple[Any, Column, Column]] = [
            (PLACES.index(Place.RUNNING), moments.admitted, moments.ended),
            (PLACES.index(Place.PINNED), moments.ended, rests_from),
            (PLACES.index(Place.SSD), rests_from, up_at),
            (place, up_at, moments.until),
        ]
        whole = cls(
            row=np.tile(rows, len(parts)),
            place=np.concatenate([np.broadcast_to(place, len(rows)) for place, _, _ in parts]),
            begin=np.concatenate([begin for _, begin, _ in parts]),
            end=np.concatenate([end for _, _, end in parts]),
        )
        return whole.among(whole.end > whole.begin)

    def among(self, chosen: Column) -> Stays:
        """The stays that are chosen, by a mask or by their places."""
        return Stays(self.row[chosen], self.place[chosen], self.begin[chosen], self.end[chosen])


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Moments of turns in the order of ``TracedJobs.rows``, seconds after the first arrival.

    Attributes:
        admitted, ended: of the turn; NaN if it never was admitted.
        until: end of what is known of its KV; NaN if no gap followed.
        pinned_s: time from the end for which it was pinned.
    """

    admitted: Column
    ended: Column
    until: Column
    pinned_s: Column

    @classmethod
    def of(cls, table: TurnTable, jobs: TracedJobs) -> _Moments:
        rows = jobs.rows
        arrived = table["arrived"][rows] - table["arrived"].min()
        end_s = table["times.end_s"][rows].astype(float)
        admitted_s = table["times.admitted_s"][rows].astype(float)
        ended = arrived + end_s
        waited_s = np.where(np.isnan(admitted_s), end_s, admitted_s)
        until = ended + table["gap.gap_s"][rows]
        later = jobs.followed & ~np.isnan(until)
        until[later] = np.maximum(until, np.roll(arrived + waited_s, -1))[later]
        pinned_s = np.where(table.says("pin.end", None)[rows], 0.0, table["pin.held_s"][rows])
        pinned_s = np.clip(pinned_s, 0.0, np.nan_to_num(until - ended))
        return cls(arrived + admitted_s, ended, until, pinned_s)


def _resting_place(table: TurnTable, jobs: TracedJobs) -> Column:
    """Place of each turn's KV while it is not pinned, as an index in ``PLACES``."""
    rows = jobs.rows
    place = np.full(len(rows), PLACES.index(Place.UNKNOWN))
    for tier, meant in _MEANT.items():
        place[table.says("decision.tier", tier)[rows]] = PLACES.index(meant)
    found = np.stack([np.roll(table[name][rows], -1) for name in _FOUND])
    seen = jobs.followed & (found.max(axis=0) > 0)
    by_field = np.array([PLACES.index(one) for one in _FOUND.values()])
    place[seen] = by_field[found.argmax(axis=0)][seen]
    return place
