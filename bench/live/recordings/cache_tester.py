"""Traces of kv-cache-tester (github.com/callanjfox/kv-cache-tester), as published. Each request has
its token counts and the hashes of its prompt's blocks. Sub-agents are nested in their session.

Some sessions contain every request twice, once streamed and once not. Of two consecutive requests
with the same prompt, only the second counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.recorded_rows import (
    RecordingError,
    Row,
    common_blocks,
    gap_between,
    hashes,
    identity,
    known,
    read_rows,
    real,
    rows_in,
    text,
    whole,
)
from tiered_kv.bench.sim.workloads.recorded import workload_of
from tiered_kv.bench.sim.workloads.workload import Workload

BLOCK = 64
"""Tokens per block in traces that do not specify it."""
MOST_HASHED = 2.0
"""Maximum tokens represented by the hashes, as a multiple of the prompts' tokens. Hashes and counts
may come from different tokenizers, but a larger ratio means that the block size is wrong."""


def tester_traces(path: Path) -> Workload:
    """Read the jobs of a trace, of a file with one trace per line, or of a folder of ``*.json``
    files, gzipped or not.

    Raises:
        RecordingError: a file cannot be read or is not such a trace, or there is no job.
    """
    paths = [path]
    if path.is_dir():
        paths = sorted(one for one in path.iterdir() if one.name.endswith((".json", ".json.gz")))
    if not paths:
        raise RecordingError(f"{path} contains no *.json or *.json.gz files: pass a recording")
    sessions = [session for one in paths for session in read_rows(one, _session)]
    return workload_of(sessions, path.name)


def _session(trace: Row) -> dict[str, Any]:
    """Convert a session to the form that ``recorded`` reads, which has gaps and shared tokens
    instead of times and hashes.
    """
    block = known(trace, "block_size", whole) or BLOCK
    requests = rows_in(trace, "requests")
    _check_blocks(requests, block)
    return {"id": known(trace, "id", identity), "reqs": _rows(requests, block)}


def _check_blocks(requests: Sequence[Row], block: int) -> None:
    """Raise ``ValueError`` if the hashes represent more than ``MOST_HASHED`` times the prompts'
    tokens.
    """
    counted = [one for one in requests if one.get("hash_ids") and one.get("in") is not None]
    tokens = sum(whole(one, "in") for one in counted)
    hashed = block * sum(len(hashes(one)) for one in counted)
    if hashed > MOST_HASHED * (tokens + block * len(counted)):
        raise ValueError(
            f"at {block} tokens each, its hash_ids stand for {hashed:,} tokens instead of "
            f"{tokens:,}: "
            "set the right block_size"
        )


def _rows(requests: Sequence[Row], block: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before: Row | None = None
    for request in _once(requests):
        if text(request, "type") == "subagent":
            rows.append(_agent(request, block))
            continue
        rows.append(
            {
                "in": request.get("in"),
                "out": request.get("out"),
                "lcp": block * common_blocks(hashes(before), hashes(request)) if before else 0,
                "gap": _gap_s(before, request),
                "stop": request.get("stop"),
            }
        )
        before = request
    return rows


def _once(requests: Sequence[Row]) -> Iterator[Row]:
    """Yield the requests, except those whose prompt the next request repeats."""
    for at, request in enumerate(requests):
        later = requests[at + 1] if at + 1 < len(requests) else {}
        sent = request.get("hash_ids")
        if not sent or sent != later.get("hash_ids"):
            yield request


def _agent(request: Row, block: int) -> dict[str, Any]:
    asked = rows_in(request, "requests")
    took_ms = known(request, "duration_ms", real)
    if took_ms is None and asked:
        ended_s = real(asked[-1], "t") + (known(asked[-1], "api_time", real) or 0.0)
        took_ms = 1e3 * max(0.0, ended_s - real(asked[0], "t"))
    name = request.get("agent_id") or f"agent at {request.get('t')}"
    return {"k": "sub", "id": name, "dur_ms": took_ms, "reqs": _rows(asked, block)}


def _gap_s(before: Row | None, request: Row) -> float:
    if before is None:
        return 0.0
    thought_s = known(request, "think_time", real)
    if thought_s is not None:
        return thought_s
    apart_s = max(0.0, real(request, "t") - real(before, "t"))
    took_s = known(before, "api_time", real)
    if took_s is not None:
        return max(0.0, apart_s - took_s)
    return gap_between(apart_s, known(before, "out", whole) or 0)
