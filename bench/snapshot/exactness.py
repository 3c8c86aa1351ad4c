"""Exact continuations: a turn is cut at any token, and its continuation on another engine is the
same bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tiered_kv.bench.agents.client import Answer, Reading
from tiered_kv.bench.restore import ask, logprob_distance
from tiered_kv.snapshot.reader import open_snapshot

TOKENS = 24
"""Number of compared tokens per continuation."""
BEYOND = 64
"""Number of tokens that the original turn generates after the token at which its snapshot is
requested."""
T = TypeVar("T")


def post(client: httpx.Client, what: str, **asked: object) -> dict[str, Any]:
    """POST to a snapshot route. Returns the JSON object of the answer.

    Raises:
        RuntimeError: the server refused the request.
    """
    response = client.post(f"/tiered_kv/{what}", json=asked)
    if response.is_error:
        raise RuntimeError(f"the server refused: {response.text}")
    found: dict[str, Any] = response.json()
    return found


def answer_during(
    client: httpx.Client,
    prompt: Sequence[int],
    job: str,
    tokens: int,
    at: int,
    call: Callable[[], T],
) -> tuple[Answer, T]:
    """Send a turn, and call a function on another thread once token ``at`` has arrived. Returns the
    answer, and the function's result.
    """
    calls = list[Future[T]]()

    def on_token(answer: Reading) -> None:
        if len(answer.tokens) >= at and not calls:
            calls.append(pool.submit(call))

    with ThreadPoolExecutor(1) as pool:
        answer = ask(client, prompt, job, tokens, logprobs=1, on_token=on_token)
    return answer, calls[0].result()


@dataclass(frozen=True, slots=True)
class Compared:
    """A continuation, compared with the uninterrupted answer.

    Attributes:
        equal: True if tokens and logprobs are equal bit for bit.
        control_equal: the same for a continuation that is recomputed from the tokens.
        control_logprob: largest logprob difference of the recomputed continuation, up to the first
            differing token.
    """

    equal: bool
    control_equal: bool
    control_logprob: float


def cut_and_go_on(
    source: httpx.Client, target: httpx.Client, root: Path, prompt: Sequence[int], number: int
) -> Compared:
    """Cut a turn at a random token, and continue it from its snapshot.

    Args:
        source: client of the server that runs the turn.
        target: client of the server that continues it.
        root: folder of the snapshots of both servers.
        number: seed of the random token.

    Raises:
        RuntimeError: the snapshot cannot be compared with its turn.
    """
    at, name, job = random.Random(number).randrange(1, 40), f"cut-{number}", f"exact-{number}"
    whole, _ = answer_during(
        source,
        prompt,
        job,
        at + BEYOND,
        at,
        lambda: post(source, "snapshots", job=job, name=name, exact=True),
    )
    with open_snapshot(root / name) as snapshot:
        so_far = list(snapshot.manifest.token_ids)
    start = len(so_far) - len(prompt)
    if so_far != [*prompt, *whole.tokens[:start]]:
        raise RuntimeError("the tokens of a snapshot differ from those of its turn")
    if start + TOKENS > len(whole.tokens):
        raise RuntimeError("a snapshot was taken too late to be compared")
    rest = slice(start, start + TOKENS)
    expected = replace(whole, tokens=whole.tokens[rest], logprobs=whole.logprobs[rest])
    salt = post(target, "restores", name=name, exact=True)["cache_salt"]
    found = ask(target, so_far, job, TOKENS, salt=salt, logprobs=1)
    other = f"control-{number}"
    control = ask(target, so_far, other, TOKENS, salt=other, logprobs=1)
    return Compared(
        equal=_equal(found, expected),
        control_equal=_equal(control, expected),
        control_logprob=logprob_distance(control, expected),
    )


def _equal(one: Answer, other: Answer) -> bool:
    return (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
