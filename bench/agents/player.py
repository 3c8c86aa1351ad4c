"""The player: runs jobs on one server, by arrival times or with a fixed number of concurrent jobs.

Each turn of a job is sent when the gap after the previous answer has passed. A job with an arrival
time starts at that time, however many other jobs are running. The next prompt is the previous
prompt, its answer, and the text that the turn adds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from .client import Answer, Api, Ask, Client, Hints, Prompt, open_client, trouble
from .jobs import Job, Turn
from .results import JobDone, TurnDone

T = TypeVar("T")
OnTurn = Callable[[str, TurnDone], None]
"""Called for each answered turn, with the job's name and the turn."""


class TokenContext:
    """A job's context as token ids."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def add(self, turn: Turn) -> None:
        """Append the tokens that a turn adds."""
        self._ids += turn.added

    def answered(self, answer: Answer) -> None:
        """Append the tokens of an answer."""
        self._ids += answer.tokens

    def prompt(self, _api: Api) -> Prompt:
        """Return all token ids. The route makes no difference."""
        return list(self._ids)


class Conversation:
    """A job's context as messages. Compaction by the agent truncates the context.

    Args:
        system: the system message; empty for none.
    """

    def __init__(self, system: str = "") -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def add(self, turn: Turn) -> None:
        """Truncate the context to the part that the turn keeps, and append the turn's text. Many
        chat templates require alternating roles, so a text that follows a user message is appended
        to that message.
        """
        if turn.kept < 1:
            kept = round(turn.kept * sum(len(one["content"]) for one in self._messages))
            messages, self._messages = self._messages, []
            for message in messages:
                if content := message["content"][:kept]:
                    self._messages.append({**message, "content": content})
                kept -= len(content)
        self._append("user", turn.text)

    def answered(self, answer: Answer) -> None:
        """Append an answer as a message. An empty answer becomes a space, because some servers
        refuse empty messages.
        """
        self._append("assistant", answer.text or " ")

    def prompt(self, api: Api) -> Prompt:
        """Return the messages for the chat route, and their joined texts for completions."""
        if api is Api.CHAT:
            return [dict(message) for message in self._messages]
        return "".join(message["content"] for message in self._messages)

    def _append(self, role: str, text: str) -> None:
        if self._messages and self._messages[-1]["role"] == role:
            text = f"{self._messages.pop()['content']} {text}"
        self._messages.append({"role": role, "content": text})


@dataclass(slots=True)
class Player:
    """Plays one run of jobs on one server. The run's clock starts when this object is created.

    Attributes:
        api: route for jobs of texts. Token ids always go to completions.
        prefix: prepended to job names sent to the server.
        sessions: also send each job's name in the header ``X-Session-ID``.
        plain: send only fields of OpenAI's own API, without job names.
        force: force the recorded answers. Otherwise the model generates the same number of tokens.
        logprobs: request the logprobs of the answers.
        agents: sub-agents that were played, in the order in which they finished.
        reports_cached: True if the server reported cached prompt tokens.
    """

    client: Client
    _: KW_ONLY
    api: Api = Api.CHAT
    hints: Hints = Hints.KV_PARAMS
    prefix: str = ""
    sessions: bool = False
    plain: bool = False
    force: bool = False
    logprobs: bool = False
    on_turn: OnTurn = lambda _name, _turn: None
    agents: list[JobDone] = field(init=False, default_factory=list)
    reports_cached: bool = field(init=False, default=False)
    _began: float = field(init=False, default_factory=time.perf_counter)

    async def arriving(self, jobs: Iterable[tuple[float, Job]]) -> tuple[JobDone, ...]:
        """Play jobs, each starting at its arrival time on the run's clock. Returns the results in
        job order. A failed request ends its job with an error; other jobs continue.
        """

        async def later(at_s: float, job: Job) -> JobDone:
            await asyncio.sleep(at_s - self._now_s())
            return await self.job(job)

        return tuple(await together(later(at_s, job) for at_s, job in jobs))

    async def live(self, jobs: Iterator[Job], count: int, seconds: float) -> tuple[JobDone, ...]:
        """Keep ``count`` jobs live until ``seconds`` have passed: when one ends, the next one
        starts. Returns the results in the order in which the jobs started.
        """

        async def seat() -> list[JobDone]:
            done = [await self.job(next(jobs))]
            while self._now_s() < seconds:
                done.append(await self.job(next(jobs)))
            return done

        played = [job for seat in await together(seat() for _ in range(count)) for job in seat]
        return tuple(sorted(played, key=lambda job: (job.began_s, job.name)))

    async def job(self, job: Job, parent: str = "") -> JobDone:
        """Play one job, starting immediately. A failed request ends the job with an error.

        Args:
            parent: name of the job that started this sub-agent; empty for other jobs.
        """
        began_s, turns, error = self._now_s(), list[TurnDone](), None
        context = Conversation(job.system) if job.is_text else TokenContext()
        for number, turn in enumerate(job.turns, start=1):
            context.add(turn)
            ask = self._ask(job, parent, number, turn, context.prompt(self.api))
            try:
                answer = await self.client.ask(ask)
            except Exception as failure:
                error = f"turn {number} {trouble(failure)}"
                break
            context.answered(answer)
            turns.append(self._done(number, answer))
            self.on_turn(job.name, turns[-1])
            self.agents += await together(self.job(agent, job.name) for agent in turn.agents)
            await asyncio.sleep(turn.gap_s)
        return JobDone(job.name, began_s, self._now_s(), tuple(turns), error)

    def _ask(self, job: Job, parent: str, number: int, turn: Turn, prompt: Prompt) -> Ask:
        if self.plain:
            return Ask(prompt=prompt, max_tokens=turn.output, salt=job.salt or None, plain=True)
        name = f"{self.prefix}{job.name}"
        more = {"tool_name": turn.tool_name, "tool_command": turn.tool}
        more["parent_job_id"] = f"{self.prefix}{parent}" if parent else ""
        known = {key: value for key, value in more.items() if value}
        extra = self.hints.body(name, number == len(job.turns), known)
        if not job.is_text:
            extra["request_id"] = request_id(name, number)
        return Ask(
            prompt=prompt,
            max_tokens=turn.output,
            session=name if self.sessions else None,
            salt=job.salt or None,
            forced=turn.answer if self.force else None,
            logprobs=0 if self.logprobs else None,
            extra=extra,
        )

    def _done(self, number: int, answer: Answer) -> TurnDone:
        self.reports_cached |= answer.cached_tokens is not None
        return TurnDone(
            turn=number,
            sent_s=answer.sent_at - self._began,
            ttft_s=answer.ttft_s,
            latency_s=answer.latency_s,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens or 0,
            output_tokens=answer.output_tokens,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            text=answer.text,
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._began


def request_id(job: str, turn: int) -> str:
    """Return the client's request id for a turn. ``turn`` counts from 1."""
    return f"{job}.{turn}"


async def drive(
    base_url: str,
    model: str,
    jobs: Sequence[Job],
    arrivals_s: Sequence[float] | None,
    *,
    hints: Hints,
    force: bool,
    logprobs: bool,
    session_header: bool = False,
    on_turn: Callable[[], None] = lambda: None,
) -> tuple[JobDone, ...]:
    """Play jobs on the server at ``base_url``; see ``Player``. Returns the results in job order.

    Args:
        arrivals_s: arrival time of each job, seconds since the start; None plays one job at a time.
        on_turn: called after each answered turn.
    """
    async with open_client(base_url, model) as client:
        player = Player(
            client,
            hints=hints,
            sessions=session_header,
            force=force,
            logprobs=logprobs,
            on_turn=lambda _name, _turn: on_turn(),
        )
        if arrivals_s is None:
            return tuple([await player.job(job) for job in jobs])
        return await player.arriving(zip(arrivals_s, jobs, strict=True))


async def together(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently, and return their results in order. If one raises or the call is
    cancelled, the others are cancelled.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
