"""Does the pin hold? A job of five turns, and the VRAM blocks held in each of its gaps.

The job's blocks must rise turn by turn, stay constant through every gap, and be free after the last
turn: the second test of Continuum, as a command.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tiered_kv.bench.agents.client import Ask, Hints, ask_over
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import CONNECTOR, MODEL_NAME, ServerOptions, VllmServer
from tiered_kv.doctor.running_server import events, labels, totals

from .kinds import BLOCK

TURNS, FIRST_TOKENS, ADDED_TOKENS = 5, 300, 80
"""Each turn adds a block at least, where blocks are as small as here; see ``Pool``."""
BLOCKS = 160
TOOL = {"tool_name": "bash", "tool_command": "ls"}
"""Tool that runs in the gaps, as a client names it: Continuum pins no turn without one."""
READINGS = 3
USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
HANDED_OVER = "pins_ended_returned"


@dataclass(frozen=True, slots=True)
class Pool:
    """A server's model and KV pool.

    Attributes:
        block: tokens of a block.
    """

    model: str
    blocks: int
    block: int

    @property
    def first_tokens(self) -> int:
        return max(FIRST_TOKENS, 2 * self.block)

    @property
    def added_tokens(self) -> int:
        """Tokens that a turn adds: the blocks that are held grow by them."""
        return max(ADDED_TOKENS, self.block)


@dataclass(frozen=True, slots=True)
class Gap:
    """Blocks held after a turn, read twice."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A server's handling of a job's blocks.

    Attributes:
        gaps: one a turn.
        handed_over: pins that went over to the job's next turn.
    """

    gaps: tuple[Gap, ...]
    handed_over: int

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons why the pin does not hold, a sentence each; none if it does."""
        return tuple(_faults(self.gaps, self.handed_over))

    def as_json(self) -> dict[str, object]:
        return {
            "holds": not self.faults,
            "held_blocks": self._held,
            "faults": self.faults,
            "handed_over": self.handed_over,
        }

    def lines(self) -> Iterator[str]:
        """Sentences: one for every turn, and what they come to."""
        for turn, blocks in enumerate(self._held, start=1):
            yield f"turn {turn}: {blocks} blocks held through the gap"
        yield from self.faults or ("the pin holds",)

    @property
    def _held(self) -> list[int]:
        return [gap.first for gap in self.gaps]


def verify(model: str | Path, policy: str | None = None) -> Verdict:
    """Start a server with the connector and play the job.

    Args:
        policy: name of another than the default.

    Raises:
        ServerError: it did not start.
        httpx.HTTPError, AnswerError: it does not answer as it should.
    """
    env = {"TIERED_KV_CPU_GIB": "1"} | ({"TIERED_KV_POLICY": policy} if policy else {})
    options = ServerOptions(
        model=model,
        kv_blocks=BLOCKS,
        block_size=BLOCK,
        max_model_len=2048,
        kv_transfer_config=CONNECTOR,
        env=env,
    )
    with (
        tempfile.TemporaryDirectory(prefix="verify-pin-") as folder,
        VllmServer(options, Path(folder) / "server.log") as server,
        httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client,
    ):
        return play(client, Pool(MODEL_NAME, BLOCKS, BLOCK))


def verify_running(url: str) -> Verdict:
    """Play the job on a vLLM server that runs already and serves no other client.

    Args:
        url: without ``/v1``.

    Raises:
        httpx.HTTPError, AnswerError: it does not answer as it should.
        ValueError: it does not report its KV pool.
    """
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        return play(client, pool_of(client))


def pool_of(client: httpx.Client) -> Pool:
    """The pool of a running server, as it reports it.

    Raises:
        httpx.HTTPError: it does not answer.
        ValueError: it does not report its pool.
    """
    models = client.get("/v1/models").raise_for_status().json()
    page = client.get("/metrics").raise_for_status().text
    try:
        (config, *_) = labels(page, CACHE_CONFIG)
        blocks, block = int(config["num_gpu_blocks"]), int(config["block_size"])
        return Pool(models["data"][0]["id"], blocks, block)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"the server does not report its KV pool: no {error} in {CACHE_CONFIG}"
        ) from error


def play(client: httpx.Client, pool: Pool) -> Verdict:
    """Play the job on a server that serves no other client."""
    ticks = itertools.count()

    def ask(prompt: Sequence[int], tokens: int, hints: Mapping[str, object] = {}) -> Sequence[int]:
        turn = Ask(prompt=prompt, max_tokens=tokens, extra=hints)
        return ask_over(client, pool.model, turn).tokens

    def metrics() -> str:
        return client.get("/metrics").raise_for_status().text

    def handed_over() -> float:
        """Pins that a turn took over; 0 from a server without the connector."""
        return events(metrics()).get(HANDED_OVER, 0)

    def held() -> int:
        """Blocks in use between requests. The gauge moves on steps only, so an unrelated request
        of one token makes one; the smallest of a few readings is the one without its block."""
        readings = []
        for _ in range(READINGS):
            ask([500 + next(ticks)], 1)
            time.sleep(0.02)  # /metrics follows the answer
            readings.append(totals(metrics()).get(USAGE, 0.0))
        return round(min(readings) * (pool.blocks - 1))  # one block is vLLM's own

    before, gaps = handed_over(), []
    context = texts(client, 1, pool.first_tokens, pool.model)[0]
    for turn in range(1, TURNS + 1):
        last = turn == TURNS
        answer = ask(context, 4, Hints.KV_PARAMS.body("five-turns", last, {} if last else TOOL))
        added = [700 + turn * 100 + i for i in range(pool.added_tokens)]
        context = [*context, *answer, *added]
        gaps.append(Gap(held(), held()))
    return Verdict(tuple(gaps), int(handed_over() - before))


def _faults(gaps: Sequence[Gap], handed_over: int) -> list[str]:
    found = [
        f"turn {number}: {gap.first} blocks held, then {gap.second} in the same gap"
        for number, gap in enumerate(gaps, start=1)
        if gap.first != gap.second
    ]
    held = [gap.first for gap in gaps[:-1]]
    if not held or held[0] == 0:
        found.append("nothing is held after the first turn")
    for number, (before, after) in enumerate(itertools.pairwise(held), start=2):
        if after <= before:
            found.append(f"turn {number}: {after} blocks held, {before} the turn before")
    if gaps and gaps[-1].second:
        found.append(f"{gaps[-1].second} blocks are still held after the last turn")
    if handed_over < len(gaps) - 1:
        found.append(f"{handed_over} of {len(gaps) - 1} pins were handed over")
    return found
