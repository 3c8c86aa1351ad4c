"""Observations of a server's clients, and the conclusions that a soak test draws from the
observations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

SURE_NATS = 1.0
"""Minimum lead of a token's logprob over the logprob of the second best token for a difference at
this token to count. In bf16, KV computed in batches of another shape shifts logprobs by a few
tenths."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A completely answered turn.

    Attributes:
        sent_at: monotonic time of sending, seconds.
        wait_s: time to first token, seconds.
        prompt: hash of the prompt and of the requested answer length.
        weights: weights that computed the answer; None if they changed during the turn.
        tokens: token ids of the answer.
        margins: lead in logprob of each token over the second best.
        newcomer: True for a newcomer's first turn.
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
        """Monotonic time of the first token, seconds."""
        return self.sent_at + self.wait_s


@dataclass(slots=True)
class Tally:
    """Observations of a server's clients.

    Attributes:
        requests: number of turns sent.
        open: number of turns being answered.
        errors: messages of failed calls.
        turns: completely answered turns, in the order in which they finished.
        snapshots: number of snapshots, restores and forks that succeeded.
        refused: number of refusals by reason.
        updates: number of weight updates.
        open_turns: samples of ``open``.
        samples: pairs of time in seconds and the server's memory in bytes.
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
        """Return the time to first token of each newcomer in seconds, in order of arrival."""
        arrived = sorted(self.turns, key=lambda turn: turn.sent_at)
        return [turn.wait_s for turn in arrived if turn.newcomer]


def overtaken(turns: Iterable[Turn], limit_s: float) -> int:
    """Return the number of turns that waited longer than ``limit_s`` for their first token, while a
    turn that was sent later got its own.
    """
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
        The number of compared answers, and the number of answers that differ at a token of which
        stock vLLM was sure.
    """
    theirs = {(turn.prompt, turn.weights): turn for turn in stock if turn.weights is not None}
    pairs = [
        (turn, theirs[key])
        for turn in ours
        if turn.weights is not None and (key := (turn.prompt, turn.weights)) in theirs
    ]
    return len(pairs), sum(_differs(turn, control) for turn, control in pairs)


def _differs(turn: Turn, control: Turn) -> bool:
    """Return True if the answers first differ at a token of which the control was sure."""
    for token, other, margin in zip(turn.tokens, control.tokens, control.margins, strict=False):
        if token != other:
            return margin >= SURE_NATS
    return len(turn.tokens) != len(control.tokens)


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Return the growth of memory over the second half of the samples, MiB per minute; 0 if that
    half has fewer than two samples.
    """
    late = np.array(samples[len(samples) // 2 :], dtype=float)
    if len(late) < 2:
        return 0.0
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0] * 60 / 2**20)


def tenths(samples: Sequence[tuple[float, int]]) -> list[int]:
    """Return the memory at the start and after each tenth of the samples, MiB."""
    at = np.linspace(0, len(samples) - 1, 11).astype(int) if samples else ()
    return [round(samples[n][1] / 2**20) for n in at]


def medians(values: Sequence[float]) -> list[float]:
    """Return the median of each tenth of the values, in order."""
    parts = np.array_split(np.array(values), 10)
    return [round(float(np.median(part)), 3) for part in parts if len(part)]


def ratio_of_medians(
    values: Sequence[float], control: Sequence[float], last: float = 1.0
) -> float | None:
    """Return the median of the last part of ``values`` over the median of the last part of
    ``control``; None if one of the parts is empty.

    Args:
        last: length of the last part, as a fraction of the whole from 0 to 1.
    """
    late, control_late = (part[len(part) - round(last * len(part)) :] for part in (values, control))
    return float(np.median(late) / np.median(control_late)) if late and control_late else None
