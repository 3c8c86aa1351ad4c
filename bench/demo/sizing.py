"""The demo's jobs and KV pool, sized to a machine.

Jobs are as many and as long as both servers together get through in a given time. The KV pool is
sized by the jobs, not by the machine, so that it is as short of room everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .agents import CHARS_PER_TOKEN, TEMPLATE_TOKENS, Job, JobPlan
from .speed import Speed

POOL_SHARE = 0.4
"""The pool's size, as a share of what the jobs' contexts are together at their end."""

STOCK_SHARE = 0.92
"""The share of all prompt tokens that stock vLLM computes with a pool of that size: measured."""

OVERHEAD = 1.5
"""A run's time over that of its tokens alone at the measured rates: steps that mix prompts and
answers, longer contexts, gaps. Measured; only the demo's length depends on it."""

MEMORY_SHARE = 0.4
"""The share of free memory that KV may take, in both tiers together."""

FEWEST_JOBS, MOST_JOBS = 4, 64
SHORTEST_TURN = 130
"""Tokens that a turn adds at least: a template, an answer, and a few lines of code."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """KV pool and longest request, from the jobs.

    Attributes:
        max_model_len: tokens.
        kv_blocks: blocks of ``block_size`` tokens.
        contexts_tokens: what the jobs' contexts are together at their end.
    """

    max_model_len: int
    kv_blocks: int
    block_size: int
    contexts_tokens: int

    @property
    def pool_tokens(self) -> int:
        """The pool's size in tokens."""
        return self.kv_blocks * self.block_size


def size_for(jobs: Sequence[Job], max_tokens: int, block_size: int) -> Sizing:
    """A pool too small for ``jobs`` together but large enough for any one of them."""
    contexts = [job.estimate_tokens(max_tokens) for job in jobs]
    longest = -(-int(max(contexts) * 1.15) // 256) * 256
    # vLLM keeps a block for itself, and one request of maximum length must fit.
    tokens = max(int(sum(contexts) * POOL_SHARE), longest + 2 * block_size)
    return Sizing(longest, -(-tokens // block_size), block_size, sum(contexts))


def predict_s(plan: JobPlan, speed: Speed, stock_runs: int = 1) -> float:
    """Seconds that stock vLLM, so often, and the connector take for a plan together."""
    contexts = plan.jobs * context_tokens(plan)
    prompts = sum(context_tokens(replace(plan, turns=turn + 1)) for turn in range(plan.turns))
    prompts *= plan.jobs
    computed = stock_runs * STOCK_SHARE * prompts + contexts
    answered = (stock_runs + 1) * plan.jobs * plan.turns * plan.max_tokens
    busy_s = computed / speed.prefill_tokens_s + answered / speed.decode_tokens_s
    waits_s = plan.start_s + plan.turns * sum(plan.gap_s) / 2
    return OVERHEAD * busy_s + (stock_runs + 1) * waits_s


def plan_for(
    speed: Speed, seconds: float, free_bytes: int, base: JobPlan, stock_runs: int = 1
) -> JobPlan:
    """The largest plan like ``base`` that takes no longer than ``seconds``, as predicted.

    More and longer jobs both make a plan larger. Even the smallest puts the pool under pressure;
    on a machine that is too slow for it, it takes longer.

    Args:
        free_bytes: memory for KV and all else.
    """
    scales = [2 ** (step / 8) for step in range(-32, 64)]
    plans = [scaled(base, scale, speed.max_context_tokens) for scale in scales]
    fitting = [
        plan
        for plan in plans
        if predict_s(plan, speed, stock_runs) <= seconds
        and kv_bytes(plan, speed) <= MEMORY_SHARE * free_bytes
    ]
    return fitting[-1] if fitting else plans[0]


def scaled(base: JobPlan, scale: float, max_context_tokens: int) -> JobPlan:
    """A plan with about ``scale`` times as many tokens of context in all."""
    side = math.sqrt(scale)
    jobs = min(max(round(base.jobs * side), FEWEST_JOBS), MOST_JOBS)
    longest = int(max_context_tokens * 0.8) // (base.turns + base.first_results)
    added = min(max(int(turn_tokens(base) * side), SHORTEST_TURN), longest)
    chars = (added - TEMPLATE_TOKENS - base.max_tokens) * CHARS_PER_TOKEN
    # As far apart as in ``base``, where the longest is twice the shortest.
    return replace(base, jobs=jobs, result_chars=(int(chars * 2 / 3), int(chars * 4 / 3)))


def turn_tokens(plan: JobPlan) -> int:
    """Tokens that a later turn adds to a context, on average: a tool's result, a template, an
    answer."""
    return result_tokens(plan) + TEMPLATE_TOKENS + plan.max_tokens


def result_tokens(plan: JobPlan) -> int:
    """Tokens of a tool's result, on average."""
    return int(sum(plan.result_chars) / 2 / CHARS_PER_TOKEN)


def context_tokens(plan: JobPlan) -> int:
    """Tokens of an agent's context at its end, on average."""
    return (plan.first_results - 1) * result_tokens(plan) + plan.turns * turn_tokens(plan)


def kv_bytes(plan: JobPlan, speed: Speed) -> int:
    """KV of all contexts in CPU memory, and of the pool."""
    contexts = plan.jobs * context_tokens(plan)
    return int(contexts * speed.kv_token_bytes * (1 + POOL_SHARE))
