"""Queries of the routes' URLs, read without trusting them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .refusals import Refusal

DEFAULT_LIMIT = 100
"""Jobs in a page unless the query says otherwise."""
MOST_LIMIT = 1000
"""Jobs in a page, at most."""

_CURSOR = re.compile(r"([0-9]{1,6})\.([0-9]{1,18})")
_LIMIT = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Place of a job in the list of all: that of the engine, then of the job there."""

    engine: int
    number: int

    def __str__(self) -> str:
        return f"{self.engine}.{self.number}"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the list of jobs: ``limit`` of them, ``after`` one that was listed."""

    limit: int = DEFAULT_LIMIT
    after: Cursor = Cursor(0, 0)


def read_page(query: Mapping[str, str]) -> Page:
    """Read what page of the list is wanted.

    Raises:
        Refusal: there is no such page.
    """
    read_nothing({name: "" for name in query if name not in ("limit", "after")})
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= MOST_LIMIT:
        raise Refusal(400, f"limit is a number of jobs from 1 to {MOST_LIMIT}.")
    found = _CURSOR.fullmatch(query.get("after", "0.0"))
    if found is None:
        raise Refusal(400, "after is what the page before gave as next, such as 0.57.")
    return Page(int(limit), Cursor(int(found[1]), int(found[2])))


def read_nothing(query: Mapping[str, str]) -> None:
    """Read a query that must be empty.

    Raises:
        Refusal: it is not.
    """
    if query:
        raise Refusal(400, "The query has a name that is not known here: leave it out.")
