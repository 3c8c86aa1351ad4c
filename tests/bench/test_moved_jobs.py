"""Comparison of two replicas' answers to one prompt."""

from __future__ import annotations

from tiered_kv.bench.agents.client import Answer
from tiered_kv.bench.cluster.moved import logprob_difference


def answer(*said: tuple[str, float]) -> Answer:
    words, logprobs = zip(*said, strict=True)
    return Answer(0.0, 1.0, 1.0, 8, len(words), tokens=tuple(map(hash, words)), logprobs=logprobs)


def test_what_two_answers_say_behind_another_token_is_not_compared() -> None:
    here = answer(("the", -0.1), ("cat", -0.69), ("purrs", -0.2))
    there = answer(("the", -0.15), ("dog", -0.7), ("has", -4.0))
    assert 0.049 < logprob_difference(here, there) < 0.051


def test_a_token_that_differs_counts_itself() -> None:
    here, there = answer(("cat", -0.1), ("purrs", -0.2)), answer(("fish", -2.1), ("swims", -9.0))
    assert logprob_difference(here, there) == 2.0
    assert logprob_difference(here, here) == 0.0
