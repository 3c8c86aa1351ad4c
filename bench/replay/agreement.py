"""Agreement of outputs: raw logprobs of the same tokens, compared with stock vLLM's.

The effect of one wrong page of 32 tokens was measured on SmolLM2-135M, with an answer of 151 tokens
after a prompt of 1,790. Replacing the first page by a later one, a middle page by zeros, or the
last page by another job's page changed logprobs by 0.44, 0.23 and 0.37 nats on average. Correct
pages computed in another batch changed them by 0.02. Another job's page in the middle also changed
them by only 0.02: a page to which no later token attends has no effect beyond rounding, so no
comparison of outputs can detect it. Checksums and tests of the pages themselves cover that case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tiered_kv.bench.agents.results import Run, TurnDone

from .names import STOCK

WIDER = 1.5
"""Factor of the tolerance. Outputs agree if their differences are at most this multiple of the
differences between stock vLLM's own runs, plus the constants below."""
MEDIAN_NATS, TAIL_NATS, TURN_NATS = 0.02, 0.25, 0.1
"""Constants of the tolerance. Two stock runs that split their prompts in the same way are equal bit
for bit, but a restored prefix changes the split, which alone caused differences of up to 0.004, 0.2
and 0.03 nats (bf16, SmolLM2-135M)."""
LONG_TURN = 8
"""Minimum number of tokens for a meaningful mean of one turn's differences."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of raw logprobs of the same tokens between two runs, in nats.

    Attributes:
        tokens: number of compared tokens.
        other_answers: number of turns whose tokens differ, or that only one run has.
        median, p99: quantiles of the absolute differences.
        worst_turn: largest mean difference of a single turn. A wrong page affects one or two turns,
            which have too few tokens to change the two quantiles. Most tokens of these turns do not
            change, so the median of a turn would hide the page too.
    """

    tokens: int
    other_answers: int
    median: float
    p99: float
    worst_turn: float


def difference(one: Run, other: Run) -> Difference | None:
    """Compare two runs over the jobs that both have. Returns None if no tokens can be compared."""
    first, second = _turns(one), _turns(other)
    given = {job.name for job in one.jobs} & {job.name for job in other.jobs}
    gaps: list[np.ndarray] = []
    strangers = 0
    for key in sorted(key for key in first.keys() | second.keys() if key[0] in given):
        a, b = first.get(key), second.get(key)
        if a is None or b is None or a.tokens != b.tokens or len(a.logprobs) != len(b.logprobs):
            strangers += 1
        elif a.logprobs:
            gaps.append(np.abs(np.subtract(a.logprobs, b.logprobs)))
    if not gaps:
        return None
    together = np.concatenate(gaps)
    long = [float(np.mean(gap)) for gap in gaps if len(gap) >= LONG_TURN]
    median, p99 = np.quantile(together, (0.5, 0.99))
    return Difference(len(together), strangers, float(median), float(p99), max(long, default=0.0))


def within(found: Difference, yardstick: Difference) -> bool:
    """Return True if ``found`` is at most ``yardstick``, the difference between stock runs, plus
    the tolerance that ``WIDER`` and the constants after it define.
    """
    return (
        found.other_answers <= yardstick.other_answers
        and found.median <= WIDER * yardstick.median + MEDIAN_NATS
        and found.p99 <= WIDER * yardstick.p99 + TAIL_NATS
        and found.worst_turn <= WIDER * yardstick.worst_turn + TURN_NATS
    )


def agreement(run: Run, runs: Sequence[Run]) -> bool | None:
    """Return True if a run's outputs agree with those of stock vLLM as closely as the outputs of
    stock runs agree with each other.

    The reference is a run of the same load on a server whose name starts with ``stock``. The
    yardstick is the largest difference between the reference and the other stock runs, including
    runs of other loads. Logprobs depend on how a prompt was split into batches, and a restored
    prefix changes the split even where stock vLLM repeats its results bit for bit.

    Returns:
        None if there are fewer than two stock runs, or if nothing can be compared.
    """
    stock = [other for other in runs if other.server.startswith(STOCK) and other is not run]
    same = [other for other in stock if other.load == run.load]
    if not same:
        return None
    # A stock run of the same round ran at nearly the same time.
    reference = min(same, key=lambda other: abs(other.round - run.round))
    found = difference(run, reference)
    usual = [difference(other, reference) for other in stock if other is not reference]
    yardstick = widest([one for one in usual if one is not None])
    return within(found, yardstick) if found and yardstick else None


def widest(differences: Sequence[Difference]) -> Difference | None:
    """Return the maximum of each figure; None if there are no differences."""
    if not differences:
        return None
    every = list(map(asdict, differences))
    return Difference(**{name: max(one[name] for one in every) for name in every[0]})


def _turns(run: Run) -> dict[tuple[str, int], TurnDone]:
    return {(job.name, turn.turn): turn for job in run.jobs for turn in job.turns}
