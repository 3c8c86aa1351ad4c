"""The load generator: plays jobs against any OpenAI-compatible server and times every turn.

A job's turns follow one another, each the gap after the answer before it; jobs begin when their
time has come, however many are running. Prompts are token ids. The next prompt is the previous
one, what was answered, and what the turn adds.

A streamed answer does not tell the tiers that its prompt came from: vLLM hands on what a connector
says of that with whole answers only. ``sources`` reads them in the connector's trace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from tiered_kv.bench.agents.openai_client import open_client
from tiered_kv.bench.replay.jobs import Job, Turn
from tiered_kv.bench.replay.results import JobDone, TurnDone

from .forcing import XARG

if TYPE_CHECKING:
    from openai.types import Completion

SESSION_HEADER = "X-Session-ID"

INTERRUPTED = "interrupted"
"""The ``error`` of jobs that were running, or had not begun, when the run was cancelled."""


class Hints(Enum):
    """Form in which a job is named to the server, of those that ``policies.jobs.hints`` reads."""

    KV_PARAMS = "kv-params"
    """Hints in ``kv_transfer_params``."""
    XARGS = "xargs"
    """Hints in ``vllm_xargs``."""
    SESSION = "session"
    """Hints as ``session_id``, which cannot say that a turn is the last."""
    TOP_LEVEL = "top-level"
    """Hints as Continuum's clients send them: only ``JobMiddleware`` reads these."""
    NONE = "none"

    def body(self, job_id: str, is_last_step: bool) -> dict[str, Any]:
        """The fields of a request's body."""
        said = {"job_id": job_id, "is_last_step": is_last_step}
        bodies: dict[Hints, dict[str, Any]] = {
            Hints.KV_PARAMS: {"kv_transfer_params": said},
            Hints.XARGS: {"vllm_xargs": said},
            Hints.SESSION: {"session_id": job_id},
            Hints.TOP_LEVEL: said,
            Hints.NONE: {},
        }
        return bodies[self]


def request_id(job: str, turn: int) -> str:
    """Name of a turn's request at the server; ``turn`` is 1 for the job's first."""
    return f"{job}.{turn}"


async def drive(
    base_url: str,
    model: str,
    jobs: Sequence[Job],
    arrivals_s: Sequence[float],
    *,
    hints: Hints,
    force: bool,
    logprobs: bool,
    session_header: bool = False,
    on_turn: Callable[[], None] = lambda: None,
) -> tuple[JobDone, ...]:
    """Play all jobs and return them in their order, finished or not.

    A request that fails, or is answered with other tokens than were forced, ends its job with an
    error; the others go on. So does cancelling, for all: what was measured is returned, and jobs
    that had not finished carry the error ``INTERRUPTED``. The cancellation is used up by that;
    after Ctrl-C under ``asyncio.run`` the caller sees it in the jobs.

    Args:
        base_url: without ``/v1``.
        model: as the server calls it.
        arrivals_s: when each job begins, seconds from now.
        force: have the recorded answers said; the server needs ``forced``. Otherwise
            the model says as many tokens of its own.
        logprobs: ask for those of the answers' tokens.
        session_header: name jobs by ``X-Session-ID`` as well, which routers read.
        on_turn: called after every turn.

    Raises:
        ValueError: not as many arrivals as jobs.
    """
    if len(jobs) != len(arrivals_s):
        raise ValueError(f"{len(jobs)} jobs, but {len(arrivals_s)} arrivals")
    async with open_client(base_url, "none") as client:
        ask = _Asking(client, model, hints, force, logprobs, session_header, time.perf_counter())
        played = [_Played(job, at_s) for job, at_s in zip(jobs, arrivals_s, strict=True)]
        tasks = [asyncio.create_task(_play(one, ask, on_turn)) for one in played]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(one.done(ask.now_s()) for one in played)


@dataclass(slots=True)
class _Played:
    """Knowledge of a job so far."""

    job: Job
    began_s: float
    turns: list[TurnDone] = field(default_factory=list)
    ended_s: float | None = None
    error: str | None = None

    def done(self, now_s: float) -> JobDone:
        turns = tuple(self.turns)
        if self.ended_s is None:
            ended_s = max(now_s, self.began_s)
            return JobDone(self.job.name, self.began_s, ended_s, turns, INTERRUPTED)
        return JobDone(self.job.name, self.began_s, self.ended_s, turns, self.error)


async def _play(played: _Played, ask: _Asking, on_turn: Callable[[], None]) -> None:
    job = played.job
    await asyncio.sleep(played.began_s - ask.now_s())
    context: list[int] = []
    for number, turn in enumerate(job.turns, start=1):
        context += turn.added
        try:
            done = await ask.turn(job, number, turn, context)
        except Exception as error:
            played.error = f"turn {number}: {error!r}"
            break
        played.turns.append(done)
        on_turn()
        context += done.tokens
        await asyncio.sleep(turn.gap_s)
    played.ended_s = ask.now_s()


@dataclass(frozen=True, slots=True)
class _Asking:
    """Settings of the turns of one run."""

    client: AsyncOpenAI
    model: str
    hints: Hints
    force: bool
    logprobs: bool
    session_header: bool
    began: float

    def now_s(self) -> float:
        return time.perf_counter() - self.began

    async def turn(self, job: Job, number: int, turn: Turn, prompt: list[int]) -> TurnDone:
        """Ask one turn.

        Raises:
            ValueError: an answer without token ids or usage, or not the forced one.
            Exception: no answer, or half of one: the client lets some errors of its
                connections through as they are.
        """
        answer = _Answer()
        sent_s = self.now_s()
        stream = await self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=len(turn.answer),
            temperature=0,
            logprobs=0 if self.logprobs else None,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._extra(job, number, turn),
            extra_headers={SESSION_HEADER: job.name} if self.session_header else None,
        )
        async with stream:
            async for chunk in stream:
                answer.add(chunk, self.now_s())
        if answer.usage is None or not answer.tokens:
            raise ValueError("an answer without usage or without token ids")
        if self.force and tuple(answer.tokens) != turn.answer:
            raise ValueError("the server did not say what was forced")
        details = answer.usage.prompt_tokens_details
        return TurnDone(
            turn=number,
            sent_s=sent_s,
            ttft_s=answer.first_s - sent_s,
            latency_s=answer.last_s - sent_s,
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            output_tokens=answer.usage.completion_tokens,
            tokens=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
        )

    def _extra(self, job: Job, number: int, turn: Turn) -> dict[str, Any]:
        body = self.hints.body(job.name, number == len(job.turns))
        body |= {
            "ignore_eos": True,
            "return_token_ids": True,
            "request_id": request_id(job.name, number),
        }
        if job.salt:
            body["cache_salt"] = job.salt
        if self.force:
            body["vllm_xargs"] = {**body.get("vllm_xargs", {}), XARG: turn.answer}
        return body


class _Answer:
    """A streamed answer, gathered."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.usage: Any = None
        self.first_s = self.last_s = 0.0

    def add(self, chunk: Completion, now_s: float) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            ids = (choice.model_extra or {}).get("token_ids") or []
            if not ids:
                continue
            if not self.tokens:
                self.first_s = now_s
            self.last_s = now_s
            self.tokens += ids
            if choice.logprobs is not None:
                self.logprobs += choice.logprobs.token_logprobs or []
