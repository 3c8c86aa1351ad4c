"""Quality of the prices that policies put on a wait: recorded gaps, replayed without a server.

    python -m bench.policy --traces ../shared/traces --json

Each policy learns from every session whose id's SHA-256 has an even second byte, in the order
of the file, and is then tested on the others, one after the other: each turn is decided, then
its gap is told, as a server would hear of it before the job's next turn. So it goes on learning
while it is tested. What B a turn would save is given as the cost of prefilling again.

- ``utility``: mean over the tested gaps of B 1[X <= τ] - min(X, τ) where the decision was to pin
  for τ, 0 where it was not; seconds. ``share``: of the clairvoyant's, null if that has none.
- ``accuracy``: how often it said rightly whether X <= B: by its forecast, if it makes one, else by
  whether it pinned at all, which is a bet that the job returns soon enough.
- ``cover50``, ``cover90``: the share of gaps up to the forecast's 0.5 and 0.9 quantile; null
  without a forecast.
- ``us``: microseconds of CPU time per decision.

``against``: the utility of the default policy minus that of every other, with a 95% interval from
2,000 bootstrap samples of the tested sessions.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.bench.common.output import AsJson, progress, run_benchmark, show
from tiered_kv.bench.forecast.clairvoyant import Clairvoyant
from tiered_kv.bench.forecast.gaps import Session, read_sources
from tiered_kv.policies.base import Costs, Decision, Tier, TurnPolicy
from tiered_kv.policies.registry import POLICIES

OURS = next(iter(POLICIES))
BENEFITS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
BOOTSTRAPS = 2000

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one B on the tested gaps of a source.

    Attributes:
        utilities: of every gap, seconds.
        sessions: the number of the session of every gap.
    """

    utilities: NDArray[np.float64]
    sessions: NDArray[np.intp]
    row: Row


def utility(decision: Decision, gap_s: float, benefit_s: float) -> float:
    """Value of a decision once the gap is known, seconds."""
    if decision.tier is not Tier.PIN:
        return 0.0
    saved_s = benefit_s if gap_s <= decision.ttl_s else 0.0
    return saved_s - min(gap_s, decision.ttl_s)


def returns_within(decision: Decision, benefit_s: float) -> bool:
    """True if the decision says that X <= B."""
    if decision.forecast is not None:
        return decision.forecast.within(benefit_s) >= 0.5
    return decision.tier is Tier.PIN


def replay(policy: TurnPolicy, sessions: Sequence[Session]) -> dict[float, Outcome]:
    """Learn from the sessions that are for learning, test on the others, by B.

    Raises:
        ValueError: none is for testing.
    """
    tested = [session for session in sessions if not session.is_learned_from]
    if not tested:
        raise ValueError("no sessions to test on")
    for session in sessions:
        if session.is_learned_from:
            for gap in session.gaps:
                policy.observe(gap.turn, gap.gap_s, ended=True)
    counts = {benefit_s: _Counts() for benefit_s in BENEFITS_S}
    costs = {benefit_s: Costs(recompute_s=benefit_s) for benefit_s in BENEFITS_S}
    for session in tested:
        for gap in session.gaps:
            if isinstance(policy, Clairvoyant):
                policy.gap_s = gap.gap_s
            for benefit_s, count in counts.items():
                begin = time.thread_time_ns()
                decision = policy.decide(gap.turn, costs[benefit_s])
                count.ns += time.thread_time_ns() - begin
                count.add(decision, gap.gap_s, benefit_s)
            policy.observe(gap.turn, gap.gap_s, ended=True)
    numbers = np.repeat(np.arange(len(tested)), [len(session.gaps) for session in tested])
    return {
        benefit_s: Outcome(np.array(count.utilities), numbers, count.row())
        for benefit_s, count in counts.items()
    }


class _Counts:
    def __init__(self) -> None:
        self.utilities: list[float] = []
        self.right = self.forecasts = self.below50 = self.below90 = 0
        self.ns = 0

    def add(self, decision: Decision, gap_s: float, benefit_s: float) -> None:
        self.utilities.append(utility(decision, gap_s, benefit_s))
        self.right += returns_within(decision, benefit_s) == (gap_s <= benefit_s)
        if decision.forecast is not None:
            self.forecasts += 1
            self.below50 += gap_s <= decision.forecast.quantile(0.5)
            self.below90 += gap_s <= decision.forecast.quantile(0.9)

    def row(self) -> Row:
        tested, forecasts = len(self.utilities), self.forecasts
        return {
            "utility": float(np.mean(self.utilities)),
            "accuracy": self.right / tested,
            "cover50": self.below50 / forecasts if forecasts else None,
            "cover90": self.below90 / forecasts if forecasts else None,
            "us": self.ns / tested / 1e3,
        }


def difference(ours: Outcome, other: Outcome) -> Row:
    """Ours minus theirs, mean utility per gap, and a 95% interval over sessions."""
    sessions = int(ours.sessions.max()) + 1
    sums = np.bincount(ours.sessions, ours.utilities - other.utilities, sessions)
    gaps = np.bincount(ours.sessions, minlength=sessions)
    drawn = np.random.default_rng(0).integers(sessions, size=(BOOTSTRAPS, sessions))
    means = sums[drawn].sum(axis=1) / gaps[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {
        "difference": float(sums.sum() / gaps.sum()),
        "low": float(low),
        "high": float(high),
    }


def measure(
    sources: Mapping[str, Sequence[Session]], tick: Callable[[str], None]
) -> dict[str, list[Row]]:
    """All rows. ``tick`` is told of every policy and source that is done."""
    makers: dict[str, Callable[[], TurnPolicy]] = {**POLICIES, "clairvoyant": Clairvoyant}
    rows: list[Row] = []
    against: list[Row] = []
    for source, sessions in sources.items():
        found = {}
        for name, make in makers.items():
            found[name] = replay(make(), sessions)
            tick(f"{name} on {source}")
        for name, by_benefit in found.items():
            for b, outcome in by_benefit.items():
                best = float(found["clairvoyant"][b].utilities.sum())
                share = float(outcome.utilities.sum()) / best if best > 0 else None
                of = {"policy": name, "source": source, "b": b}
                figures = dict(outcome.row)
                rows.append({**of, "utility": figures.pop("utility"), "share": share, **figures})
        for name in POLICIES:
            if name != OURS:
                for b in BENEFITS_S:
                    row = difference(found[OURS][b], found[name][b])
                    against.append({"source": source, "b": b, "policy": name, **row})
    return {"rows": rows, "against": against}


def _number(value: object) -> str:
    if not isinstance(value, float):
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def _tables(result: Mapping[str, Sequence[Row]]) -> Iterator[Table]:
    """One table per source of the shares, and one of how much better ours is."""
    for source in dict.fromkeys(row["source"] for row in result["rows"]):
        shares = _table(f"{source}: share of the clairvoyant's utility, by B in seconds")
        better = _table(f"{source}: {OURS} over theirs, seconds (* 0 is outside the interval)")
        of_policy: dict[object, list[Row]] = defaultdict(list)
        for row in (*result["rows"], *result["against"]):
            if row["source"] == source:
                of_policy[row["policy"]].append(row)
        for table in (shares, better):
            table.add_column("policy", no_wrap=True)
            for b in BENEFITS_S:
                table.add_column(f"{b:g}", justify="right")
        for name in ("q50", "q90", "us"):
            shares.add_column(name, justify="right")
        for policy, rows in of_policy.items():
            own, against = rows[: len(BENEFITS_S)], rows[len(BENEFITS_S) :]
            last = own[-1]
            tail = [_number(last[key]) for key in ("cover50", "cover90", "us")]
            shares.add_row(str(policy), *(_number(row["share"]) for row in own), *tail)
            if against:
                better.add_row(str(policy), *map(_difference, against))
        yield shares
        yield better


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _difference(row: Row) -> str:
    low, high = float(str(row["low"])), float(str(row["high"]))
    return _number(row["difference"]) + ("*" if low > 0 or high < 0 else " ")


def main(
    traces: Annotated[Path, typer.Option(help="Folder of recordings.")],
    as_json: AsJson = False,
) -> None:
    """Replay recorded gaps."""
    try:
        sources = read_sources(traces)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {traces}: {error.strerror}") from error
    testable = {
        name: sessions
        for name, sessions in sources.items()
        if any(not session.is_learned_from for session in sessions)
    }
    if not testable:
        raise typer.BadParameter(f"{traces} holds no session to test on")
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("policies", total=len(testable) * (len(POLICIES) + 1))
        result = measure(testable, lambda done: bar.update(task, advance=1, description=done))
    if as_json:
        show("Policies", result, as_json=True)
        return
    for table in _tables(result):
        Console().print(table)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
