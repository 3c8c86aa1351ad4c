"""The demo's result, as a table of 80 columns, a one-line summary, and a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered_kv.bench.agents.figures import BUSY_CORES, by_number, mean
from tiered_kv.bench.agents.results import Kept, Run, TurnDone


def later_ttft_s(turns: Sequence[TurnDone]) -> float:
    """Return the mean time to first token over all turns except first turns, which no cache can
    speed up, in seconds; 0 if there are no later turns.
    """
    return mean([turn.ttft_s for turn in turns if turn.turn > 1] or [0.0])


def mean_job_s(run: Run) -> float:
    """Return the mean time from the run's start to a job's end, seconds."""
    return mean(job.ended_s for job in run.jobs)


def wall_s(run: Run) -> float:
    """Return the seconds from the run's start to the last job's end."""
    return max(job.ended_s for job in run.jobs)


def rows(run: Run) -> list[dict[str, Any]]:
    """Return one row per turn number, in order, and a last row over all turns, whose ``turn`` is
    None.
    """
    by_turn = [_row(number, turns) for number, turns in by_number(run.jobs).items()]
    return [*by_turn, _row(None, run.turns)]


def _row(number: int | None, turns: Sequence[TurnDone]) -> dict[str, Any]:
    times = [turn.ttft_s for turn in turns]
    sources = dict.fromkeys(("vram", "cpu", "recomputed"), 0)
    for turn in turns:
        # A run without a trace ran on stock vLLM, whose usage reports the tokens found in VRAM.
        vram = turn.sources.get("vram", turn.cached_tokens)
        cpu = turn.sources.get("cpu", 0) + turn.sources.get("ssd", 0)
        sources["vram"] += vram
        sources["cpu"] += cpu
        sources["recomputed"] += turn.prompt_tokens - vram - cpu
    return {
        "turn": number,
        "requests": len(turns),
        "sources": sources,
        "ttft_mean_s": mean(times),
        "ttft_p95_s": float(np.percentile(times, 95)),
    }


def _seconds(seconds: float) -> str:
    """Return a time in six characters."""
    return f"{seconds:6.2f}" if seconds < 100 else f"{seconds:6.1f}"


def recomputed_share(run: Run) -> float:
    """Return the fraction of all prompt tokens that were computed, 0 to 1."""
    total: Mapping[str, int] = rows(run)[-1]["sources"]
    return total["recomputed"] / sum(total.values())


def differing_answers(first: Run, second: Run) -> tuple[int, int]:
    """Return the number of turns whose text differs in ``second``, and the number of jobs with such
    a turn.

    After the first differing answer of a job, its later prompts and answers differ too.
    """
    texts = {(job.name, turn.turn): turn.text for job in second.jobs for turn in job.turns}
    differing = [
        job.name
        for job in first.jobs
        for turn in job.turns
        if texts.get((job.name, turn.turn)) != turn.text
    ]
    return len(differing), len(set(differing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same jobs on stock vLLM and with the connector.

    Attributes:
        model: display name of the model.
        dtype: dtype of both servers.
        turns: turns per job.
        pool_tokens: size of each KV pool.
        control: a second run of stock vLLM with the jobs in another order; None if all answers of
            the first two runs are the same.
    """

    model: str
    dtype: str
    turns: int
    pool_tokens: int
    stock: Kept
    tiered: Kept
    control: Kept | None = None

    def table(self) -> str:
        """Return the rows as text of 80 columns. Tokens are summed over the jobs, and TTFT is in
        seconds.
        """
        lines = [
            f"{'':4}{'with tiered-kv':>24}{'':23}{'stock vLLM':>21}",
            "turn  prompt   VRAM    CPU  computed  TTFT   p95     VRAM  computed  TTFT   p95",
        ]
        for ours, theirs in zip(rows(self.tiered.run), rows(self.stock.run), strict=True):
            if ours["turn"] is None:
                lines.append("-" * len(lines[1]))
            here, there = ours["sources"], theirs["sources"]
            lines.append(
                f"{ours['turn'] or 'all':>4}{sum(here.values()):8}"
                f"{here['vram']:7}{here['cpu']:7}{here['recomputed']:10}"
                f"{_seconds(ours['ttft_mean_s'])}{_seconds(ours['ttft_p95_s'])}"
                f"{there['vram']:9}{there['recomputed']:10}"
                f"{_seconds(theirs['ttft_mean_s'])}{_seconds(theirs['ttft_p95_s'])}"
            )
        return "\n".join(lines)

    def summary(self) -> str:
        """Return a one-line summary that can be quoted."""
        ours, theirs = self.tiered.run, self.stock.run
        return (
            f"{len(theirs.jobs)} agents, {self.turns} turns each, {self.model}, KV pool of "
            f"{self.pool_tokens:,} tokens: with tiered-kv the first token of a later turn came "
            f"after {later_ttft_s(ours.turns):.2f} s instead of {later_ttft_s(theirs.turns):.2f} s,"
            f" all jobs took {wall_s(ours):.0f} s instead of {wall_s(theirs):.0f} s, and "
            f"{recomputed_share(ours):.0%} of the prompt tokens were computed instead of "
            f"{recomputed_share(theirs):.0%}."
        )

    def notes(self) -> list[str]:
        """Return facts that a reader needs to trust the numbers, one line each."""
        cores = {kept.reserved_cpus for kept in (self.stock, self.tiered)}
        lines = [
            "tokens are sums over the jobs; VRAM: found in the KV pool; TTFT: mean and 95th "
            "percentile, seconds",
            f"mean job time {mean_job_s(self.tiered.run):.1f} s, "
            f"stock {mean_job_s(self.stock.run):.1f} s",
            "both servers had the same cores"
            if len(cores) == 1
            else f"NOT COMPARABLE: cores reserved for the framework are {sorted(map(str, cores))}",
        ]
        busy = [kept.other_cores or 0.0 for kept in (self.tiered, self.stock)]
        if max(busy) > BUSY_CORES:
            lines.append(
                f"THE MACHINE WAS BUSY: other programs used {busy[0]:.1f} cores during this run, "
                f"{busy[1]:.1f} in stock's run; on a CPU, other load can triple step times"
            )
        return [*lines, self._about_answers()]

    def _about_answers(self) -> str:
        total = len(self.stock.run.turns)
        answers, jobs = differing_answers(self.stock.run, self.tiered.run)
        if not answers:
            return f"all {total} answers are the same on both servers"
        said = f"{answers} of {total} answers differ, in {jobs} of {len(self.stock.run.jobs)} jobs"
        if self.control is None:
            return said
        own, own_jobs = differing_answers(self.stock.run, self.control.run)
        return (
            f"{said}; stock vLLM differs from itself in {own} answers, in {own_jobs} jobs, when "
            f"the jobs start in another order: in {self.dtype} the batch shape decides between "
            "nearly equal tokens, and later turns then differ too"
        )

    def as_json(self) -> dict[str, object]:
        """Return the comparison as plain values. Times are in seconds, sizes in tokens."""
        own = self.control and differing_answers(self.stock.run, self.control.run)[0]
        return {
            "model": self.model,
            "jobs": len(self.stock.run.jobs),
            "turns": self.turns,
            "kv_pool_tokens": self.pool_tokens,
            "answers": len(self.stock.run.turns),
            "differing_answers": differing_answers(self.stock.run, self.tiered.run)[0],
            "differing_answers_of_stock": own,
            "dtype": self.dtype,
            "stock": _run_json(self.stock),
            "tiered": _run_json(self.tiered),
        }


def _run_json(kept: Kept) -> dict[str, object]:
    return {
        "wall_s": round(wall_s(kept.run), 3),
        "mean_job_s": round(mean_job_s(kept.run), 3),
        "later_ttft_s": round(later_ttft_s(kept.run.turns), 4),
        "recomputed_share": round(recomputed_share(kept.run), 4),
        "reserved_cpus": kept.reserved_cpus,
        "other_cores": kept.other_cores,
        "by_turn": rows(kept.run),
    }
