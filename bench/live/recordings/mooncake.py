"""Traces of requests with hashes of their prompts' blocks: Mooncake's, and Alibaba's from Bailian.

The two formats share field names and differ in everything else:

- Mooncake: 512 tokens per hash, times in milliseconds, and no conversations. A prompt that contains
  the last whole block of an earlier request is treated as the next turn of that request's job, if
  it is long enough to contain the answer too.
- Bailian: 16 tokens per hash, times in seconds. Each request has a ``chat_id``, and names its
  predecessor in ``parent_chat_id``.

A hash stands for its block and all blocks before it. Some writers also hash a partial last block,
and others do not. A request with any other number of hashes is left out and counted. If there are
many such requests, the trace has another format and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import (
    RecordingError,
    Row,
    check_times,
    common_blocks,
    first_row,
    gap_between,
    hashes,
    identity,
    known,
    read_rows,
    real,
    whole,
)
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload

MOST_ODD = 0.01
"""Maximum fraction of requests with an unexpected number of hashes."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A format of these traces.

    Attributes:
        block: tokens represented by a hash.
        unit: name of the unit of times.
        tick_s: the unit, seconds.
    """

    name: str
    block: int
    unit: str
    tick_s: float


_MOONCAKE = _Form("Mooncake's", 512, "milliseconds", 1e-3)
_BAILIAN = _Form("Bailian's", 16, "seconds", 1.0)
_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class _Request:
    at_s: float
    prompt: int
    output: int
    hashes: tuple[int | str, ...]
    block: int
    chat: int | str | None
    parent: int | str | None

    @property
    def whole(self) -> tuple[int | str, ...]:
        """Hashes of the prompt's whole blocks."""
        return self.hashes[: self.prompt // self.block]

    @property
    def is_odd(self) -> bool:
        """True if the number of hashes does not match the number of blocks."""
        return len(self.hashes) not in (self.prompt // self.block, -(-self.prompt // self.block))


_Ends = dict[int | str | None, list[_Request]]
"""Requests of each job, by the chat id or the last block of the job's last request."""


def hashed_requests(path: Path) -> Workload:
    """Read the jobs of a trace, sorted by their first requests. Jobs whose first prompts start with
    the same blocks share that prefix.

    Raises:
        RecordingError: the file cannot be read, or has another format.
    """
    form = _BAILIAN if "parent_chat_id" in first_row(path) else _MOONCAKE
    found = read_rows(path, partial(_request, form))
    odd = [one for one in found if one.is_odd]
    if len(odd) > MOST_ODD * len(found):
        raise RecordingError(
            f"{path} does not have the format of {form.name} traces: "
            f"a request of {odd[0].prompt} tokens has {len(odd[0].hashes)} hashes. "
            f"{_MOONCAKE.name} traces have a hash per {_MOONCAKE.block} tokens, and times in "
            f"{_MOONCAKE.unit}. {_BAILIAN.name} traces have parent_chat_id, a hash per "
            f"{_BAILIAN.block} tokens, and times in {_BAILIAN.unit}. Convert the file to one of "
            "these formats."
        )
    requests = sorted((one for one in found if not one.is_odd), key=lambda one: one.at_s)
    chains = _chains(requests, form)
    check_times(
        path,
        form.unit,
        ((later.at_s - one.at_s, one.output) for chain in chains for one, later in pairwise(chain)),
    )
    begins = Counter(block for chain in chains for block in chain[0].whole)
    jobs = tuple(_job(f"request {at}", chain, begins) for at, chain in enumerate(chains))
    left_out = {"odd_hashes": LeftOut(len(odd), len(odd))} if odd else {}
    return Workload(path.name, jobs, Hints.RIGHT, left_out=left_out)


def _request(form: _Form, row: Row) -> _Request:
    if "timestamp" not in row and "delay" in row:
        raise ValueError(
            "it has a delay instead of a timestamp, as in aiperf's sessions: write the time of "
            f"each request, in {form.unit}"
        )
    return _Request(
        at_s=real(row, "timestamp") * form.tick_s,
        prompt=max(1, whole(row, "input_length")),
        output=max(1, whole(row, "output_length")),
        hashes=hashes(row),
        block=form.block,
        chat=known(row, "chat_id", identity),
        parent=known(row, "parent_chat_id", identity),
    )


def _by_blocks(request: _Request, ends: _Ends) -> int | str | None:
    """Return the last whole block of the request that this request continues: the longest shared
    prefix after which the prompt is long enough to contain the answer. None if there is no such
    request.
    """
    for block in reversed(request.whole):
        before = ends.get(block)
        if before and request.prompt >= before[-1].prompt + before[-1].output:
            return block
    return None


def _chains(requests: Iterable[_Request], form: _Form) -> list[list[_Request]]:
    """Group requests by job. If several requests continue the same request, the first of them
    continues the job, and each of the others starts a new job.
    """
    chains: list[list[_Request]] = []
    ends: _Ends = {}
    for request in requests:
        if form is _BAILIAN:
            before, end = request.parent, None if request.chat == _NO_PARENT else request.chat
        else:
            before, end = _by_blocks(request, ends), (request.whole or (None,))[-1]
        chain = None if before is None else ends.pop(before, None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(request)
        if end is not None:
            ends[end] = chain
    return chains


def _job(name: str, chain: Sequence[_Request], begins: Mapping[int | str, int]) -> SimJob:
    turns = []
    shared = 0
    for request, following in zip_longest(chain, chain[1:]):
        gap = gap_between(following.at_s - request.at_s if following else None, request.output)
        turns.append(SimTurn(shared, request.prompt - shared, request.output, gap))
        shared = _shared(request, following) if following else 0
    first = chain[0]
    common = [block for block in first.whole if begins[block] > 1]
    prefix = str(common[0]) if common else ""
    return SimJob(name, 0.0, tuple(turns), prefix, len(common) * first.block)


def _shared(request: _Request, following: _Request) -> int:
    """Return the number of tokens of a request's context that the next prompt keeps. They include
    the answer if the next prompt contains all of the request's whole blocks and is long enough.
    """
    common = common_blocks(request.whole, following.whole)
    context = request.prompt + request.output
    goes_on = common == len(request.whole) and following.prompt >= context
    return min(context if goes_on else common * request.block, following.prompt - 1)
