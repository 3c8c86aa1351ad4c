"""Outputs with the connector equal outputs without it, from any source of KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_kv.bench.servers.engines import Answer, Engine, engine, real_texts
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import Direction

pytestmark = pytest.mark.e2e

LENGTHS = [48, 31, 32, 33, 63, 64, 65, 100, 128, 129, 150, 200, 256, 257, 300, 400]
"""Text lengths in tokens: around block boundaries, and others."""
CANDIDATES = 12
DECIDED = 0.5
"""Margin in nats that rounding does not overturn: bf16 rounds these logits to 1/8."""
POOL_TOKENS = 130 * 32


ANSWER = 8
"""Tokens per answer."""


@dataclass(frozen=True)
class Stock:
    """Texts, and stock vLLM's answers to them.

    The last token of each text is stock's own answer to the rest of the text. Stock vLLM therefore
    decodes that token in a step with one token per request, like an engine that has restored the
    rest of the text. The two engines then use batches of the same shapes, and KV that was computed
    in the same batches. Rounding depends only on these.

    Attributes:
        rests: the texts without their last tokens.
        alone: answers to the texts, one at a time.
        eights: answers to the texts in batches of eight, after their last tokens were decoded.
        again: the same as ``eights``, from another run.
    """

    texts: list[list[int]]
    rests: list[list[int]]
    alone: list[Answer]
    eights: list[Answer]
    again: list[Answer]


@pytest.fixture(scope="module")
def stock(small_model: Path) -> Stock:
    with engine(small_model, connector=False, async_scheduling=False) as plain:
        rests = decided_texts(plain, small_model)
        runs = []
        for _ in range(2):
            plain.core.reset_prefix_cache()
            runs.append(in_eights(plain, rests, ANSWER + 1))
        texts = [[*rest, answer.tokens[0]] for rest, answer in zip(rests, runs[0], strict=True)]
        plain.core.reset_prefix_cache()
        alone = plain.alone(texts, ANSWER)
    return Stock(texts, rests, alone, *(list(map(behind_the_first, run)) for run in runs))


def behind_the_first(answer: Answer) -> Answer:
    """Return the answer without its first token."""
    return replace(answer, tokens=answer.tokens[1:], logprobs=answer.logprobs[1:])


def decided_texts(plain: Engine, model: Path) -> list[list[int]]:
    """Return, for each of ``LENGTHS``, a text that is one token shorter: the candidate that stock
    vLLM answers with the largest margin.

    Where two tokens are nearly equally likely, bf16 rounding decides between them. It rounds
    differently in a prefill and in a decode step, so stock's own prefix cache can change such an
    answer. The choice depends only on stock's logits, before the connector runs.
    """
    lengths = [length - 1 for length in LENGTHS for _ in range(CANDIDATES)]
    candidates = real_texts(model, lengths)
    answers = plain.generate(candidates, ANSWER + 1)
    chosen = []
    for i in range(0, len(candidates), CANDIDATES):
        group = range(i, i + CANDIDATES)
        best = max(group, key=lambda n: answers[n].margin)
        assert answers[best].margin >= DECIDED, f"no decided text of {lengths[i]} tokens"
        chosen.append(candidates[best])
    return chosen


@pytest.fixture(scope="module")
def ours(small_model: Path, stock: Stock) -> Iterator[Engine]:
    """An engine without async scheduling, whose sync restores finish before the step that needs
    them. With async scheduling, all restores would be async, and requests would be computed in
    other batches."""
    extra = {"cpu_gib": 1, "policy": "lru"}
    with engine(small_model, connector=True, extra=extra, async_scheduling=False) as made:
        yield made


def in_eights(on: Engine, texts: list[list[int]], tokens: int = ANSWER) -> list[Answer]:
    return [a for i in range(0, len(texts), 8) for a in on.generate(texts[i : i + 8], tokens)]


def differences(a: list[Answer], b: list[Answer]) -> NDArray[np.float64]:
    """Return the absolute logprob differences of the tokens before the first disagreement of each
    text."""
    found = []
    for one, other in zip(a, b, strict=True):
        for i, token in enumerate(one.tokens):
            if token != other.tokens[i]:
                break
            found.append(abs(one.logprobs[i] - other.logprobs[i]))
    return np.array(found)


def restored_tokens(on: Engine) -> int:
    return int(on.half.counters.totals["prompt_tokens_cpu"])


def tokens_of(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def test_greedy_output_of_single_requests_equals_stocks(ours: Engine, stock: Stock) -> None:
    right = tokens_of(stock.alone)
    assert tokens_of(ours.alone(stock.texts)) == right, "cold"
    twice = [ours.alone([text, text])[1] for text in stock.texts]
    assert tokens_of(twice) == right, "VRAM hit"
    for mode in RestoreMode:
        ours.evict_vram(POOL_TOKENS)
        ours.half.pages.restores.policy = AlwaysRestore(mode)
        before = restored_tokens(ours)
        assert tokens_of(ours.alone(stock.texts)) == right, f"restored, {mode}"
        assert restored_tokens(ours) - before == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("mode", list(RestoreMode))
def test_output_is_the_same_after_restores_that_fail(
    ours: Engine, stock: Stock, mode: RestoreMode
) -> None:
    ours.alone(stock.texts)
    ours.evict_vram(POOL_TOKENS)
    ours.half.pages.restores.policy = AlwaysRestore(mode)
    faulty = ours.worker.backend = FaultyTransfer(ours.worker.backend)
    try:
        for text, answer in zip(stock.texts, stock.alone, strict=True):
            faulty.fail_next(Direction.LOAD, {len(text) // 64})
            assert ours.alone([text])[0].tokens == answer.tokens, f"{len(text)} tokens"
    finally:
        ours.worker.backend = faulty.inner
    assert faulty.struck == len(stock.texts)


def test_batches_of_eight_agree_as_closely_as_stock_with_itself(ours: Engine, stock: Stock) -> None:
    ours.half.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    # Existing pages were computed in other batches, so their bytes differ.
    ours.core.scheduler.reset_prefix_cache(reset_connector=True)
    in_eights(ours, stock.rests, ANSWER + 1)
    ours.evict_vram(POOL_TOKENS)
    before = restored_tokens(ours)
    restored = in_eights(ours, stock.texts)
    assert restored_tokens(ours) - before == sum(LENGTHS) - len(LENGTHS)

    assert not disagreement(stock, restored)


def unlike(a: list[Answer], b: list[Answer]) -> int:
    """Return the number of texts whose answers have different tokens."""
    return sum(one.tokens != other.tokens for one, other in zip(a, b, strict=True))


def disagreement(stock: Stock, answers: list[Answer]) -> list[str]:
    """Return the measures by which answers in batches of eight differ too much from stock's. The
    number of differing answers may be as large as in a second stock run, and the differences 1.5
    times as large. If stock is reproducible bit for bit, every difference counts."""
    noise, ours = by_text(stock.eights, stock.again), by_text(stock.eights, answers)
    compared = {
        "other answers": (unlike(stock.eights, answers), unlike(stock.eights, stock.again)),
        "mean difference": (ours.mean(), 1.5 * noise.mean()),
        "largest difference": (ours.max(), 1.5 * noise.max()),
    }
    return [
        f"{what}: {x:.3g}, at most {limit:.3g}"
        for what, (x, limit) in compared.items()
        if not x <= limit
    ]


def by_text(a: list[Answer], b: list[Answer]) -> NDArray[np.float64]:
    """Return the mean absolute logprob difference of each text, infinite where the first tokens
    differ."""
    pairs = zip(a, b, strict=True)
    found = [differences([one], [other]) for one, other in pairs]
    return np.array([each.mean() if each.size else np.inf for each in found])


def test_a_deliberately_wrong_page_is_detected(ours: Engine, stock: Stock) -> None:
    """Wrong bytes in restored pages are detected. If they were not, the test above could pass
    without comparing anything."""
    ours.half.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    ours.evict_vram(POOL_TOKENS)
    faulty = ours.worker.backend = FaultyTransfer(ours.worker.backend)
    try:
        for _ in stock.texts:
            faulty.corrupt_next_load()
        wrong = in_eights(ours, stock.texts)
    finally:
        ours.worker.backend = faulty.inner
        ours.core.scheduler.reset_prefix_cache(reset_connector=True)
    assert faulty.struck == len(stock.texts)
    assert disagreement(stock, wrong)

    one_wrong = [wrong[0], *stock.eights[1:]]
    assert disagreement(stock, one_wrong), "two wrong pages of one text are enough"


def test_nothing_is_left_behind(ours: Engine) -> None:
    ours.settle()
    assert ours.free_blocks == 129
    ours.half.pages.index.check_integrity()
    assert ours.half.pages.book.in_flight == 0
    assert ours.half.counters.totals["hook_errors"] == 0
