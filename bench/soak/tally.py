"""Observations of the clients of one server, and the conclusions that a soak draws from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

SURE_NATS = 1.0
"""Logprob by which a token must lead the second best to be compared. In bf16, KV that was computed
in batches of another shape moves logprobs by some tenths."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that was answered in full.

    Attributes:
        sent_at: monotonic seconds. wait_s: time to the first token.
        prompt: differs between prompts.
        weights: the weights that computed it; None if they changed meanwhile.
        tokens: ids of the answer. margins: logprob of each over the second best.
        newcomer: True for the first turn of a newcomer.
    """

    sent_at: float
    wait_s: float
    prompt: int
    weights: str | None
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    newcomer: bool = False

    @property
    def first_token_at(self) -> float:
        """Monotonic seconds of the first token."""
        return self.sent_at + self.wait_s


@dataclass(slots=True)
class Tally:
    """Observations of the clients of one server.

    Attributes:
        requests: number of turns sent. open: turns that are being answered.
        turns: those answered in full, in the order of their ends.
        snapshots: snapshots, restores and forks that succeeded. refused: reasons of those that
            the server refused.
        updates: weight updates.
        open_turns: numbers of open turns, sampled.
        samples: seconds, and bytes of the server's memory.
    """

    requests: int = 0
    open: int = 0
    errors: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    snapshots: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    updates: int = 0
    open_turns: list[int] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)

    def newcomer_waits(self) -> list[float]:
        """Seconds to the first token of each newcomer, in the order of their arrival."""
        arrived = sorted(self.turns, key=lambda turn: turn.sent_at)
        return [turn.wait_s for turn in arrived if turn.newcomer]


def overtaken(turns: Iterable[Turn], limit_s: float) -> int:
    """Count the turns that waited for longer than ``limit_s`` for their first token, while a turn
    that was sent later got its own."""
    by_first = sorted(turns, key=lambda turn: turn.first_token_at)
    return sum(
        any(
            other.sent_at > turn.sent_at and other.first_token_at > turn.sent_at + limit_s
            for other in by_first[:place]
        )
        for place, turn in enumerate(by_first)
        if turn.wait_s > limit_s
    )


def compare(ours: Iterable[Turn], stock: Iterable[Turn]) -> tuple[int, int]:
    """Compare the answers to prompts that both servers computed with the same weights.

    Returns:
        The number of answers compared, and how many of them first differ where stock was sure.
    """
    theirs = {(turn.prompt, turn.weights): turn for turn in stock if turn.weights is not None}
    pairs = [
        (turn, theirs[key])
        for turn in ours
        if turn.weights is not None and (key := (turn.prompt, turn.weights)) in theirs
    ]
    return len(pairs), sum(_differs(turn, control) for turn, control in pairs)


def _differs(turn: Turn, control: Turn) -> bool:
    """True if the first difference is at a token of which the control was sure."""
    for token, other, margin in zip(turn.tokens, control.tokens, control.margins, strict=False):
        if token != other:
            return margin >= SURE_NATS
    return len(turn.tokens) != len(control.tokens)


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """MiB a minute, over the second half of the samples."""
    late = np.array(samples[len(samples) // 2 :], dtype=float)
    if len(late) < 2:
        return 0.0
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0] * 60 / 2**20)


def tenths(samples: Sequence[tuple[float, int]]) -> list[int]:
    """MiB after each tenth of the samples, from the first to the last."""
    at = np.linspace(0, len(samples) - 1, 11).astype(int) if samples else ()
    return [round(samples[n][1] / 2**20) for n in at]


def medians(values: Sequence[float]) -> list[float]:
    """Medians of each tenth of the values, from the first to the last."""
    parts = np.array_split(np.array(values), 10)
    return [round(float(np.median(part)), 3) for part in parts if len(part)]


def ratio_of_medians(
    values: Sequence[float], control: Sequence[float], last: float = 1.0
) -> float | None:
    """Median of the last part of the values over the control's; None where one is missing.

    Args:
        last: that part, from 0 to 1.
    """
    late, control_late = (part[len(part) - round(last * len(part)) :] for part in (values, control))
    return float(np.median(late) / np.median(control_late)) if late and control_late else None
