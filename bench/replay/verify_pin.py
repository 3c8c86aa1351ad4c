"""Verification of pins: plays a job of five turns and checks the VRAM blocks held in each gap.

The number of blocks must rise from turn to turn, stay constant during every gap, and drop to zero
after the last turn. This is the second of Continuum's tests, as a command.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tiered_kv.bench.agents.client import AnswerError, Ask, Hints, ask_over
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import ServerOptions, VllmServer
from tiered_kv.doctor.running_server import events, labels, totals

from .kinds import BLOCK, with_connector

TURNS, FIRST_TOKENS, ADDED_TOKENS = 5, 300, 80
"""Number of turns, and the tokens that the first turn and each later turn add. Each turn adds at
least one block of the size used here."""
BLOCKS = 160
TOOL = {"tool_name": "bash", "tool_command": "ls"}
"""Tool that the client names for the gaps, because Continuum pins no turn without a tool."""
READINGS = 3
USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
HANDED_OVER = "pins_ended_returned"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the verification on one server.

    Attributes:
        held: two readings of the number of held blocks after each turn.
        handed_over: number of pins handed over to the job's next turn.
    """

    held: tuple[tuple[int, int], ...]
    handed_over: int

    @property
    def faults(self) -> list[str]:
        """Reasons why the pins do not hold, one sentence each; empty if they hold."""
        found = [
            f"turn {number}: {first} blocks held, then {second} in the same gap"
            for number, (first, second) in enumerate(self.held, start=1)
            if first != second
        ]
        between = [first for first, _ in self.held[:-1]]
        if not between or between[0] == 0:
            found.append("no blocks are held after the first turn")
        for number, (before, after) in enumerate(itertools.pairwise(between), start=2):
            if after <= before:
                found.append(
                    f"turn {number}: {after} blocks held, but {before} after the previous turn"
                )
        if self.held and self.held[-1][1]:
            found.append(f"{self.held[-1][1]} blocks are still held after the last turn")
        if self.handed_over < len(self.held) - 1:
            found.append(f"only {self.handed_over} of {len(self.held) - 1} pins were handed over")
        return found

    def show(self, as_json: bool) -> int:
        """Print the verdict. Returns the exit code: 0 if the pins hold, 1 otherwise."""
        blocks, faults = [first for first, _ in self.held], self.faults
        if as_json:
            result = {
                "holds": not faults,
                "held_blocks": blocks,
                "faults": faults,
                "handed_over": self.handed_over,
            }
            print(json.dumps(result))
            return int(bool(faults))
        for turn, count in enumerate(blocks, start=1):
            print(f"turn {turn}: {count} blocks held through the gap")
        print(*faults or ["the pin holds"], sep="\n")
        return int(bool(faults))


def verify(model: str | Path, policy: str | None = None) -> Verdict:
    """Start a server with the connector, and verify its pins; see the module docstring.

    Args:
        policy: name of the policy to verify; None uses the default.

    Raises:
        ServerError: the server did not start.
        AnswerError, ValueError: see ``verify_running``.
    """
    pool = ServerOptions(model=model, kv_blocks=BLOCKS, block_size=BLOCK, max_model_len=2048)
    settings = {"TIERED_KV_POLICY": policy} if policy else {}
    options = with_connector(pool, TIERED_KV_CPU_GIB="1", **settings)
    with (
        tempfile.TemporaryDirectory(prefix="verify-pin-") as folder,
        VllmServer(options, Path(folder) / "server.log") as server,
    ):
        return verify_running(server.url)


def verify_running(url: str) -> Verdict:
    """Verify the pins of a running vLLM server that has no other client; see the module docstring.

    Args:
        url: base URL without ``/v1``.

    Raises:
        AnswerError: the server's answer is invalid.
        ValueError: the server does not report its model or its KV pool.
    """
    with _answers(url), httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        models = client.get("/v1/models").raise_for_status().json()
        page = client.get("/metrics").raise_for_status().text
        try:
            (config, *_) = labels(page, CACHE_CONFIG)
            blocks, block = int(config["num_gpu_blocks"]), int(config["block_size"])
            model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"the server does not report its model, or its KV pool in {CACHE_CONFIG}: {error!r}"
            ) from error
        return _play(client, model, blocks, block)


@contextmanager
def _answers(url: str) -> Iterator[None]:
    """Convert connection errors to ``AnswerError``s that name the server."""
    try:
        yield
    except httpx.HTTPError as error:
        raise AnswerError(f"{url} does not answer correctly: {error}") from error


def _play(client: httpx.Client, model: str, blocks: int, block: int) -> Verdict:
    """Play the job of five turns on a server whose pool has ``blocks`` blocks of ``block`` tokens.
    Returns the verdict.
    """
    ticks = itertools.count()

    def ask(prompt: Sequence[int], tokens: int, hints: Mapping[str, object] = {}) -> Sequence[int]:
        return ask_over(client, model, Ask(prompt=prompt, max_tokens=tokens, extra=hints)).tokens

    def metrics() -> str:
        return client.get("/metrics").raise_for_status().text

    def handed_over() -> float:
        """Return the number of pins that turns took over; 0 for a server without the connector."""
        return events(metrics()).get(HANDED_OVER, 0)

    def held() -> int:
        """Return the number of blocks in use between requests. The gauge changes only in engine
        steps, so an unrelated one-token request triggers a step. The minimum of a few readings
        excludes the block of that request.
        """
        readings = []
        for _ in range(READINGS):
            ask([500 + next(ticks)], 1)
            time.sleep(0.02)  # /metrics is updated after the answer
            readings.append(totals(metrics()).get(USAGE, 0.0))
        return round(min(readings) * (blocks - 1))  # vLLM reserves one block

    before, found = handed_over(), []
    context = texts(client, 1, max(FIRST_TOKENS, 2 * block), model)[0]
    for turn in range(1, TURNS + 1):
        last = turn == TURNS
        answer = ask(context, 4, Hints.KV_PARAMS.body("five-turns", last, {} if last else TOOL))
        added = [700 + turn * 100 + i for i in range(max(ADDED_TOKENS, block))]
        context = [*context, *answer, *added]
        found.append((held(), held()))
    return Verdict(tuple(found), int(handed_over() - before))
