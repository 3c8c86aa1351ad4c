"""A job's first turn on one replica and its second on another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tiered_kv.bench.agents.client import Answer

from .replicas import Replica
from .turns import ask, shared_pages

ANSWER = 16
"""Tokens of the answers that are compared."""
ADDED = 40
"""Tokens that a second turn adds."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Figures of moved jobs.

    Attributes:
        remote_share: share of the first turns' tokens that the second replica had from the store.
        equal: the second turns of jobs that the second replica had whole from the store have the
            answers that the first gives to the same turns where it finds its own KV alone. Both
            compute the same tokens in the same shapes. What the second computed instead it computed
            in other shapes, which is enough to turn a near tie, and is not compared.
        compared: tokens of these answers.
        logprob_difference: largest difference of a token's logprob between the two, up to the first
            token that differs: behind it they follow different texts.
        cold_ms, moved_ms: median first token of prompts of that length that nobody has, and of
            the moved ones.
        speedup: the first over the second.
        pages: pages that the first replica left in the store.
    """

    remote_share: float
    equal: bool
    compared: int
    logprob_difference: float
    cold_ms: float
    moved_ms: float
    speedup: float
    pages: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def move(
    first: Replica,
    second: Replica,
    prompts: Sequence[Sequence[int]],
    cold: Sequence[Sequence[int]],
    tell: Callable[[str], None] = lambda _: None,
) -> Moved:
    """Ask first turns here, and second turns there.

    Args:
        prompts: of the first turns, whole blocks.
        cold: prompts of the same length as the second turns.
    """
    longer = [[*prompt, *prompt[100 : 100 + ADDED]] for prompt in prompts]
    for at, prompt in enumerate(prompts):
        tell("first turns")
        ask(first.client, f"job {at}", prompt)
    pages = shared_pages(first.client)
    moved: list[Answer] = []
    computed: list[Answer] = []
    for at, prompt in enumerate(longer):
        tell("second turns elsewhere")
        moved.append(ask(second.client, f"job {at}", prompt))
        if at < len(cold):
            computed.append(ask(second.client, f"cold {at}", cold[at]))
    differences, same, count = [0.0], True, 0
    found = [one.sources.get("remote_tokens", 0) for one in moved]
    whole = [at for at, prompt in enumerate(prompts) if found[at] == len(prompt)]
    for at in whole:
        for prompt in (prompts[at], longer[at]):
            tell("the same turns without the store")
            ask(first.client, f"stays {at}", prompt, salt=f"stays {at}")
    # Behind all of them: a context's end, which was saved meanwhile, is found on both sides.
    for at in whole:
        tell("answers compared")
        there = ask(second.client, f"job {at}", longer[at], answer=ANSWER)
        here = ask(first.client, f"stays {at}", longer[at], answer=ANSWER, salt=f"stays {at}")
        same = same and here.tokens == there.tokens
        count += len(here.tokens)
        differences.append(logprob_difference(here, there))
    cold_ms = statistics.median(one.ms for one in computed)
    moved_ms = statistics.median(one.ms for one in moved)
    return Moved(
        remote_share=sum(found) / sum(map(len, prompts)),
        equal=same and count > 0,
        compared=count,
        logprob_difference=max(differences),
        cold_ms=cold_ms,
        moved_ms=moved_ms,
        speedup=cold_ms / moved_ms,
        pages=pages,
    )


def logprob_difference(one: Answer, other: Answer) -> float:
    """Largest difference of a token's logprob between two answers to one prompt, up to the first
    token that differs: from there on they follow different texts."""
    largest = 0.0
    for at, (first, second) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        largest = max(largest, abs(first - second))
        if one.tokens[at] != other.tokens[at]:
            break
    return largest
