"""The demo's jobs: agents that read source code, sized so that this machine finishes in time.

An agent's first prompt contains lines of several files, as real agents start with their tool
descriptions and task. Each later turn adds lines of one file. The files belong to this project or
to Python's standard library. Each turn asks for a short answer. The gap before the next turn is the
time of a tool call. The KV pool is sized by the jobs, so the memory pressure is the same on every
machine.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.paths import ROOT

from .speed import Speed

Arrivals: TypeAlias = Sequence[tuple[float, Job]]
"""Jobs with their start times, in seconds since the start of the run."""

SYSTEM = "You are a coding agent. You read source files and answer in one short sentence."
CHARS_PER_TOKEN = 3.4
"""Characters of code per token in SmolLM2's tokenizer: 3.3 to 4.0, depending on the file. Larger
vocabularies need fewer tokens."""
TEMPLATE_TOKENS = 16
"""Approximate number of tokens that a chat template adds to a message and its answer."""
SHORTEST_FILE = 2_000
_LIBRARY = (
    "argparse ast asyncio/base_events collections/__init__ concurrent/futures/thread configparser "
    "contextlib dataclasses datetime difflib email/message functools heapq http/client inspect "
    "json/decoder logging/__init__ pathlib queue random shutil socketserver statistics subprocess "
    "tempfile textwrap threading tokenize urllib/parse zipfile"
)

POOL_SHARE = 0.4
"""Size of the KV pool, as a fraction of all jobs' final contexts."""
STOCK_SHARE = 0.92
"""Fraction of all prompt tokens that stock vLLM computes with a pool of ``POOL_SHARE``, as
measured."""
OVERHEAD = 1.5
"""Measured duration of a run, over the predicted time of its tokens. The difference comes from
steps that mix prompts and answers, from longer contexts, and from gaps. Only the demo's length
depends on this factor."""
MEMORY_SHARE = 0.4
"""Fraction of free memory that KV may occupy, in both tiers together."""
FEWEST_JOBS, MOST_JOBS = 4, 64
SHORTEST_TURN = 130
"""Minimum tokens that a turn adds: a template, an answer, and a few lines of code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Number and size of the demo's jobs.

    Attributes:
        jobs: number of concurrent jobs.
        turns: turns per job.
        seed: seed of the files, lines and gaps that are drawn.
        result_chars: minimum and maximum length of a tool result, characters.
        first_results: tool results in an agent's first message. Each later message has one.
        gap_s: minimum and maximum duration of a tool call, seconds.
        start_s: period within which jobs start, seconds.
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

    @property
    def result_tokens(self) -> int:
        """Mean length of a tool result, tokens."""
        return int(sum(self.result_chars) / 2 / CHARS_PER_TOKEN)

    @property
    def turn_tokens(self) -> int:
        """Mean number of tokens that a later turn adds to a context."""
        return self.result_tokens + TEMPLATE_TOKENS + self.max_tokens

    @property
    def context_tokens(self) -> int:
        """Mean length of an agent's final context, tokens."""
        return (self.first_results - 1) * self.result_tokens + self.turns * self.turn_tokens

    def kv_bytes(self, speed: Speed) -> int:
        """Return the KV bytes of all final contexts and of the pool together."""
        return int(self.jobs * self.context_tokens * speed.kv_token_bytes * (1 + POOL_SHARE))

    def predict_s(self, speed: Speed, stock_runs: int = 1) -> float:
        """Predict the duration of ``stock_runs`` runs of stock vLLM and one run with the connector,
        seconds.
        """
        contexts = self.jobs * self.context_tokens
        growing = (replace(self, turns=turn + 1).context_tokens for turn in range(self.turns))
        prompts = self.jobs * sum(growing)
        computed = stock_runs * STOCK_SHARE * prompts + contexts
        answered = (stock_runs + 1) * self.jobs * self.turns * self.max_tokens
        busy_s = computed / speed.prefill_tokens_s + answered / speed.decode_tokens_s
        waits_s = self.start_s + self.turns * sum(self.gap_s) / 2
        return OVERHEAD * busy_s + (stock_runs + 1) * waits_s

    def scaled(self, scale: float, max_context_tokens: int) -> JobPlan:
        """Return a plan with about ``scale`` times the total context tokens.

        Args:
            max_context_tokens: maximum context length of the model, which limits each job.
        """
        side = math.sqrt(scale)
        longest = int(max_context_tokens * 0.8) // (self.turns + self.first_results)
        added = min(max(int(self.turn_tokens * side), SHORTEST_TURN), longest)
        chars = (added - TEMPLATE_TOKENS - self.max_tokens) * CHARS_PER_TOKEN
        return replace(
            self,
            jobs=min(max(round(self.jobs * side), FEWEST_JOBS), MOST_JOBS),
            result_chars=(int(chars * 2 / 3), int(chars * 4 / 3)),
        )


def plan_for(
    speed: Speed, seconds: float, free_bytes: int, base: JobPlan, stock_runs: int = 1
) -> JobPlan:
    """Return the largest plan like ``base`` that fits into ``seconds``, as predicted, and into
    memory.

    A larger plan has more and longer jobs. If no plan fits, returns the smallest plan, which still
    puts the pool under pressure.

    Args:
        free_bytes: free memory, for KV and everything else.
        stock_runs: number of runs of stock vLLM.
    """
    scales = [2 ** (step / 8) for step in range(-32, 64)]
    plans = [base.scaled(scale, speed.max_context_tokens) for scale in scales]
    fitting = [
        plan
        for plan in plans
        if plan.predict_s(speed, stock_runs) <= seconds
        and plan.kv_bytes(speed) <= MEMORY_SHARE * free_bytes
    ]
    return fitting[-1] if fitting else plans[0]


@dataclass(frozen=True, slots=True)
class Sizing:
    """KV pool and maximum request length, derived from the jobs.

    Attributes:
        max_model_len: maximum request length, tokens.
        kv_blocks: number of blocks in the pool.
        block_size: tokens per block.
        contexts_tokens: sum of the jobs' final contexts, tokens.
    """

    max_model_len: int
    kv_blocks: int
    block_size: int
    contexts_tokens: int

    @property
    def pool_tokens(self) -> int:
        """Size of the pool, tokens."""
        return self.kv_blocks * self.block_size


def size_for(arrivals: Arrivals, block_size: int) -> Sizing:
    """Return the size of a pool that is too small for all jobs together, but large enough for each
    of them.
    """
    contexts = [final_tokens(job) for _, job in arrivals]
    longest = -(-int(max(contexts) * 1.15) // 256) * 256
    # vLLM reserves a block, and a request of maximum length must fit.
    tokens = max(int(sum(contexts) * POOL_SHARE), longest + 2 * block_size)
    return Sizing(longest, -(-tokens // block_size), block_size, sum(contexts))


def final_tokens(job: Job) -> int:
    """Estimate a job's final context length without a tokenizer. The estimate is seldom more than
    5% too low.
    """
    text = sum(len(turn.text) for turn in job.turns) / CHARS_PER_TOKEN
    answers = sum(turn.output for turn in job.turns)
    return int(text) + (len(job.turns) + 1) * TEMPLATE_TOKENS + answers


def source_files() -> list[Path]:
    """Return the files that agents read: this project's files, then the standard library's. Files
    shorter than ``SHORTEST_FILE`` bytes are left out.
    """
    folders = ("tiered_kv", "connectors", "policies", "bench")
    own = sorted(path for folder in folders for path in (ROOT / folder).glob("**/*.py"))
    library = Path(sysconfig.get_path("stdlib"))
    files = [*own, *(library / f"{name}.py" for name in _LIBRARY.split())]
    return [path for path in files if path.is_file() and path.stat().st_size >= SHORTEST_FILE]


def make_jobs(plan: JobPlan, files: Sequence[Path]) -> Arrivals:
    """Draw the jobs of a plan. Equal plans and files give equal jobs."""
    rng = random.Random(plan.seed)
    order = list(files)
    arrivals = []
    for number in range(plan.jobs):
        rng.shuffle(order)
        paths = cycle(order)
        before_s, texts = list[float](), list[str]()
        for at in range(plan.turns):
            before_s.append(rng.uniform(*plan.gap_s) if at else rng.uniform(0, plan.start_s))
            results = [
                _tool_result(next(paths), rng.randint(*plan.result_chars), rng)
                for _ in range(1 if at else plan.first_results)
            ]
            texts.append("\n\n".join(results))
        turns = tuple(
            Turn((), (), gap_s, length=plan.max_tokens, text=text)
            for text, gap_s in zip(texts, [*before_s[1:], 0.0], strict=True)
        )
        arrivals.append((before_s[0], Job(f"agent-{number + 1}", "", turns, SYSTEM)))
    return arrivals


def in_other_order(arrivals: Arrivals) -> Arrivals:
    """Return the jobs in reverse order of start, which changes the shapes of the batches."""
    latest = max(at_s for at_s, _ in arrivals)
    return [(latest - at_s, job) for at_s, job in arrivals]


def _tool_result(path: Path, chars: int, rng: random.Random) -> str:
    """Return a message with whole lines of ``path`` (up to ``chars`` characters) and a question
    about them.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
    line = rng.randrange(max(1, sum(start + chars <= len(text) for start in starts)))
    end = min(starts[line] + chars, len(text))
    body = text[starts[line] : end].rsplit("\n", 1)[0]
    name = path.name if path.name != "__init__.py" else f"{path.parent.name}/{path.name}"
    return f"read_file({name!r}, line={line + 1}) returned:\n{body}\nWhat does this code do?"
