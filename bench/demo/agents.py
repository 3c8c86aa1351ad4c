"""Jobs that behave like agents: a growing chat, a tool call between turns, real text.

An agent here reads code: lines of several files at first, as real agents begin with the
descriptions of their tools and their task, then of one file a turn, of this project or of Python's
standard library. Each turn asks for a short answer; the gap before the next turn is the time that
the next tool call takes. The same seed gives the same jobs, so that two servers
can be given the same work. A server's own answers become part of the chat, so two runs differ
only where the servers' outputs do.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from tiered_kv.bench.agents.client import open_client
from tiered_kv.bench.agents.jobs import Job as PlayedJob
from tiered_kv.bench.agents.jobs import Turn
from tiered_kv.bench.agents.player import Player, together
from tiered_kv.bench.agents.results import TurnDone
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.servers.vllm_server import MODEL_NAME

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
    """Run all jobs concurrently against the server at ``url`` and return every turn, in order of
    end.

    Each request carries its job's id and whether it is the last in ``kv_transfer_params``; a
    server without the connector ignores that.

    Args:
        url: base URL without ``/v1``.
        max_tokens: length of an answer.
        on_turn: called after every turn.
        timeout_s: longest silence of the server.

    Raises:
        AgentError: a request failed; the other jobs are given up.
    """
    results: list[TurnResult] = []

    def done(job: str, turn: TurnDone) -> None:
        results.append(
            TurnResult(
                job=job,
                turn=turn.turn,
                ttft_s=turn.ttft_s,
                latency_s=turn.latency_s,
                ended_s=turn.sent_s + turn.latency_s,
                prompt_tokens=turn.prompt_tokens,
                cached_tokens=turn.cached_tokens,
                output_tokens=turn.output_tokens,
                text=turn.text,
            )
        )
        on_turn(results[-1])

    async with open_client(url, MODEL_NAME, silence_s=timeout_s) as client:
        player = Player(client, on_turn=done)

        async def run(job: Job) -> None:
            (played,) = await player.arriving([(job.steps[0].gap_s, _played(job, max_tokens))])
            if played.error is not None:
                raise AgentError(f"{job.job_id}, {played.error}")

        await together(map(run, jobs))
    return results


def _played(job: Job, max_tokens: int) -> PlayedJob:
    """The job for the player, whose gaps come after a turn and not before it."""
    gaps = [*(step.gap_s for step in job.steps[1:]), 0.0]
    turns = zip(job.steps, gaps, strict=True)
    made = tuple(Turn((), (), gap_s, length=max_tokens, text=step.message) for step, gap_s in turns)
    return PlayedJob(job.job_id, "", made, SYSTEM)


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
