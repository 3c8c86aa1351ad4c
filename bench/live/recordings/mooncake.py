"""Mooncake's traces: requests with hashes of their prompts' blocks, and no sessions.

A hash stands for its block and all before it. So a prompt that holds the last whole block of an
earlier one is taken for that job's next turn, if it is long enough to hold the answer as well.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload

from .between import gap_s

BLOCK = 512
"""Tokens that a hash stands for."""


@dataclass(frozen=True, slots=True)
class _Request:
    at_s: float
    prompt: int
    output: int
    hashes: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        """Hashes of its whole blocks."""
        return self.hashes[: self.prompt // BLOCK]


def mooncake_requests(path: Path) -> Workload:
    """Jobs of a trace, in the order of their first requests. Jobs whose first prompts begin alike
    share that beginning.

    Raises:
        OSError, ValueError: it cannot be read, or is no such trace.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        requests = sorted(map(_request, rows), key=lambda one: one.at_s)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no trace of Mooncake's: {error!r}") from error
    chains = _chains(requests)
    begins = Counter(block for chain in chains for block in chain[0].whole)
    jobs = tuple(_job(f"request {at}", chain, begins) for at, chain in enumerate(chains))
    return Workload(path.name, jobs, Hints.RIGHT)


def _request(row: Mapping[str, Any]) -> _Request:
    return _Request(
        float(row["timestamp"]) / 1e3,
        max(1, int(row["input_length"])),
        max(1, int(row["output_length"])),
        tuple(row["hash_ids"]),
    )


def _chains(requests: Sequence[_Request]) -> list[list[_Request]]:
    chains: list[list[_Request]] = []
    open_at: dict[int, list[_Request]] = {}
    for request in requests:
        chain = None
        for block in reversed(request.whole):
            found = open_at.get(block)
            if found and request.prompt >= found[-1].prompt + found[-1].output:
                chain = open_at.pop(block)
                break
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(request)
        if request.whole:
            open_at[request.whole[-1]] = chain
    return chains


def _job(name: str, chain: Sequence[_Request], begins: Mapping[int, int]) -> SimJob:
    turns = []
    context = 0
    for at, request in enumerate(chain):
        later = chain[at + 1].at_s - request.at_s if at + 1 < len(chain) else None
        gap = gap_s(later, request.output)
        turns.append(SimTurn(context, request.prompt - context, request.output, gap))
        context = request.prompt + request.output
    shared = [block for block in chain[0].whole if begins[block] > 1]
    prefix = str(shared[0]) if shared else ""
    return SimJob(name, 0.0, tuple(turns), prefix, len(shared) * BLOCK)
