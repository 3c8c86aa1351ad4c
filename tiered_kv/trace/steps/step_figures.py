"""Figures of a trace's steps: time-weighted means, and peaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .step_record import StepRecord

COUNTS = (
    "running",
    "waiting",
    "held",
    "scheduled",
    "prefill",
    "decode",
    "free",
    "cached",
    "pinned",
)
"""Fields of a step that are a single number."""
BY_NAME = ("nbytes", "orders")
"""Fields of a step that contain numbers by name. The figures of these fields are named
``nbytes.cpu`` and so on.
"""


@dataclass(frozen=True, slots=True)
class Level:
    """A figure over time.

    Attributes:
        mean: time-weighted mean. A step's weight is the time until the next step of its engine.
        peak: maximum over all steps.
    """

    mean: float
    peak: int


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of the steps of a trace. With several replicas, means are per replica.

    Attributes:
        steps: number of steps.
        span_s: time that the steps cover, summed over the engines, seconds.
        prefill_tokens, decode_tokens: numbers of computed tokens.
        levels: mean and peak of each field, by field name.
    """

    steps: int
    span_s: float
    prefill_tokens: int
    decode_tokens: int
    levels: Mapping[str, Level]


def step_figures(records: Iterable[StepRecord]) -> StepFigures:
    """Return the figures of steps, computed in one pass and in constant memory."""
    last = dict[int, StepRecord]()
    sums, peaks = dict[str, float](), dict[str, int]()
    steps, span_s, prefill, decode = 0, 0.0, 0, 0
    for one in records:
        steps, prefill, decode = steps + 1, prefill + one.prefill, decode + one.decode
        before = last.get(one.replica)
        last[one.replica] = one
        for name, value in _values(one):
            if value > peaks.get(name, -1):
                peaks[name] = value
        # A restarted engine counts its steps from 1, and the time in between is unknown.
        if before is None or one.step <= before.step or one.at <= before.at:
            continue
        lasted_s = one.at - before.at
        span_s += lasted_s
        for name, value in _values(before):
            sums[name] = sums.get(name, 0.0) + value * lasted_s
    levels = {
        name: Level(sums.get(name, 0.0) / span_s if span_s else 0.0, peak)
        for name, peak in peaks.items()
    }
    return StepFigures(steps, span_s, prefill, decode, levels)


def _values(one: StepRecord) -> Iterator[tuple[str, int]]:
    for name in COUNTS:
        yield name, getattr(one, name)
    for name in BY_NAME:
        for inner, value in getattr(one, name).items():
            yield f"{name}.{inner}", value
