"""A real engine in observe mode answers like stock vLLM, and its estimate for a few agents under
pressure is what the connector then saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.servers.engines import Engine, engine, real_texts

pytestmark = pytest.mark.e2e

AGENTS, TURNS, BEGIN, SAID = 4, 3, 200, 100
"""Agents and their turns; tokens of the first prompt, and of what a tool says."""
POOL_BLOCKS = 24
"""Room for 736 tokens: of the four contexts at their end not two."""
SIZE = {"num_gpu_blocks_override": POOL_BLOCKS, "max_model_len": 640}
SETTINGS = {"cpu_gib": 0.5}
CLOSE = 0.15

Turn = tuple[int, ...]


def first_run(on: Engine, texts: list[list[int]]) -> tuple[list[Turn], list[Turn]]:
    """Play the agents, one turn after the other; returns prompts and answers. A prompt has the
    answers before it."""
    contexts = [text[:BEGIN] for text in texts]
    prompts, answers = list[Turn](), list[Turn]()
    for turn in range(TURNS):
        for agent, text in enumerate(texts):
            if turn:
                start = BEGIN + (turn - 1) * SAID
                contexts[agent] += text[start : start + SAID]
            prompts.append(tuple(contexts[agent]))
            answers.append(on.generate([contexts[agent]])[0].tokens)
            contexts[agent] += answers[-1]
    return prompts, answers


def again(on: Engine, prompts: list[Turn]) -> list[Turn]:
    """The same prompts in the same order."""
    answers = []
    for prompt in prompts:
        answers.append(on.generate([prompt])[0].tokens)
        on.settle()
    return answers


def found(on: Engine) -> int:
    """Prompt tokens that were not computed."""
    totals = on.half.counters.totals
    return int(totals["prompt_tokens_vram"] + totals["prompt_tokens_cpu"])


def test_observed_answers_are_stock_answers_and_its_word_holds(small_model: Path) -> None:
    texts = real_texts(small_model, [BEGIN + TURNS * SAID] * AGENTS)
    with engine(small_model, connector=False, **SIZE) as stock:
        prompts, answers = first_run(stock, texts)

    extra = {**SETTINGS, "mode": "observe"}
    with engine(small_model, connector=True, extra=extra, **SIZE) as observed:
        free = observed.free_blocks
        assert again(observed, prompts) == answers
        half, worker = observed.half, observed.worker
        assert half.observation is not None
        said, alone = dict(half.observation.would_have_saved), found(observed)
        assert observed.free_blocks == free, "no block is held"
        assert worker.pool is None
        assert worker.backend is None
        assert half.counters.totals["prompt_tokens_cpu"] == 0
        assert half.counters.totals["hook_errors"] == 0

    with engine(small_model, connector=True, extra=SETTINGS, **SIZE) as managed:
        again(managed, prompts)
        saved = found(managed) - alone
    assert saved > AGENTS * BEGIN, "agents are under pressure"
    assert sum(said.values()) == pytest.approx(saved, rel=CLOSE)
