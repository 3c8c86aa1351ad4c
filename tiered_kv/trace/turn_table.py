"""A trace as columns of numbers. A million turns take about 270 MB."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .turn_record import TurnRecord

Column = NDArray[Any]

_NUMBERS = {
    "turn": "q",
    "arrived": "d",
    "times.held_s": "f",
    "times.pages_s": "f",
    "times.admitted_s": "f",
    "times.scheduled_s": "f",
    "times.first_token_s": "f",
    "times.end_s": "f",
    "tokens.prompt": "q",
    "tokens.vram": "q",
    "tokens.cpu": "q",
    "tokens.ssd": "q",
    "tokens.recomputed": "q",
    "tokens.lost": "q",
    "tokens.output": "q",
    "would_have.vram": "q",
    "would_have.cpu": "q",
    "would_have.ssd": "q",
    "decision.back_s": "f",
    "decision.q50_s": "f",
    "decision.q90_s": "f",
    "decision.benefit_s": "f",
    "decision.recompute_s": "f",
    "decision.vram_price": "f",
    "pin.held_s": "f",
    "pages.promoted": "q",
    "pages.promoted_bytes": "d",
    "pages.used": "q",
    "pages.ahead": "q",
    "pages.demoted": "q",
    "pages.superseded": "q",
    "gap.gap_s": "f",
    "gap.in_vram": "b",
    "gap.saved_s": "f",
    "gap.cost_s": "f",
}
"""Fields of a record, and the type codes of their columns. The value None becomes NaN."""
_WORDS = ("decision.tier", "decision.gap_class", "pin.end", "gap.end")
"""Fields with few distinct values, whose columns contain indices."""


class JobName(NamedTuple):
    """Identity of a job in a trace."""

    job: str
    client: str
    replica: int


class Names:
    """Distinct values and their indices. ``of[index]`` is the value of an index."""

    def __init__(self) -> None:
        self.of: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        """Return the index of a value. A new value gets a new index."""
        found = self._places.get(value)
        if found is None:
            found = self._places[value] = len(self.of)
            self.of.append(value)
        return found

    def find(self, value: Any) -> int:
        """Return the index of a value; -1, which no value has, if the value does not occur."""
        return self._places.get(value, -1)


class TurnTable:
    """The turn records of a trace as columns, in the order of the records. A column has the path of
    its field in ``TurnRecord`` as its name, such as ``gap.gap_s``.

    Attributes:
        jobs: the jobs and their indices.
        job: index of each turn's job in ``jobs``; -1 if the turn belongs to no job.
        tools: first elements of the records' ``tool``, and their indices.
        tool: index of each turn's tool in ``tools``.
        words: values of ``decision.tier``, ``decision.gap_class``, ``pin.end`` and ``gap.end``, by
            field.
    """

    def __init__(self, records: Iterable[TurnRecord]) -> None:
        self.jobs, self.tools = Names(), Names()
        self.words = {name: Names() for name in _WORDS}
        read = attrgetter(*_NUMBERS)
        read_words = attrgetter(*_WORDS)
        numbers: list[array[Any]] = [array(code) for code in _NUMBERS.values()]
        words = [array("i") for _ in _WORDS]
        names = list(self.words.values())
        job, tool = array("i"), array("i")
        for one in records:
            for column, value in zip(numbers, read(one), strict=True):
                column.append(math.nan if value is None else value)
            for column, known, value in zip(words, names, read_words(one), strict=True):
                column.append(known.place(value.value if isinstance(value, Enum) else value))
            known_job = one.job is not None
            job.append(self.jobs.place((one.job, one.client, one.replica)) if known_job else -1)
            tool.append(self.tools.place(one.tool[0] if one.tool else ""))
        self._columns = dict(zip(_NUMBERS, map(np.asarray, numbers), strict=True))
        self._columns |= dict(zip(_WORDS, map(np.asarray, words), strict=True))
        self.job, self.tool = np.asarray(job), np.asarray(tool)

    def __len__(self) -> int:
        return len(self.job)

    def __getitem__(self, name: str) -> Column:
        """Return the column of a field.

        Raises:
            KeyError: the table has no column for the field.
        """
        return self._columns[name]

    def job_name(self, place: int) -> JobName:
        """Return the identity of the job that has this index in ``jobs``."""
        return JobName(*self.jobs.of[place])

    def says(self, field: str, word: str | None) -> Column:
        """Return a mask of the turns whose ``field``, a key of ``words``, has the value ``word``.
        Shape (turns,)."""
        found: Column = self[field] == self.words[field].find(word)
        return found
