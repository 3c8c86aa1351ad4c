"""Forced answers on a real server: the replay's client, its logits processor and its trace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import EVENT_S
from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.forcing import XARG
from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.agents.player import drive
from tiered_kv.bench.agents.results import JobDone
from tiered_kv.bench.agents.sources import with_sources
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def jobs(client: httpx.Client) -> list[Job]:
    """Two jobs with three turns of real text. The second job has the longer answers."""
    made = []
    for number, text in enumerate(texts(client, 2, 700)):
        added, answer = 180, 24 + 16 * number
        turns = []
        for at in range(0, 3 * (added + answer), added + answer):
            parts = text[at : at + added], text[at + added : at + added + answer]
            turns.append(Turn(tuple(parts[0]), tuple(parts[1]), 0.1))
        made.append(Job(f"text-{number}", f"salt-{number}", tuple(turns)))
    return made


@pytest.fixture(scope="module")
def forced(server: VllmServer, jobs: list[Job]) -> tuple[JobDone, ...]:
    return play(server, jobs, force=True)


def play(server: VllmServer, jobs: list[Job], *, force: bool) -> tuple[JobDone, ...]:
    return asyncio.run(
        drive(
            server.url,
            MODEL_NAME,
            jobs,
            [0.0] * len(jobs),
            hints=Hints.KV_PARAMS,
            force=force,
            logprobs=True,
        )
    )


def complete(client: httpx.Client, prompt: list[int], **body: Any) -> httpx.Response:
    base = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "return_token_ids": True}
    return client.post("/v1/completions", json={**base, **body})


def scored(client: httpx.Client, prompt: list[int], answer: tuple[int, ...]) -> list[float]:
    """Return the model's logprobs of an answer's tokens, computed in one pass as part of a
    prompt."""
    asked = complete(client, [*prompt, *answer], max_tokens=1, prompt_logprobs=0)
    read = asked.raise_for_status().json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [at[str(token)]["logprob"] for at, token in zip(read, answer, strict=True)]


def test_forced_jobs_answer_as_recorded_with_the_models_own_logprobs(
    client: httpx.Client, server: VllmServer, jobs: list[Job], forced: tuple[JobDone, ...]
) -> None:
    free = play(server, jobs, force=False)
    for job, done, own in zip(jobs, forced, free, strict=True):
        assert done.error is None
        assert own.error is None
        assert own.turns[0].tokens != job.turns[0].answer, "it would have said something else"
        for at, (turn, said) in enumerate(zip(job.turns, done.turns, strict=True)):
            assert said.tokens == turn.answer
            assert said.prompt_tokens == len(job.prompt(at))
            assert 0 < said.ttft_s <= said.latency_s
            assert min(said.logprobs) < -1, "a processed logprob of a forced token would be 0"
            off = [
                abs(one - other)
                for one, other in zip(
                    said.logprobs, scored(client, job.prompt(at), turn.answer), strict=True
                )
            ]
            # One answer is computed token by token, the other in one pass. In bf16 their logprobs
            # differ by 0.03 on average and 0.24 at most, like those of two forced runs.
            assert sum(off) / len(off) < 0.1
            assert max(off) < 1


def test_the_trace_explains_every_prompt(server: VllmServer, forced: tuple[JobDone, ...]) -> None:
    path = Path(server.options.env["TIERED_KV_TRACE"])
    deadline = time.monotonic() + EVENT_S  # the trace is written later than the answers
    turns = []
    while time.monotonic() < deadline:
        turns = [turn for job in with_sources(forced, path) for turn in job.turns]
        if all(turn.sources for turn in turns):
            break
        time.sleep(0.1)
    assert [sum(turn.sources.values()) for turn in turns] == [turn.prompt_tokens for turn in turns]


def test_invalid_tokens_are_refused_or_ignored_and_disturb_no_request(
    client: httpx.Client, server: VllmServer, jobs: list[Job]
) -> None:
    for bad in ("1,2", [1, "2"], [1.5], [-1]):
        assert complete(client, [5, 6], max_tokens=2, vllm_xargs={XARG: bad}).status_code == 400
    own = complete(client, [5, 6], max_tokens=2).json()["choices"][0]["token_ids"]
    beyond = complete(client, [5, 6], max_tokens=2, vllm_xargs={XARG: [3, 10_000_000]})
    assert beyond.json()["choices"][0]["token_ids"] == own
    assert play(server, jobs[:1], force=True)[0].error is None
    server.check()
