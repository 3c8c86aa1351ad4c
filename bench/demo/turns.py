"""Sources of each turn's prompt tokens: read from the connector's trace, summed by turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import TurnRecord

from .agents import TurnResult


class TraceError(RuntimeError):
    """The trace is missing, damaged, or does not hold the turns that the client made."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Prompt tokens by where their KV came from.

    Attributes:
        vram: found in the KV pool.
        cpu: brought back from CPU memory.
        recomputed: run through the model.
    """

    vram: int = 0
    cpu: int = 0
    recomputed: int = 0

    @property
    def prompt(self) -> int:
        """All prompt tokens."""
        return self.vram + self.cpu + self.recomputed

    def __add__(self, other: Sources) -> Sources:
        return Sources(
            self.vram + other.vram, self.cpu + other.cpu, self.recomputed + other.recomputed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """All jobs' turns of one number, or of all numbers.

    Attributes:
        turn: the number; None for a row over all.
        requests: how many turns it sums up.
        sources: tokens of all these turns together.
        ttft_mean_s, ttft_p95_s: time to first token, seconds.
    """

    turn: int | None
    requests: int
    sources: Sources
    ttft_mean_s: float
    ttft_p95_s: float


def read_trace(path: Path) -> list[TurnRecord]:
    """The turns of jobs in a trace.

    Requests without a job and a last line that was cut off are passed over.

    Raises:
        TraceError: no such file, or a damaged line.
    """
    reader = TraceReader(path)
    try:
        turns = [one for one in reader if one.job is not None]
    except OSError as error:
        raise TraceError(f"the connector wrote no trace: {error}") from error
    if reader.bad:
        raise TraceError(str(reader.bad[0]))
    return turns


def sources_from_trace(
    traced: Iterable[TurnRecord], results: Iterable[TurnResult]
) -> dict[tuple[str, int], Sources]:
    """The trace's sources for every turn the client made, by (job, turn).

    Raises:
        TraceError: a turn is missing, or its sources do not add up to the prompt that the
            client's answer names.
    """
    found = {(one.job, one.turn): _sources(one) for one in traced}
    wanted = {}
    for result in results:
        key = (result.job, result.turn)
        if key not in found:
            raise TraceError(f"the trace lacks turn {result.turn} of {result.job}")
        if found[key].prompt != result.prompt_tokens:
            raise TraceError(
                f"turn {result.turn} of {result.job}: {found[key]} in the trace, but "
                f"{result.prompt_tokens} prompt tokens in the answer's usage"
            )
        wanted[key] = found[key]
    return wanted


def _sources(one: TurnRecord) -> Sources:
    tokens = one.tokens
    return Sources(tokens.vram, tokens.cpu + tokens.ssd, tokens.recomputed)


def sources_from_usage(results: Iterable[TurnResult]) -> dict[tuple[str, int], Sources]:
    """Stock vLLM's sources, by (job, turn): what ``usage`` calls cached is in VRAM."""
    return {
        (r.job, r.turn): Sources(r.cached_tokens, 0, r.prompt_tokens - r.cached_tokens)
        for r in results
    }


def rows_by_turn(
    results: Iterable[TurnResult], sources: dict[tuple[str, int], Sources]
) -> list[TurnRow]:
    """One row for each turn number, in order, and a last one over all turns."""
    by_turn: dict[int, list[TurnResult]] = defaultdict(list)
    for result in results:
        by_turn[result.turn].append(result)
    rows = [_row(turn, by_turn[turn], sources) for turn in sorted(by_turn)]
    everything = [result for turn in by_turn.values() for result in turn]
    return [*rows, _row(None, everything, sources)]


def _row(
    turn: int | None, results: Sequence[TurnResult], sources: dict[tuple[str, int], Sources]
) -> TurnRow:
    times = [result.ttft_s for result in results]
    return TurnRow(
        turn=turn,
        requests=len(results),
        sources=sum((sources[r.job, r.turn] for r in results), Sources()),
        ttft_mean_s=fmean(times),
        ttft_p95_s=float(np.percentile(times, 95)),
    )
