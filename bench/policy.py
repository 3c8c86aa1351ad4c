"""Value of each policy's decisions on recorded gaps, replayed without a server.

    python -m bench.policy --traces ../shared/traces --folds 5 --json

Uses cross-validation over sessions: the sessions of a source are assigned to folds by a hash of
their id. Each fold is used to test a policy that learned from the other folds, in file order.
Sessions are tested one at a time: the policy decides each turn and then observes its gap, as on a
server before the job's next turn, so it keeps learning while it is tested. With ``--by-model``, a
fold is the sessions of one model. The benefit B of keeping a turn's KV is the cost of another
prefill. Figures are over the tested gaps of all folds.

- ``tools``: true if the policy was given the tools' names.
- ``utility``: mean of B 1[X <= τ] - min(X, τ) over the tested gaps X, in seconds, for decisions to
  pin for τ; 0 for other decisions. ``share``: fraction of the clairvoyant policy's utility, null if
  that is 0, with a 95% interval from ``low`` to ``high`` from 2,000 bootstrap samples of the
  sessions.
- ``accuracy``: fraction of decisions that were right about X <= B, judged by the forecast or,
  without a forecast, by whether the policy pinned the turn (a prediction that X <= B).
- ``cover50``, ``cover90``: fraction of gaps at or below the forecast's 0.5 and 0.9 quantiles; null
  without a forecast.
- ``us``: microseconds of CPU time per decision.

``against``: for every other policy, mean utility per gap of the default policy minus the mean
utility of the other policy, with a 95% interval from the same bootstrap.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.gaps import Gap, Session, read_sources
from tiered_kv.bench.output import AsJson, benchmark, run_benchmark
from tiered_kv.bench.paths import TRACES
from tiered_kv.bench.sim.servers.foresight import Clairvoyant
from tiered_kv.policies.base import Costs, Decision, Tier, TurnPolicy
from tiered_kv.policies.registry import POLICIES

OURS = next(iter(POLICIES))
MAKERS: Mapping[str, Callable[[], TurnPolicy]] = {**POLICIES, "clairvoyant": Clairvoyant}
BENEFITS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
BOOTSTRAPS = 2000
QUANTILES = (0.5, 0.9)

Row = dict[str, Any]
Label = Callable[[Session], object]


@dataclass(frozen=True, slots=True)
class Fold:
    """Sessions to learn from, and sessions to test on, both in file order."""

    learned: Sequence[Session]
    tested: Sequence[Session]


def fold_of(session: Session, folds: int) -> int:
    """Return the number of the fold that tests a session. It is a hash of the session's id, so that
    neither its position in the file nor other sessions matter. The first two bytes of the hash are
    not used, because they decide which sessions are in ``traces/``.
    """
    digest = hashlib.sha256(session.split_by.encode()).digest()
    return int.from_bytes(digest[2:10], "big") % folds


def in_folds(sessions: Sequence[Session], label: Label) -> Iterator[Fold]:
    """Yield one fold per label. The sessions with that label are for testing, and all others for
    learning.
    """
    for one in sorted({label(session) for session in sessions}, key=str):
        yield Fold(
            [session for session in sessions if label(session) != one],
            [session for session in sessions if label(session) == one],
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A decision, and the gap that followed.

    Attributes:
        session: session id; for a sub-agent, its parent's.
        utility: utility of the decision, seconds.
        best: utility of the clairvoyant decision, seconds.
        right: True if the decision correctly predicted whether the gap was at most the benefit.
        below: for each of ``QUANTILES``, True if the gap was at most that quantile of the forecast;
            None without a forecast.
        took_ns: CPU time of the decision, nanoseconds.
    """

    session: str
    utility: float
    best: float
    right: bool
    below: tuple[bool, ...] | None
    took_ns: int


def utility(decision: Decision, gap_s: float, benefit_s: float) -> float:
    """Return the utility of a decision for a known gap, seconds: 0 unless the decision is to pin.
    A pin gains the benefit if the gap ends within the pin's time, and costs the time pinned.
    """
    if decision.tier is not Tier.PIN:
        return 0.0
    saved_s = benefit_s if gap_s <= decision.ttl_s else 0.0
    return saved_s - min(gap_s, decision.ttl_s)


def replay(make: Callable[[], TurnPolicy], folds: Iterable[Fold]) -> dict[float, list[Trial]]:
    """Return the trials for each benefit in ``BENEFITS_S``. In each fold, a new policy first learns
    from the sessions of the other folds.
    """
    found: dict[float, list[Trial]] = {benefit_s: [] for benefit_s in BENEFITS_S}
    for fold in folds:
        policy = make()
        for session in fold.learned:
            for gap in session.gaps:
                policy.observe(gap.turn, gap.gap_s, ended=True)
        for session in fold.tested:
            for gap in session.gaps:
                if isinstance(policy, Clairvoyant):
                    policy.gap_s = gap.gap_s
                for benefit_s, tested in found.items():
                    tested.append(_test(policy, session, gap, benefit_s))
                policy.observe(gap.turn, gap.gap_s, ended=True)
    return found


def _test(policy: TurnPolicy, session: Session, gap: Gap, benefit_s: float) -> Trial:
    costs, gap_s, begin = Costs(recompute_s=benefit_s), gap.gap_s, time.thread_time_ns()
    decision = policy.decide(gap.turn, costs)
    took_ns = time.thread_time_ns() - begin
    forecast = decision.forecast
    soon = decision.tier is Tier.PIN if forecast is None else forecast.within(benefit_s) >= 0.5
    return Trial(
        session.split_by,
        utility(decision, gap_s, benefit_s),
        max(0.0, benefit_s - gap_s),
        soon == (gap_s <= benefit_s),
        None if forecast is None else tuple(gap_s <= forecast.quantile(q) for q in QUANTILES),
        took_ns,
    )


def figures(tested: Sequence[Trial]) -> Row:
    """Return the figures of a policy for one benefit; see the module docstring. ``low`` to ``high``
    is the 95% interval of ``share``.
    """
    utilities = [one.utility for one in tested]
    share, low, high = _ratio(utilities, [one.best for one in tested], tested)
    below = [one.below for one in tested if one.below is not None]
    cover50, cover90 = np.mean(below, axis=0).tolist() if below else (None, None)
    return {
        "utility": float(np.mean(utilities)),
        "share": share,
        "low": low,
        "high": high,
        "accuracy": float(np.mean([one.right for one in tested])),
        "cover50": cover50,
        "cover90": cover90,
        "us": float(np.mean([one.took_ns for one in tested])) / 1e3,
    }


def difference(ours: Sequence[Trial], other: Sequence[Trial]) -> Row:
    """Return the difference in mean utility per gap, default policy minus the other, with a 95%
    interval over sessions."""
    differences = [one.utility - their.utility for one, their in zip(ours, other, strict=True)]
    mean, low, high = _ratio(differences, [1.0] * len(differences), ours)
    return {"difference": mean, "low": low, "high": high}


def _ratio(
    above: Sequence[float], below: Sequence[float], tested: Sequence[Trial]
) -> tuple[float | None, float | None, float | None]:
    """Return the ratio of two sums, with a 95% interval from ``BOOTSTRAPS`` samples of the
    sessions; None if the second sum is 0.
    """
    number = {name: n for n, name in enumerate(dict.fromkeys(one.session for one in tested))}
    numbers = [number[one.session] for one in tested]
    tops, bottoms = np.bincount(numbers, above), np.bincount(numbers, below)
    if not bottoms.sum():
        return None, None, None
    drawn = np.random.default_rng(0).integers(len(number), size=(BOOTSTRAPS, len(number)))
    sums = bottoms[drawn].sum(axis=1)
    ratios = tops[drawn].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(tops.sum() / bottoms.sum()), float(low), float(high)


def cases(sources: Mapping[str, Sequence[Session]]) -> Iterator[tuple[str, bool, list[Session]]]:
    """Yield each source's name, whether tools are named, and its sessions. A source with tool names
    is yielded a second time without the names.
    """
    for name, sessions in sources.items():
        if any(session.names_tools for session in sessions):
            yield name, True, list(sessions)
        yield name, False, [session.without_tools() for session in sessions]


def measure(
    sources: Mapping[str, Sequence[Session]], label: Label, tick: Callable[[str], None]
) -> dict[str, list[Row]]:
    """Return ``rows`` and ``against``; see the module docstring.

    Args:
        label: returns the fold that tests a session.
        tick: called after each policy in each case.
    """
    rows: list[Row] = []
    against: list[Row] = []
    for source, tools, sessions in cases(sources):
        found = {}
        of: Row = {"source": source, "tools": tools}
        for name, make in MAKERS.items():
            found[name] = replay(make, in_folds(sessions, label))
            tick(f"{name} on {source}")
            rows += ({"policy": name, **of, "b": b, **figures(found[name][b])} for b in BENEFITS_S)
        against += (
            {**of, "b": b, "policy": name, **difference(found[OURS][b], found[name][b])}
            for name in POLICIES
            if name != OURS
            for b in BENEFITS_S
        )
    return {"rows": rows, "against": against}


SHOWN = (
    ("fraction of the clairvoyant policy's utility", "rows", "share"),
    (f"{OURS} minus the other policy, seconds", "against", "difference"),
)
"""Title, rows and figure of each printed table."""


def _tables(found: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return two tables per source, with a row for each policy and a column for each benefit."""
    tables: dict[str, dict[str, Row]] = {}
    for title, rows, figure in SHOWN:
        for row in found[rows]:
            tools = "with tools" if row["tools"] else "without tools"
            table = tables.setdefault(f"{title}, {row['source']} {tools}", {})
            line = table.setdefault(row["policy"], {"policy": row["policy"]})
            line[f"{row['b']:g} s"] = row[figure]
    return {name: list(table.values()) for name, table in tables.items()}


def main(
    traces: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder with recordings.")
    ] = TRACES,
    folds: Annotated[int, typer.Option(min=2, help="Number of cross-validation folds.")] = 5,
    by_model: Annotated[
        bool, typer.Option("--by-model", help="Leave one model out instead of using folds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay recorded gaps with each policy."""
    sources = read_sources(traces)
    label: Label = attrgetter("model") if by_model else partial(fold_of, folds=folds)
    if by_model:
        sources = {name: of for name, of in sources.items() if len(set(map(label, of))) > 1}
    if not sources:
        raise typer.BadParameter(f"{traces} contains no sessions to test on")
    with benchmark("Policies", len(list(cases(sources))) * len(MAKERS), as_json=as_json) as run:
        found = measure(sources, label, run.tick)
        run.result = found if as_json else _tables(found)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
