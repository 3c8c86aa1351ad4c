"""A real engine in observe mode gives stock vLLM's answers. Its estimate for a few agents under
pressure matches what the connector then saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.servers.engines import Engine, engine, real_texts

pytestmark = pytest.mark.e2e

AGENTS, TURNS, BEGIN, SAID = 4, 3, 200, 100
"""Number of agents, of turns per agent, of tokens in the first prompt, and of tokens per tool
result."""
POOL_BLOCKS = 24
"""Blocks for 736 tokens: fewer than two of the four contexts at their final length."""
SIZE = {"num_gpu_blocks_override": POOL_BLOCKS, "max_model_len": 640}
SETTINGS = {"cpu_gib": 0.5}
CLOSE = 0.15

Turn = tuple[int, ...]


def first_run(on: Engine, texts: list[list[int]]) -> tuple[list[Turn], list[Turn]]:
    """Play the agents' turns in rotation. Each prompt contains the earlier answers. Returns the
    prompts and the answers."""
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
    """Send the same prompts in the same order, and return the answers."""
    answers = []
    for prompt in prompts:
        answers.append(on.generate([prompt])[0].tokens)
        on.settle()
    return answers


def found(on: Engine) -> int:
    """Return the number of prompt tokens that were not computed."""
    totals = on.half.counters.totals
    return int(totals["prompt_tokens_vram"] + totals["prompt_tokens_cpu"])


def test_observe_mode_answers_like_stock_and_its_estimate_holds(small_model: Path) -> None:
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
