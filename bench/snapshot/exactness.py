"""Exact continuations: a turn is cut at any token, and goes on elsewhere bit for bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.client import Answer, Reading
from tiered_kv.snapshot.reader import open_snapshot

from .told_answers import Client

TOKENS = 24
"""Tokens of a continuation that are compared."""
BEYOND = 64
"""Tokens that the original turn answers beyond the one at which its snapshot is asked for."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A continuation beside the one that would have been.

    Attributes:
        equal: True if its tokens and logprobs are, bit for bit.
        control_equal: the same of one that was computed from the tokens.
        control_logprob: largest difference of a logprob there, while the tokens agree.
    """

    equal: bool
    control_equal: bool
    control_logprob: float


def cut_and_go_on(
    source: Client, target: Client, root: Path, prompt: Sequence[int], number: int, seed: int
) -> Compared:
    """Cut a turn at a random token, and have it go on from its snapshot."""
    at = random.Random(seed).randrange(1, 40)
    name, job = f"cut-{number}", f"exact-{number}"
    whole = answered_with(
        source,
        prompt,
        at + BEYOND,
        job,
        at,
        lambda: source.post("snapshots", job=job, name=name, exact=True),
    )
    with open_snapshot(root / name) as snapshot:
        manifest = snapshot.manifest
    so_far = list(manifest.token_ids)
    there = len(so_far) - len(prompt)
    if so_far != [*prompt, *whole.tokens[:there]]:
        raise RuntimeError("a snapshot has other tokens than its turn")
    if there + TOKENS > len(whole.tokens):
        raise RuntimeError("a snapshot was taken too late to be compared")
    rest = slice(there, there + TOKENS)
    expected = replace(whole, tokens=whole.tokens[rest], logprobs=whole.logprobs[rest])
    brought = target.post("restores", name=name, exact=True)
    found = target.ask(so_far, TOKENS, manifest.job, brought["cache_salt"])
    control = target.ask(so_far, TOKENS, f"control-{number}", f"control-{number}")
    return Compared(
        equal=_equal(found, expected),
        control_equal=_equal(control, expected),
        control_logprob=logprob_distance(control, expected),
    )


def answered_with(
    client: Client,
    prompt: Sequence[int],
    tokens: int,
    job: str,
    at: int,
    beside: Callable[[], Any],
) -> Answer:
    """Ask, and do something beside it from the token with that number on."""
    failed = list[BaseException]()

    def run() -> None:
        try:
            beside()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)

    def on_token(answer: Reading) -> None:
        if len(answer.tokens) >= at and thread.ident is None:
            thread.start()

    answer = client.ask(prompt, tokens, job, on_token=on_token)
    thread.join()
    if failed:
        raise failed[0]
    return answer


def _equal(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and one.logprobs == other.logprobs


def logprob_distance(one: Answer, other: Answer) -> float:
    """Largest difference of two answers' logprobs, up to the first token that differs."""
    largest = 0.0
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
    for mine, theirs, a, b in pairs:
        largest = max(largest, abs(a - b))
        if mine != theirs:
            break
    return largest
