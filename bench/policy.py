"""Quality of the prices that policies put on a wait: recorded gaps, replayed without a server.

    python -m bench.policy --traces ../shared/traces --folds 5 --json

Cross-validation over sessions: those of a source are dealt into folds by a hash of their id, and
each fold is tested by a policy that learned from the other folds alone, in the order of the file.
It is tested on one session after the other: each turn is decided, then its gap is told, as a server
would hear of it before the job's next turn. So it goes on learning while it is tested. With
``--by-model`` a fold is the sessions of one model. What B a turn would save is given as the cost of
prefilling again. Figures are over the tested gaps of all folds.

- ``tools``: true if the policy saw which tools were used; false if not, or if nobody said.
- ``utility``: mean over the tested gaps of B 1[X <= τ] - min(X, τ) where the decision was to pin
  for τ, 0 where it was not; seconds. ``share``: of the clairvoyant's, null if that has none, with
  the ends ``low`` and ``high`` of a 95% interval from 2,000 bootstrap samples of the sessions.
- ``accuracy``: how often it said rightly whether X <= B: by its forecast, if it makes one, else by
  whether it pinned at all, which is a bet that the job returns soon enough.
- ``cover50``, ``cover90``: the share of gaps up to the forecast's 0.5 and 0.9 quantile; null
  without a forecast.
- ``us``: microseconds of CPU time per decision.

``against``: the utility of the default policy minus that of every other, with such an interval.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.bench.forecast.clairvoyant import Clairvoyant
from tiered_kv.bench.forecast.folds import Label, fold_of, in_folds
from tiered_kv.bench.forecast.gaps import Session, read_sources
from tiered_kv.bench.forecast.replay import BENEFITS_S, Row, difference, replay
from tiered_kv.bench.output import AsJson, progress, run_benchmark, show
from tiered_kv.bench.paths import TRACES
from tiered_kv.policies.base import TurnPolicy
from tiered_kv.policies.registry import POLICIES

OURS = next(iter(POLICIES))
MAKERS: Mapping[str, Callable[[], TurnPolicy]] = {**POLICIES, "clairvoyant": Clairvoyant}


def cases(sources: Mapping[str, Sequence[Session]]) -> Iterator[tuple[str, bool, list[Session]]]:
    """Each source's name, whether tools are told, and its sessions. Those whose clients named tools
    come a second time without."""
    for name, sessions in sources.items():
        if any(session.names_tools for session in sessions):
            yield name, True, list(sessions)
        yield name, False, [session.without_tools() for session in sessions]


def measure(
    sources: Mapping[str, Sequence[Session]], label: Label, tick: Callable[[str], None]
) -> dict[str, list[Row]]:
    """All rows. ``label`` says which fold tests a session; ``tick`` is told of every policy and
    case that is done."""
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
    """One table per case of the shares, and one of how much better ours is."""
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
