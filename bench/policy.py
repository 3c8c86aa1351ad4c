"""Value of policies' decisions on recorded gaps, replayed without a server.

    python -m bench.policy --traces ../shared/traces --folds 5 --json

Cross-validation over sessions: the sessions of a source are dealt into folds by a hash of their id.
Each fold is tested by a policy that learned from the other folds, in the order of the file. It is
tested on one session at a time: each turn is decided, then the policy observes its gap, as on a
server before the job's next turn. So it goes on learning while it is tested. With ``--by-model`` a
fold is the sessions of one model. The benefit B of a turn is given as the cost of another prefill.
Figures are over the tested gaps of all folds.

- ``tools``: true if the policy saw which tools were used.
- ``utility``: mean over the tested gaps of B 1[X <= τ] - min(X, τ) where the decision was to pin
  for τ, else 0; seconds. ``share``: of the clairvoyant's, null if that has none, with the ends
  ``low`` and ``high`` of a 95% interval from 2,000 bootstrap samples of the sessions.
- ``accuracy``: how often it was right about X <= B: by its forecast, if it makes one, else by
  whether it pinned at all, which is a bet that the job returns soon enough.
- ``cover50``, ``cover90``: the fraction of gaps up to the forecast's 0.5 and 0.9 quantile; null
  without a forecast.
- ``us``: microseconds of CPU time per decision.

``against``: the utility of the default policy minus that of every other, with such an interval.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.bench.gaps import Session, read_sources
from tiered_kv.bench.output import AsJson, progress, run_benchmark, show
from tiered_kv.bench.paths import TRACES
from tiered_kv.bench.sim.servers.foresight import Clairvoyant
from tiered_kv.policies.base import Costs, Decision, Tier, TurnPolicy
from tiered_kv.policies.registry import POLICIES

OURS = next(iter(POLICIES))
MAKERS: Mapping[str, Callable[[], TurnPolicy]] = {**POLICIES, "clairvoyant": Clairvoyant}
BENEFITS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
BOOTSTRAPS = 2000

Array = NDArray[np.float64]
Row = dict[str, object]
Label = Callable[[Session], object]


@dataclass(frozen=True, slots=True)
class Fold:
    """Sessions to learn from, and sessions to test on. Both in the source's order."""

    learned: Sequence[Session]
    tested: Sequence[Session]


def fold_of(session: Session, folds: int) -> int:
    """Return the number of the fold that tests a session, by a hash of its id: neither its place
    in the file nor the other sessions matter. The first two bytes of the hash decide which sessions
    are in ``traces/``, and are left out."""
    digest = hashlib.sha256(session.split_by.encode()).digest()
    return int.from_bytes(digest[2:10], "big") % folds


def in_folds(sessions: Sequence[Session], label: Label) -> Iterator[Fold]:
    """Yield one fold per label: its sessions are tested, all others learned from."""
    labels = [label(session) for session in sessions]
    for one in sorted(set(labels), key=str):
        pairs = list(zip(labels, sessions, strict=True))
        yield Fold(
            [session for its, session in pairs if its != one],
            [session for its, session in pairs if its == one],
        )


def utility(decision: Decision, gap_s: float, benefit_s: float) -> float:
    """Return the value of a decision once the gap is known, seconds."""
    if decision.tier is not Tier.PIN:
        return 0.0
    saved_s = benefit_s if gap_s <= decision.ttl_s else 0.0
    return saved_s - min(gap_s, decision.ttl_s)


def returns_within(decision: Decision, benefit_s: float) -> bool:
    """True if the decision predicts X <= B."""
    if decision.forecast is not None:
        return decision.forecast.within(benefit_s) >= 0.5
    return decision.tier is Tier.PIN


@dataclass(slots=True)
class Outcome:
    """One policy at one B, over all tested gaps of a source.

    Attributes:
        utilities: one per gap, seconds.
        best: utilities of the clairvoyant, seconds.
        sessions: id of each gap's session; a sub-agent has its parent's.
    """

    utilities: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    _right: int = 0
    _forecasts: int = 0
    _below50: int = 0
    _below90: int = 0
    _ns: int = 0

    def add(
        self, session: str, decision: Decision, gap_s: float, benefit_s: float, took_ns: int
    ) -> None:
        """Add a decision, and the gap that followed."""
        self.utilities.append(utility(decision, gap_s, benefit_s))
        self.best.append(max(0.0, benefit_s - gap_s))
        self.sessions.append(session)
        self._ns += took_ns
        self._right += returns_within(decision, benefit_s) == (gap_s <= benefit_s)
        if decision.forecast is not None:
            self._forecasts += 1
            self._below50 += gap_s <= decision.forecast.quantile(0.5)
            self._below90 += gap_s <= decision.forecast.quantile(0.9)

    def row(self) -> Row:
        """Return the figures; ``low`` to ``high`` is the share's 95% interval over sessions."""
        tested, forecasts = len(self.utilities), self._forecasts
        share, low, high = _ratio(self.utilities, self.best, self.sessions)
        return {
            "utility": float(np.mean(self.utilities)),
            "share": share,
            "low": low,
            "high": high,
            "accuracy": self._right / tested,
            "cover50": self._below50 / forecasts if forecasts else None,
            "cover90": self._below90 / forecasts if forecasts else None,
            "us": self._ns / tested / 1e3,
        }


def replay(make: Callable[[], TurnPolicy], folds: Iterable[Fold]) -> dict[float, Outcome]:
    """Return outcomes by B. In each fold a new policy learns the other sessions, then is tested."""
    found = {benefit_s: Outcome() for benefit_s in BENEFITS_S}
    costs = {benefit_s: Costs(recompute_s=benefit_s) for benefit_s in BENEFITS_S}
    for fold in folds:
        policy = make()
        for session in fold.learned:
            for gap in session.gaps:
                policy.observe(gap.turn, gap.gap_s, ended=True)
        for session in fold.tested:
            for gap in session.gaps:
                if isinstance(policy, Clairvoyant):
                    policy.gap_s = gap.gap_s
                for benefit_s, outcome in found.items():
                    begin = time.thread_time_ns()
                    decision = policy.decide(gap.turn, costs[benefit_s])
                    took_ns = time.thread_time_ns() - begin
                    outcome.add(session.split_by, decision, gap.gap_s, benefit_s, took_ns)
                policy.observe(gap.turn, gap.gap_s, ended=True)
    return found


def difference(ours: Outcome, other: Outcome) -> Row:
    """Return our mean utility per gap minus theirs, with a 95% interval over sessions."""
    differences = np.subtract(ours.utilities, other.utilities)
    mean, low, high = _ratio(differences, np.ones(len(differences)), ours.sessions)
    return {"difference": mean, "low": low, "high": high}


def _ratio(
    above: Sequence[float] | Array, below: Sequence[float] | Array, sessions: Sequence[str]
) -> tuple[float | None, float | None, float | None]:
    """Return sum over sum with a 95% interval from ``BOOTSTRAPS`` samples of the sessions; None if
    the second sum is 0."""
    number = {name: n for n, name in enumerate(dict.fromkeys(sessions))}
    numbers = [number[name] for name in sessions]
    tops, bottoms = np.bincount(numbers, above), np.bincount(numbers, below)
    if not bottoms.sum():
        return None, None, None
    drawn = np.random.default_rng(0).integers(len(number), size=(BOOTSTRAPS, len(number)))
    sums = bottoms[drawn].sum(axis=1)
    ratios = tops[drawn].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(tops.sum() / bottoms.sum()), float(low), float(high)


def cases(sources: Mapping[str, Sequence[Session]]) -> Iterator[tuple[str, bool, list[Session]]]:
    """Yield each source's name, whether tools are named, and its sessions. A source whose clients
    name tools is yielded again without them."""
    for name, sessions in sources.items():
        if any(session.names_tools for session in sessions):
            yield name, True, list(sessions)
        yield name, False, [session.without_tools() for session in sessions]


def measure(
    sources: Mapping[str, Sequence[Session]], label: Label, tick: Callable[[str], None]
) -> dict[str, list[Row]]:
    """Return all rows.

    Args:
        label: returns the fold that tests a session.
        tick: called after every policy and case.
    """
    rows: list[Row] = []
    against: list[Row] = []
    for source, tools, sessions in cases(sources):
        found = {}
        for name, make in MAKERS.items():
            found[name] = replay(make, in_folds(sessions, label))
            tick(f"{name} on {source}")
            for b, outcome in found[name].items():
                of: Row = {"policy": name, "source": source, "tools": tools, "b": b}
                rows.append(of | outcome.row())
        for name in POLICIES:
            if name != OURS:
                for b in BENEFITS_S:
                    row = difference(found[OURS][b], found[name][b])
                    against.append({"source": source, "tools": tools, "b": b, "policy": name} | row)
    return {"rows": rows, "against": against}


def _number(value: object) -> str:
    if not isinstance(value, float):
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def _tables(result: Mapping[str, Sequence[Row]]) -> Iterator[Table]:
    """Yield two tables per case: shares, and differences to ours."""
    for case in dict.fromkeys((row["source"], row["tools"]) for row in result["rows"]):
        title = f"{case[0]}, {'with' if case[1] else 'without'} tools"
        shares = _table(f"{title}: share of the clairvoyant's utility, by B in seconds")
        better = _table(f"{title}: {OURS} over theirs, seconds (* 0 is outside the interval)")
        of_policy: dict[object, list[Row]] = defaultdict(list)
        for row in (*result["rows"], *result["against"]):
            if (row["source"], row["tools"]) == case:
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
    traces: Annotated[Path, typer.Option(help="Folder of recordings.")] = TRACES,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 5,
    by_model: Annotated[
        bool, typer.Option("--by-model", help="Leave one model out instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay recorded gaps."""
    try:
        sources = read_sources(traces)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {traces}: {error.strerror}") from error
    if by_model:
        sources = {name: of for name, of in sources.items() if len({one.model for one in of}) > 1}
    if not sources:
        raise typer.BadParameter(f"{traces} holds no sessions to test on")
    with progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("policies", total=len(list(cases(sources))) * len(MAKERS))
        result = measure(
            sources,
            (lambda session: session.model) if by_model else (lambda one: fold_of(one, folds)),
            lambda done: bar.update(task, advance=1, description=done),
        )
    if as_json:
        show("Policies", result, as_json=True)
        return
    for table in _tables(result):
        Console().print(table)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
