"""Adds to each turn the tiers that its prompt came from, as recorded in the connector's trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from tiered_kv.trace.trace_reader import TraceReader

from .player import request_id
from .results import JobDone

# vLLM adds the request type, the prompt's number and a random suffix to the client's request id.
_REQUEST_ID = re.compile(r"cmpl-(?P<name>.*)-0-[0-9a-f]{8}", re.DOTALL)


def with_sources(jobs: Iterable[JobDone], trace: Path) -> tuple[JobDone, ...]:
    """Return the jobs with the ``sources`` of each turn: the number of prompt tokens by vram, cpu,
    ssd and recomputed, which add up to the prompt. Turns that the trace does not contain get empty
    ``sources``.

    A turn's record is found by the request id that the player sent, or by its job and number. If a
    turn has several records, the last one counts. The connector records a turn when the next one
    arrives, so stop the server before the call, or the last turns may be missing. Truncated lines
    are skipped.

    Raises:
        OSError: the trace cannot be read.
    """
    found = dict[object, Mapping[str, int]]()
    for one in sorted(TraceReader(trace), key=attrgetter("arrived")):
        sources = {name: getattr(one.tokens, name) for name in ("vram", "cpu", "ssd", "recomputed")}
        found[client_name(one.request)] = found[one.job, one.turn] = sources
    found.pop(None, None)

    def of(job: str, turn: int) -> Mapping[str, int]:
        return found.get(request_id(job, turn)) or found.get((job, turn)) or {}

    return tuple(
        replace(
            job,
            turns=tuple(replace(turn, sources=of(job.name, turn.turn)) for turn in job.turns),
        )
        for job in jobs
    )


def client_name(request: str) -> str | None:
    """Return the part of vLLM's request id that a client of the completions route sent; None if the
    id has another form.
    """
    named = _REQUEST_ID.fullmatch(request)
    return named["name"] if named else None
