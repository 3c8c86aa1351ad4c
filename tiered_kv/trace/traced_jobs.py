"""Jobs of a trace, with statistics of their turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .turn_record import StoryEnd
from .turn_table import Column, TurnTable


@dataclass(frozen=True, slots=True, eq=False)
class TracedJobs:
    """Jobs, ordered by name and then by start. Columns have shape (jobs,), unless stated otherwise.

    A job is a sequence of turns that one engine treated as one job. If a turn number under a name
    is not higher than the previous one, another job begins.

    Attributes:
        name: index in ``TurnTable.jobs``.
        number: 0 for the first job of that name, 1 for the next.
        whole: True if the job's first turn is in the trace.
        waiting: True if the job was still expected when its engine stopped.
        turns: number of turns.
        completion_s: time from the arrival of the first turn to the end of the last turn, seconds.
        queue_s, first_token_s: waits for admission and for the first token, summed over the turns,
            seconds.
        recomputed: number of computed prompt tokens.
        rows: rows of the table, job by job, and by arrival within a job. Shape (turns,).
        begins: index in ``rows`` of each job's first turn.
    """

    name: Column
    number: Column
    whole: Column
    waiting: Column
    turns: Column
    completion_s: Column
    queue_s: Column
    first_token_s: Column
    recomputed: Column
    rows: Column
    begins: Column

    @property
    def followed(self) -> Column:
        """Mask of the turns in ``rows`` that are followed by another turn of the same job. Shape
        (turns,).
        """
        found = np.ones(len(self.rows), bool)
        found[self.begins - 1] = False
        return found

    @classmethod
    def of(cls, table: TurnTable) -> TracedJobs:
        """Group the turns of a trace by job. Turns that belong to no job are left out."""
        rows = np.flatnonzero(table.job >= 0)
        arrived, turn = table["arrived"], table["turn"]
        rows = rows[np.lexsort((turn[rows], arrived[rows], table.job[rows]))]
        name, turn, arrived = table.job[rows], turn[rows], arrived[rows]
        other = np.ones(len(rows), bool)
        other[1:] = name[1:] != name[:-1]
        first = other.copy()
        first[1:] |= turn[1:] <= turn[:-1]
        begins = np.flatnonzero(first)
        ends = np.append(begins[1:], len(rows)) - 1 if len(rows) else begins
        names = np.flatnonzero(other[begins])  # the first job of each name
        number = np.arange(len(begins)) - np.repeat(names, np.diff(np.append(names, len(begins))))

        def total(values: Column) -> Column:
            found: Column = np.add.reduceat(np.nan_to_num(values), begins)
            return found

        ended = arrived + table["times.end_s"][rows]
        if not len(rows):
            return cls(*[np.zeros(0)] * 9, *[np.zeros(0, int)] * 2)
        return cls(
            name=name[begins],
            number=number,
            whole=turn[begins] == 1,
            waiting=table.says("gap.end", StoryEnd.CLOSED.value)[rows][ends],
            turns=ends - begins + 1,
            completion_s=np.maximum.reduceat(ended, begins) - arrived[begins],
            queue_s=total(table["times.admitted_s"][rows].astype(float)),
            first_token_s=total(table["times.first_token_s"][rows].astype(float)),
            recomputed=total(table["tokens.recomputed"][rows].astype(float)),
            rows=rows,
            begins=begins,
        )
