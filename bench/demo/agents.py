"""Jobs that behave like agents: a growing chat, a tool call between turns, real text.

An agent here reads code: lines of several files at first, as real agents begin with the
descriptions of their tools and their task, then of one file a turn, of this project or of Python's
standard library. Each turn asks for a short answer; the gap before the next turn is the time that
the next tool call takes. The same seed gives the same jobs, so that two servers
can be given the same work. A server's own answers become part of the chat, so two runs differ
only where the servers' outputs do.
"""

from __future__ import annotations

import asyncio
import random
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from openai import APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient

from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.servers.vllm_server import MODEL_NAME

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam


CHARS_PER_TOKEN = 3.4
"""Code, in SmolLM2's tokenizer: 3.3 to 4.0, by file. Larger vocabularies need fewer tokens."""

TEMPLATE_TOKENS = 16
"""Tokens that a chat template puts around a message and its answer, about."""

STANDARD_LIBRARY = (
    "argparse.py",
    "ast.py",
    "asyncio/base_events.py",
    "collections/__init__.py",
    "concurrent/futures/thread.py",
    "configparser.py",
    "contextlib.py",
    "dataclasses.py",
    "datetime.py",
    "difflib.py",
    "email/message.py",
    "functools.py",
    "heapq.py",
    "http/client.py",
    "inspect.py",
    "json/decoder.py",
    "logging/__init__.py",
    "pathlib.py",
    "queue.py",
    "random.py",
    "shutil.py",
    "socketserver.py",
    "statistics.py",
    "subprocess.py",
    "tempfile.py",
    "textwrap.py",
    "threading.py",
    "tokenize.py",
    "urllib/parse.py",
    "zipfile.py",
)

SYSTEM = "You are a coding agent. You read source files and answer in one short sentence."


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Number and size of the jobs.

    Attributes:
        jobs: jobs that run at the same time.
        turns: turns of each.
        seed: of everything drawn.
        result_chars: least and most characters of a tool result.
        first_results: tool results in an agent's first message; later ones have one each.
        gap_s: shortest and longest tool call, seconds.
        start_s: jobs begin within this many seconds.
        max_tokens: length of an answer, tokens.
    """

    jobs: int = 8
    turns: int = 8
    seed: int = 0
    result_chars: tuple[int, int] = (600, 1200)
    first_results: int = 4
    gap_s: tuple[float, float] = (0.3, 1.5)
    start_s: float = 1.0
    max_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what the user side says, and the seconds of the tool call before it."""

    message: str
    gap_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to be had, one request a step."""

    job_id: str
    steps: tuple[Step, ...]

    def estimate_tokens(self, max_tokens: int) -> int:
        """The context at the end, tokens, without a tokenizer: seldom more than 5% too low."""
        text = sum(len(step.message) for step in self.steps) / CHARS_PER_TOKEN
        return int(text) + (len(self.steps) + 1) * TEMPLATE_TOKENS + len(self.steps) * max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """One turn, as the client saw it.

    Attributes:
        job: the job's id.
        turn: 1 for the first.
        ttft_s: request sent to first text received, seconds.
        latency_s: request sent to answer complete, seconds.
        ended_s: answer complete, seconds since the run began.
        prompt_tokens: length of the prompt.
        cached_tokens: of these, how many the server says it did not compute.
        output_tokens: length of the answer.
        text: the answer.
    """

    job: str
    turn: int
    ttft_s: float
    latency_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    text: str


class AgentError(RuntimeError):
    """A server gave no answer to a turn."""


def source_files(root: Path = ROOT) -> list[Path]:
    """The files that agents read: this project's own, then the standard library's, in order."""
    folders = ("tiered_kv", "connectors", "policies", "bench")
    own = sorted(path for folder in folders for path in (root / folder).glob("**/*.py"))
    library = Path(sysconfig.get_path("stdlib"))
    return [path for path in (*own, *(library / name for name in STANDARD_LIBRARY)) if _long(path)]


def make_jobs(plan: JobPlan, files: Sequence[Path]) -> list[Job]:
    """Draw ``plan.jobs`` jobs over ``files``: equal for equal plan, files and contents.

    Raises:
        ValueError: no files.
    """
    if not files:
        raise ValueError("no files for the agents to read")
    rng = random.Random(plan.seed)
    order = list(files)
    jobs = []
    for number in range(plan.jobs):
        rng.shuffle(order)
        paths = cycle(order)
        steps = []
        for turn in range(plan.turns):
            gap_s = rng.uniform(*plan.gap_s) if turn else rng.uniform(0, plan.start_s)
            results = [
                _tool_result(next(paths), rng.randint(*plan.result_chars), rng)
                for _ in range(1 if turn else plan.first_results)
            ]
            steps.append(Step("\n\n".join(results), gap_s))
        jobs.append(Job(f"agent-{number + 1}", tuple(steps)))
    return jobs


async def run_jobs(
    url: str,
    jobs: Iterable[Job],
    *,
    max_tokens: int,
    on_turn: Callable[[TurnResult], None] = lambda _: None,
    timeout_s: float,
) -> list[TurnResult]:
    """Run all jobs at once against the server at ``url`` and return every turn, in order of end.

    Each request carries its job's id and whether it is the last in ``kv_transfer_params``; a
    server without the connector ignores that.

    Args:
        url: base URL without ``/v1``.
        jobs: the work.
        max_tokens: length of an answer.
        on_turn: called after every turn.
        timeout_s: longest silence of the server.

    Raises:
        AgentError: a request failed; the other jobs are given up.
    """
    results: list[TurnResult] = []

    def done(result: TurnResult) -> None:
        results.append(result)
        on_turn(result)

    began = time.perf_counter()
    # Loopback: a proxy from the environment must not be asked.
    http = DefaultAsyncHttpxClient(trust_env=False, timeout=timeout_s)
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        tasks = [
            asyncio.create_task(_run_job(client, job, max_tokens, began, done)) for job in jobs
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return results


def in_other_order(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs, the last to begin first: batches are of other shapes, contents the same."""
    starts = [job.steps[0].gap_s for job in jobs]
    latest = max(starts)
    return [
        replace(job, steps=(replace(job.steps[0], gap_s=latest - start), *job.steps[1:]))
        for job, start in zip(jobs, starts, strict=True)
    ]


def differing_answers(first: Iterable[TurnResult], second: Iterable[TurnResult]) -> tuple[int, int]:
    """Number of turns that got another text in ``second``, and of jobs with such a turn.

    After a job's first such turn its chats differ too, and with them what follows.
    """
    texts = {(result.job, result.turn): result.text for result in second}
    differing = [r for r in first if texts.get((r.job, r.turn)) != r.text]
    return len(differing), len({result.job for result in differing})


async def _run_job(
    client: AsyncOpenAI,
    job: Job,
    max_tokens: int,
    began: float,
    done: Callable[[TurnResult], None],
) -> None:
    chat: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]
    for turn, step in enumerate(job.steps, start=1):
        await asyncio.sleep(step.gap_s)
        chat.append({"role": "user", "content": step.message})
        hints = {"job_id": job.job_id, "is_last_step": turn == len(job.steps)}
        try:
            result = await _ask(client, job.job_id, turn, chat, hints, max_tokens, began)
        except Exception as error:
            raise AgentError(f"turn {turn} of {job.job_id} {_trouble(error)}") from error
        chat.append({"role": "assistant", "content": result.text})
        done(result)


def _trouble(error: Exception) -> str:
    if isinstance(error, APITimeoutError):
        return "got no answer for longer than a client waits"
    if isinstance(error, APIStatusError):
        return f"was refused: {error.message}"
    return f"got no answer: {error!r}"


async def _ask(
    client: AsyncOpenAI,
    job_id: str,
    turn: int,
    chat: list[ChatCompletionMessageParam],
    hints: dict[str, object],
    max_tokens: int,
    began: float,
) -> TurnResult:
    sent = time.perf_counter()
    first: float | None = None
    text = ""
    usage = None
    stream = await client.chat.completions.create(
        model=MODEL_NAME,
        messages=chat,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kv_transfer_params": hints},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        piece = _text_of(chunk)
        if piece and first is None:
            first = time.perf_counter()
        text += piece
    ended = time.perf_counter()
    if usage is None:
        raise ValueError("the answer came without usage")
    details = usage.prompt_tokens_details
    return TurnResult(
        job=job_id,
        turn=turn,
        ttft_s=(first or ended) - sent,
        latency_s=ended - sent,
        ended_s=ended - began,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens,
        text=text,
    )


def _text_of(chunk: ChatCompletionChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def _long(path: Path) -> bool:
    return path.is_file() and path.stat().st_size >= 2_000


def _tool_result(path: Path, chars: int, rng: random.Random) -> str:
    """A question about whole lines of ``path``, about ``chars`` characters of them, at most."""
    text = path.read_text(encoding="utf-8", errors="replace")
    starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
    line = rng.randrange(max(1, sum(start + chars <= len(text) for start in starts)))
    end = min(starts[line] + chars, len(text))
    body = text[starts[line] : end].rsplit("\n", 1)[0]
    name = path.name if path.name != "__init__.py" else f"{path.parent.name}/{path.name}"
    return f"read_file({name!r}, line={line + 1}) returned:\n{body}\nWhat does this code do?"
