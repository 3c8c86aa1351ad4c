"""Traces of kv-cache-tester (github.com/callanjfox/kv-cache-tester), as they are published: of
every request its tokens and the hashes of its prompt's blocks, sub-agents in their places.

Some sessions were recorded with every request twice, once streamed and once not: of two in a row
with the same prompt the second counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.sim.workloads.recorded import workload_of
from tiered_kv.bench.sim.workloads.workload import Workload

from .between import gap_s

BLOCK = 64
"""Tokens of a block, where a trace does not say."""


def tester_traces(path: Path) -> Workload:
    """Jobs of a trace, of a file with one a line, or of a folder of ``*.json``.

    Raises:
        OSError, ValueError: it cannot be read, is no such trace, or has no job.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    try:
        traces = [trace for one in paths for trace in _traces(one)]
        sessions = [_session(trace) for trace in traces]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no traces of kv-cache-tester: {error!r}") from error
    return workload_of(sessions, path.name)


def _traces(path: Path) -> Iterator[Mapping[str, Any]]:
    text = path.read_text()
    try:
        yield json.loads(text)
    except ValueError:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())


def _session(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A session in the form that ``recorded`` reads: gaps and shared tokens in the place of times
    and hashes."""
    block = trace.get("block_size") or BLOCK
    return {"id": trace["id"], "reqs": _rows(trace["requests"], block)}


def _rows(requests: Sequence[Mapping[str, Any]], block: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before: Mapping[str, Any] | None = None
    for request in _once(requests):
        if request["type"] == "subagent":
            rows.append(_agent(request, block))
            continue
        rows.append(
            {
                "in": request.get("in"),
                "out": request.get("out"),
                "lcp": _shared(before, request) * block,
                "gap": _gap_s(before, request),
                "stop": request.get("stop"),
            }
        )
        before = request
    return rows


def _once(requests: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The requests without those whose prompt the next one sends again."""
    for at, request in enumerate(requests):
        later = requests[at + 1] if at + 1 < len(requests) else {}
        hashes = request.get("hash_ids")
        if not hashes or hashes != later.get("hash_ids"):
            yield request


def _agent(request: Mapping[str, Any], block: int) -> dict[str, Any]:
    asked = request.get("requests") or []
    took_ms = request.get("duration_ms")
    if took_ms is None and asked:
        took_ms = 1e3 * (asked[-1]["t"] + (asked[-1].get("api_time") or 0.0) - asked[0]["t"])
    name = request.get("agent_id") or f"agent at {request.get('t')}"
    return {"k": "sub", "id": name, "dur_ms": took_ms, "reqs": _rows(asked, block)}


def _shared(before: Mapping[str, Any] | None, request: Mapping[str, Any]) -> int:
    """Leading blocks that a prompt has in common with the one before."""
    if before is None:
        return 0
    common = 0
    for one, other in zip(before["hash_ids"], request["hash_ids"], strict=False):
        if one != other:
            break
        common += 1
    return common


def _gap_s(before: Mapping[str, Any] | None, request: Mapping[str, Any]) -> float:
    if before is None:
        return 0.0
    thought_s = request.get("think_time")
    if thought_s is not None:
        return float(thought_s)
    apart_s = float(request["t"]) - float(before["t"])
    took_s = before.get("api_time")
    if took_s is not None:
        return max(0.0, apart_s - float(took_s))
    return gap_s(apart_s, before.get("out") or 0)
