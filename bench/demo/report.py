"""The demo's result: a table that fits 80 columns, a line to quote, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from .agents import TurnResult, differing_answers
from .turns import Sources, TurnRow, rows_by_turn

BUSY_CORES = 0.15
"""Cores from which on the demo notes that other programs were running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One server's run of the jobs.

    Attributes:
        results: every turn.
        sources: every turn's prompt tokens, by (job, turn).
        wall_s: first job's begin to last job's end, seconds.
        reserved_cpus: what the CPU worker's log says; None where there is none.
        other_cores: cores' worth of time that other programs used meanwhile; None if unknown.
    """

    results: Sequence[TurnResult]
    sources: dict[tuple[str, int], Sources]
    wall_s: float
    reserved_cpus: str | None
    other_cores: float | None = None

    @property
    def rows(self) -> list[TurnRow]:
        """A row for each turn number and one over all."""
        return rows_by_turn(self.results, self.sources)

    @property
    def later_ttft_s(self) -> float:
        """Mean time to first token over all turns but the first, which no server can shorten."""
        return fmean([r.ttft_s for r in self.results if r.turn > 1] or [0.0])

    @property
    def mean_job_s(self) -> float:
        """Mean over jobs of the time from the run's begin to the job's last answer, seconds."""
        ends: dict[str, float] = {}
        for result in self.results:
            ends[result.job] = max(ends.get(result.job, 0.0), result.ended_s)
        return fmean(ends.values())

    @property
    def recomputed_share(self) -> float:
        """The share of all prompt tokens that were run through the model, 0 to 1."""
        total = sum(self.sources.values(), Sources())
        return total.recomputed / total.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same jobs on stock vLLM and with the connector.

    Attributes:
        model: name to show.
        jobs, turns: how many.
        pool_tokens: size of both KV pools.
        stock, tiered: the two runs.
        dtype: what both computed in.
        control: stock again with the jobs in another order; None where all answers are the same.
    """

    model: str
    jobs: int
    turns: int
    pool_tokens: int
    dtype: str
    stock: Run
    tiered: Run
    control: Run | None = None

    def table(self) -> str:
        """Per turn number, in 80 columns: tokens summed over the jobs, TTFT in seconds."""
        lines = [
            f"{'':4}{'with tiered-kv':>24}{'':23}{'stock vLLM':>21}",
            "turn  prompt   VRAM    CPU  computed  TTFT   p95     VRAM  computed  TTFT   p95",
        ]
        for ours, theirs in zip(self.tiered.rows, self.stock.rows, strict=True):
            if ours.turn is None:
                lines.append("-" * len(lines[1]))
            lines.append(_line(ours, theirs))
        return "\n".join(lines)

    def summary(self) -> str:
        """One line to quote."""
        return (
            f"{self.jobs} agents, {self.turns} turns each, {self.model}, "
            f"KV pool of {self.pool_tokens:,} tokens: with tiered-kv the first token of a later "
            f"turn came after {self.tiered.later_ttft_s:.2f} s instead of "
            f"{self.stock.later_ttft_s:.2f} s, all jobs took {self.tiered.wall_s:.0f} s instead "
            f"of {self.stock.wall_s:.0f} s, and {self.tiered.recomputed_share:.0%} of the prompt "
            f"tokens were computed instead of {self.stock.recomputed_share:.0%}."
        )

    def notes(self) -> list[str]:
        """Facts that a reader needs to trust the numbers, a line each."""
        lines = [
            "tokens are sums over the jobs; VRAM: found in the KV pool; TTFT: mean and 95th "
            "percentile, seconds",
            f"mean job time {self.tiered.mean_job_s:.1f} s, stock {self.stock.mean_job_s:.1f} s",
            _about_cores(self.stock.reserved_cpus, self.tiered.reserved_cpus),
        ]
        busy = [run.other_cores or 0.0 for run in (self.tiered, self.stock)]
        if max(busy) > BUSY_CORES:
            lines.append(
                f"THE MACHINE WAS BUSY: other programs used {busy[0]:.1f} cores meanwhile, "
                f"{busy[1]:.1f} in stock's run; on a CPU a neighbour can triple a step"
            )
        lines.append(self._about_answers())
        return lines

    def _about_answers(self) -> str:
        total = len(self.stock.results)
        answers, jobs = differing_answers(self.stock.results, self.tiered.results)
        if not answers:
            return f"all {total} answers are the same on both servers"
        said = f"{answers} of {total} answers differ, in {jobs} of {self.jobs} jobs"
        if self.control is None:
            return said
        own, own_jobs = differing_answers(self.stock.results, self.control.results)
        return (
            f"{said}; stock vLLM differs from itself in {own} answers, in {own_jobs} jobs, when "
            f"the jobs begin in another order: in {self.dtype} the shape of a batch decides "
            "between tokens that are as good as equal, and later turns follow"
        )

    def as_json(self) -> dict[str, object]:
        """The same for programs. Times in seconds, sizes in tokens."""
        answers, _ = differing_answers(self.stock.results, self.tiered.results)
        again = self.control
        own = differing_answers(self.stock.results, again.results)[0] if again else None
        return {
            "model": self.model,
            "jobs": self.jobs,
            "turns": self.turns,
            "kv_pool_tokens": self.pool_tokens,
            "answers": len(self.stock.results),
            "differing_answers": answers,
            "differing_answers_of_stock": own,
            "dtype": self.dtype,
            "stock": _run_json(self.stock),
            "tiered": _run_json(self.tiered),
        }


def _line(ours: TurnRow, theirs: TurnRow) -> str:
    name = "all" if ours.turn is None else str(ours.turn)
    here, there = ours.sources, theirs.sources
    return (
        f"{name:>4}{here.prompt:8}{here.vram:7}{here.cpu:7}{here.recomputed:10}"
        f"{ours.ttft_mean_s:6.2f}{ours.ttft_p95_s:6.2f}"
        f"{there.vram:9}{there.recomputed:10}{theirs.ttft_mean_s:6.2f}{theirs.ttft_p95_s:6.2f}"
    )


def _about_cores(stock: str | None, tiered: str | None) -> str:
    if stock is None and tiered is None:
        return "no CPU worker: cores were not bound"
    if stock == tiered:
        return f"both servers had the same cores (reserved_cpus={stock} in both logs)"
    return f"NOT COMPARABLE: reserved_cpus is {stock} in stock's log, {tiered} in the other"


def _run_json(run: Run) -> dict[str, object]:
    return {
        "wall_s": round(run.wall_s, 3),
        "mean_job_s": round(run.mean_job_s, 3),
        "later_ttft_s": round(run.later_ttft_s, 4),
        "recomputed_share": round(run.recomputed_share, 4),
        "reserved_cpus": run.reserved_cpus,
        "other_cores": run.other_cores,
        "by_turn": [asdict(row) for row in run.rows],
    }
