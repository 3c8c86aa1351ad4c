"""Answers of the routes, read into readings without trusting their form."""

from __future__ import annotations

import json
import math
import re
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

from .safe_text import harmless

Object = Mapping[str, Any]
_CURSOR = re.compile(r"([0-9]{1,6})\.([0-9]{1,18})")


class AnswerError(Exception):
    """An answer in another form than this version's."""


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
    said = _object(_parsed(text))
    engines = tuple(map(_engine, _list(said, "engines")))
    if not engines:
        raise AnswerError("no engine")
    return Status(_text(said, "version"), _text(said, "vllm_version"), engines)


def read_jobs(text: str) -> JobPage:
    """Read a page of jobs.

    Raises:
        AnswerError: it is none.
    """
    said = _object(_parsed(text))
    jobs = tuple(map(_job, _list(said, "jobs")))
    return JobPage(_int(said, "known"), jobs, _next(said.get("next")))


def read_refusal(text: str) -> str:
    """The sentence of a refusal of the routes; empty if there is none."""
    try:
        return _text(_part(_object(_parsed(text)), "error"), "message")
    except AnswerError:
        return ""


def _engine(found: Any) -> EngineReading:
    said = _object(found)
    tiers = [_object(one) for one in _list(said, "tiers")]
    by_name = {_text(one, "tier"): one for one in tiers}
    vram, cpu = _part(by_name, "vram"), _part(by_name, "cpu")
    return EngineReading(
        engine=_int(said, "engine"),
        now=_number(said, "now"),
        policy=_text(said, "policy"),
        vram=VramReading(
            blocks=_int(vram, "blocks"),
            free=_int(vram, "free_blocks"),
            findable=_int(vram, "cached_blocks"),
            pinned=_int(vram, "pinned_blocks"),
            nbytes=_int(vram, "bytes"),
        ),
        cpu=CpuReading(
            slots=_int(cpu, "slots"),
            free_slots=_int(cpu, "free_slots"),
            compressed_slots=_int(cpu, "compressed_slots"),
            pages=_int(cpu, "pages"),
            compressed_pages=_int(cpu, "compressed_pages"),
            nbytes=_int(cpu, "bytes"),
        ),
        below=tuple(_lower(one) for name, one in by_name.items() if name not in ("vram", "cpu")),
        jobs=_counts(_part(said, "jobs"), _part(said, "queues"), _part(said, "pins")),
        transfers={
            harmless(kind): _transfer(_object(one))
            for kind, one in _part(said, "transfers").items()
        },
        decided=_decided(_part(said, "decisions")),
        counters=_numbers(_part(said, "counters")),
    )


def _lower(said: Object) -> LowerReading:
    ends = None if said.get("bytes") is None else _int(said, "bytes")
    return LowerReading(_text(said, "tier"), _int(said, "pages"), ends, _int(said, "used_bytes"))


def _counts(jobs: Object, queues: Object, pins: Object) -> JobCounts:
    return JobCounts(
        known=_int(jobs, "known"),
        waiting=_int(jobs, "waiting"),
        running=_int(queues, "running"),
        queued=_int(queues, "queued"),
        held=_int(queues, "held"),
        pins=_int(pins, "jobs"),
        pinned_blocks=_int(pins, "blocks"),
        most_pinned=_int(pins, "most_blocks"),
        expected_up=_int(queues, "prefetches"),
    )


def _transfer(said: Object) -> Transfer:
    return Transfer(_int(said, "orders"), _int(said, "pages"))


def _decided(said: Object) -> Decided:
    counts = {_kind(_object(one)): _int(_object(one), "count") for one in _list(said, "counts")}
    return Decided(_moment(said, "since"), counts)


def _kind(said: Object) -> Kind:
    gap_class = None if said.get("class") is None else _text(said, "class")
    return Kind(gap_class, _text(said, "tier"))


def _job(found: Any) -> JobReading:
    said = _object(found)
    kv, forecast, decision = _part(said, "kv"), said.get("forecast"), said.get("decision")
    quantiles = {} if forecast is None else _object(forecast)
    try:
        state, place = State(_text(said, "state")), Place(_text(kv, "where"))
    except ValueError as error:
        raise AnswerError(str(error)) from error
    return JobReading(
        name=_text(said, "id"),
        engine=_int(said, "engine"),
        number=_int(said, "number"),
        turn=_int(said, "turn"),
        state=state,
        since=_moment(said, "since"),
        context_tokens=_int(said, "context_tokens"),
        place=place,
        pinned_blocks=_int(kv, "pinned_blocks"),
        until=_moment(kv, "until"),
        back_at=_moment(kv, "back_at"),
        q50_s=_moment(quantiles, "q50_s") if quantiles else None,
        q90_s=_moment(quantiles, "q90_s") if quantiles else None,
        kind=None if decision is None else _kind(_object(decision)),
    )


def _next(found: Any) -> Cursor | None:
    if found is None:
        return None
    matched = _CURSOR.fullmatch(found) if isinstance(found, str) else None
    if matched is None:
        raise AnswerError("next is no place")
    return Cursor(int(matched[1]), int(matched[2]))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnswerError("no JSON") from error


def _object(found: Any) -> Object:
    if not isinstance(found, dict):
        raise AnswerError("no object")
    return found


def _part(said: Object, name: str) -> Object:
    return _object(said.get(name))


def _list(said: Object, name: str) -> list[Any]:
    found = said.get(name)
    if not isinstance(found, list):
        raise AnswerError(f"{name} is no list")
    return found


def _text(said: Object, name: str) -> str:
    found = said.get(name)
    if not isinstance(found, str):
        raise AnswerError(f"{name} is no text")
    return harmless(found)


def _int(said: Object, name: str) -> int:
    found = said.get(name)
    if not isinstance(found, int) or abs(found) >> 63:
        raise AnswerError(f"{name} is no whole number")
    return found


def _number(said: Object, name: str) -> float:
    found = said.get(name)
    if isinstance(found, float) and math.isfinite(found):
        return found
    if isinstance(found, float):
        raise AnswerError(f"{name} is no number")
    return float(_int(said, name))


def _numbers(said: Object) -> dict[str, float]:
    return {name: _number(said, name) for name in said}


def _moment(said: Object, name: str) -> float | None:
    """A number, or None where null stands for none."""
    if name not in said:
        raise AnswerError(f"{name} is missing")
    return None if said[name] is None else _number(said, name)
