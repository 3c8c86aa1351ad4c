"""Turns placed at random over replicas, against each job's turns on one of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from .replicas import Replica
from .turns import ask

TURNS = 4
ADDED = 150
"""Tokens that a turn adds to its job's context."""
ANSWER = 12
GAP_S = 2.0
"""Seconds that a tool takes. Pages are in the store two steps and a write after a turn's end, which
here, with steps of half a second, is a second or more."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """Mean job times, seconds, of the same kind of jobs under both placements.

    Attributes:
        random_over_sticky: median over the rounds.
        rounds: of each round.
    """

    random_s: float
    sticky_s: float
    random_over_sticky: float
    rounds: tuple[float, ...]

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def compare(
    servers: Sequence[Replica],
    rounds: Sequence[tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]],
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Placed:
    """Run each round's jobs twice, with texts of their own, in alternating order.

    Args:
        rounds: texts of the jobs of both placements, each as long as its job's last prompt.
    """
    chance = random.Random(seed)
    means: dict[str, list[float]] = {"random": [], "sticky": []}
    for number, pair in enumerate(rounds):
        both = list(zip(("random", "sticky"), pair, strict=True))
        for how, texts in both if number % 2 == 0 else both[::-1]:
            tell(f"{how} placement, round {number + 1}")
            jobs = [
                (f"{how} {number} {at}", text, _places(how, at, len(servers), chance))
                for at, text in enumerate(texts)
            ]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                times = list(pool.map(lambda job: _run(servers, *job), jobs))
            means[how].append(statistics.fmean(times))
    ratios = [r / s for r, s in zip(means["random"], means["sticky"], strict=True)]
    return Placed(
        random_s=statistics.fmean(means["random"]),
        sticky_s=statistics.fmean(means["sticky"]),
        random_over_sticky=statistics.median(ratios),
        rounds=tuple(ratios),
    )


def _places(how: str, job: int, servers: int, chance: random.Random) -> list[int]:
    """The replica of each turn of a job."""
    if how == "sticky":
        return [job % servers] * TURNS
    return [chance.randrange(servers) for _ in range(TURNS)]


def _run(servers: Sequence[Replica], job: str, text: Sequence[int], places: Sequence[int]) -> float:
    """Seconds that a job takes, its gaps included."""
    began = time.perf_counter()
    for turn, place in enumerate(places):
        if turn:
            time.sleep(GAP_S)
        prompt = text[: len(text) - (len(places) - 1 - turn) * ADDED]
        ask(servers[place].client, job, prompt, answer=ANSWER)
    return time.perf_counter() - began
