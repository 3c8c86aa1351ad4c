"""Answers of the routes, read into readings without trusting their form.

Fields of answers, read without trusting their form.

Text from elsewhere, made harmless for a terminal.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered_kv.top.readings import (
    CpuReading,
    Decided,
    EngineReading,
    JobCounts,
    JobReading,
    Kind,
    LowerReading,
    Place,
    State,
    Transfer,
    VramReading,
)

MOST_CHARS = 200
"""Characters that are kept of a text, unless more are asked for."""
_FROM_THE_RIGHT = frozenset({"R", "AL", "AN"})
"""Classes of characters that a terminal may write from right to left, with what is beside them."""
_ABOVE = frozenset({"Mn", "Me"})
"""Categories of marks that are written over what is before them."""


def harmless(text: str, most: int = MOST_CHARS) -> str:
    """The text, or its beginning, with escapes for what is not plainly shown.

    Escaped is what moves the cursor, has no width, is written over other text, or is written from
    right to left.

    Args:
        most: characters that are kept of it.
    """
    shown = "".join(char if _is_plain(char) else _escaped(char) for char in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def _is_plain(char: str) -> bool:
    if char.isascii():
        return char.isprintable()
    return (
        char.isprintable()
        and unicodedata.category(char) not in _ABOVE
        and unicodedata.bidirectional(char) not in _FROM_THE_RIGHT
    )


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


Object = Mapping[str, Any]


class AnswerError(Exception):
    """An answer in another form than this version's."""


def parsed(text: str) -> Any:
    """The JSON that a text holds.

    Raises:
        AnswerError: it holds none; as the other functions here, for what is not as expected.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnswerError("no JSON") from error


def as_object(found: Any) -> Object:
    """The same, if it is an object."""
    if not isinstance(found, dict):
        raise AnswerError("no object")
    return found


def part(said: Object, name: str) -> Object:
    """An object in another."""
    return as_object(said.get(name))


def list_of(said: Object, name: str) -> list[Any]:
    """A list."""
    found = said.get(name)
    if not isinstance(found, list):
        raise AnswerError(f"{name} is no list")
    return found


def text_of(said: Object, name: str, most: int = MOST_CHARS) -> str:
    """A text, made harmless: so many characters of it."""
    found = said.get(name)
    if not isinstance(found, str):
        raise AnswerError(f"{name} is no text")
    return harmless(found, most)


def whole(said: Object, name: str) -> int:
    """A whole number."""
    found = said.get(name)
    if not isinstance(found, int) or abs(found) >> 63:
        raise AnswerError(f"{name} is no whole number")
    return found


def number(said: Object, name: str) -> float:
    """A number."""
    found = said.get(name)
    if isinstance(found, float) and math.isfinite(found):
        return found
    if isinstance(found, float):
        raise AnswerError(f"{name} is no number")
    return float(whole(said, name))


def numbers(said: Object) -> dict[str, float]:
    """All fields, if they are numbers."""
    return {name: number(said, name) for name in said}


def moment(said: Object, name: str) -> float | None:
    """A number, or None where null stands for none."""
    if name not in said:
        raise AnswerError(f"{name} is missing")
    return None if said[name] is None else number(said, name)


MOST_OF_SENTENCE = 4_000
"""Characters that are kept of a refusal: it may name all that a snapshot needs."""
_CURSOR = re.compile(r"([0-9]{1,6})\.([0-9]{1,18})")


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Place of a job in the list of all: that of the engine, then of the job there."""

    engine: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"{self.engine}.{self.number}"


@dataclass(frozen=True, slots=True)
class Status:
    """Answer of ``/tiered_kv/status``."""

    version: str
    vllm_version: str
    engines: tuple[EngineReading, ...]


@dataclass(frozen=True, slots=True)
class JobPage:
    """Answer of ``/tiered_kv/jobs``; ``next`` if there may be more."""

    known: int
    jobs: tuple[JobReading, ...]
    next: Cursor | None


def read_status(text: str) -> Status:
    """Read a status.

    Raises:
        AnswerError: it is none.
    """
    said = as_object(parsed(text))
    engines = tuple(map(_engine, list_of(said, "engines")))
    if not engines:
        raise AnswerError("no engine")
    return Status(text_of(said, "version"), text_of(said, "vllm_version"), engines)


def read_jobs(text: str) -> JobPage:
    """Read a page of jobs.

    Raises:
        AnswerError: it is none.
    """
    said = as_object(parsed(text))
    jobs = tuple(map(_job, list_of(said, "jobs")))
    return JobPage(whole(said, "known"), jobs, _next(said.get("next")))


def read_refusal(text: str) -> str:
    """The sentence of a refusal of the routes; empty if there is none."""
    try:
        return text_of(part(as_object(parsed(text)), "error"), "message", MOST_OF_SENTENCE)
    except AnswerError:
        return ""


def is_of_vllm(text: str) -> bool:
    """True for an error of vLLM's own: it has a type, and a refusal of the routes has none."""
    try:
        return "type" in part(as_object(parsed(text)), "error")
    except AnswerError:
        return False


def _engine(found: Any) -> EngineReading:
    said = as_object(found)
    tiers = [as_object(one) for one in list_of(said, "tiers")]
    by_name = {text_of(one, "tier"): one for one in tiers}
    vram, cpu = part(by_name, "vram"), part(by_name, "cpu")
    return EngineReading(
        engine=whole(said, "engine"),
        now=number(said, "now"),
        policy=text_of(said, "policy"),
        vram=VramReading(
            blocks=whole(vram, "blocks"),
            free=whole(vram, "free_blocks"),
            findable=whole(vram, "cached_blocks"),
            pinned=whole(vram, "pinned_blocks"),
            nbytes=whole(vram, "bytes"),
        ),
        cpu=CpuReading(
            slots=whole(cpu, "slots"),
            free_slots=whole(cpu, "free_slots"),
            compressed_slots=whole(cpu, "compressed_slots"),
            pages=whole(cpu, "pages"),
            compressed_pages=whole(cpu, "compressed_pages"),
            nbytes=whole(cpu, "bytes"),
        ),
        below=tuple(_lower(one) for name, one in by_name.items() if name not in ("vram", "cpu")),
        jobs=_counts(part(said, "jobs"), part(said, "queues"), part(said, "pins")),
        transfers={
            harmless(kind): _transfer(as_object(one))
            for kind, one in part(said, "transfers").items()
        },
        decided=_decided(part(said, "decisions")),
        counters=numbers(part(said, "counters")),
    )


def _lower(said: Object) -> LowerReading:
    ends = None if said.get("bytes") is None else whole(said, "bytes")
    used = whole(said, "used_bytes")
    return LowerReading(text_of(said, "tier"), whole(said, "pages"), ends, used)


def _counts(jobs: Object, queues: Object, pins: Object) -> JobCounts:
    return JobCounts(
        known=whole(jobs, "known"),
        waiting=whole(jobs, "waiting"),
        running=whole(queues, "running"),
        queued=whole(queues, "queued"),
        held=whole(queues, "held"),
        pins=whole(pins, "jobs"),
        pinned_blocks=whole(pins, "blocks"),
        most_pinned=whole(pins, "most_blocks"),
        expected_up=whole(queues, "prefetches"),
    )


def _transfer(said: Object) -> Transfer:
    return Transfer(whole(said, "orders"), whole(said, "pages"))


def _decided(said: Object) -> Decided:
    counts = [as_object(one) for one in list_of(said, "counts")]
    return Decided(moment(said, "since"), {_kind(one): whole(one, "count") for one in counts})


def _kind(said: Object) -> Kind:
    gap_class = None if said.get("class") is None else text_of(said, "class")
    return Kind(gap_class, text_of(said, "tier"))


def _job(found: Any) -> JobReading:
    said = as_object(found)
    kv, forecast, decision = part(said, "kv"), said.get("forecast"), said.get("decision")
    quantiles = {} if forecast is None else as_object(forecast)
    try:
        state, place = State(text_of(said, "state")), Place(text_of(kv, "where"))
    except ValueError as error:
        raise AnswerError(str(error)) from error
    return JobReading(
        name=text_of(said, "id"),
        engine=whole(said, "engine"),
        number=whole(said, "number"),
        turn=whole(said, "turn"),
        state=state,
        since=moment(said, "since"),
        context_tokens=whole(said, "context_tokens"),
        place=place,
        pinned_blocks=whole(kv, "pinned_blocks"),
        until=moment(kv, "until"),
        back_at=moment(kv, "back_at"),
        q50_s=moment(quantiles, "q50_s") if quantiles else None,
        q90_s=moment(quantiles, "q90_s") if quantiles else None,
        kind=None if decision is None else _kind(as_object(decision)),
    )


def _next(found: Any) -> Cursor | None:
    if found is None:
        return None
    matched = _CURSOR.fullmatch(found) if isinstance(found, str) else None
    if matched is None:
        raise AnswerError("next is no place")
    return Cursor(int(matched[1]), int(matched[2]))
