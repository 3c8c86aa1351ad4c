"""Sources of each turn's prompt, by the connector's trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from tiered_kv.trace.trace_reader import TraceReader

from .player import request_id
from .results import JobDone

# vLLM puts the kind of request, the prompt's number and a random suffix around a client's name.
_REQUEST_ID = re.compile(r"cmpl-(?P<name>.*)-0-[0-9a-f]{8}", re.DOTALL)


def with_sources(jobs: Iterable[JobDone], trace: Path) -> tuple[JobDone, ...]:
    """The jobs, with ``sources`` of those turns that the trace holds: tokens by vram, cpu, ssd and
    recomputed, which add up to the prompt.

    Requests are known by the names that ``drive`` gives them; when several in the trace have the
    same, the last counts. The connector writes of a turn when the next one arrives: let it end
    first, or the last turns may be missing. A line that was cut off is passed over.

    Raises:
        OSError: the trace cannot be read.
    """
    found = _by_request(trace)
    return tuple(
        replace(
            job,
            turns=tuple(
                replace(turn, sources=found.get(request_id(job.name, turn.turn), {}))
                for turn in job.turns
            ),
        )
        for job in jobs
    )


def client_name(request: str) -> str | None:
    """The name that a client gave its request, by vLLM's id of it; None if it gave none."""
    named = _REQUEST_ID.fullmatch(request)
    return named["name"] if named else None


def _by_request(trace: Path) -> Mapping[str, Mapping[str, int]]:
    found = {}
    for one in sorted(TraceReader(trace), key=attrgetter("arrived")):
        name = client_name(one.request)
        if name is not None:
            tokens = one.tokens
            found[name] = {
                "vram": tokens.vram,
                "cpu": tokens.cpu,
                "ssd": tokens.ssd,
                "recomputed": tokens.recomputed,
            }
    return found
