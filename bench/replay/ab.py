"""Run the same jobs on every type of server in alternation. Each run is stored when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeAlias

from tiered_kv.bench.agents.figures import completions
from tiered_kv.bench.agents.paired import drawn_order
from tiered_kv.bench.agents.results import Kept, Run
from tiered_kv.bench.agents.run_files import Ledger
from tiered_kv.bench.servers.server_costs import ServerCosts

from .kinds import Kind
from .names import BEYOND, BOUND, CALIBRATION, CONTROL, IDLE, PRESSURE, REACH, STOCK, TIERED

BEYOND_TIMES = 1.5
"""Arrival rate of the highest load, as a multiple of the rate under pressure."""
NEAR = 0.25
"""Relative distance from the target slowdown at which calibration ends."""
TRIES = 2
"""Maximum number of calibration runs. The nearest run is used."""
FIRST_RATE = 1.9
"""Arrival rate of the first calibration run, in jobs per duration of a job alone. At 1.1, 1.3 and
1.5, 30 jobs of the preset took 1.3, 1.5 and 1.7 times as long (two cores, SmolLM2-135M)."""
STEEP = 2.5
"""Beyond that rate, slowdown grows roughly as this power of the rate."""
BOUNDS = (REACH, BOUND)


@dataclass(frozen=True, slots=True)
class Preset:
    """Size of a measurement.

    Attributes:
        jobs: number of jobs under every load except idle.
        turns: number of turns of each job.
        idle_jobs: number of these jobs that run in the idle load, one at a time.
        idle_rounds, rounds: number of rounds of the idle load and of the other loads.
        bounds_once: run the bounds only in the first round of a load, to save time.
        pool_tokens: KV pool size of every server except the bounds.
        slowdown: stock's mean completion time under pressure, as a multiple of its time at idle.
    """

    jobs: int
    turns: int
    idle_jobs: int
    idle_rounds: int
    rounds: int
    pool_tokens: int
    slowdown: float = 3.0
    bounds_once: bool = False


_CPU = Preset(jobs=30, turns=4, idle_jobs=2, idle_rounds=5, rounds=3, pool_tokens=10_240)
PRESETS: Mapping[str, Preset] = {
    "cpu": _CPU,
    "peers": replace(_CPU, jobs=16, idle_rounds=1, bounds_once=True),
    "tiny": Preset(jobs=4, turns=3, idle_jobs=2, idle_rounds=1, rounds=1, pool_tokens=8_192),
}
"""``cpu``: three and a half hours on two cores. ``peers``: with all peers, two and a half hours.
``tiny``: a smoke test of a few minutes."""


class NotStarted(Exception):
    """An optional server does not run on this machine. The message is the server's own."""


class HarnessError(RuntimeError):
    """The measurement cannot continue. The message says why."""


Measure: TypeAlias = Callable[[Kind, str, int, float | None, ServerCosts | None], Kept]
"""Measures one numbered run of a server type under a load. The arrival rate is None for one job at
a time, and the costs of stock's steps are None if unknown. Raises ``NotStarted`` for an optional
type that does not run here."""


@dataclass(slots=True)
class Harness:
    """Runs all loads, rounds and servers, in an order that favours no server (see ``drawn_order``).

    Attributes:
        seed: seed of that order.
        report: called with the name of each run before it starts.
        kept: the runs so far, including resumed runs but not calibration runs.
        not_started: messages of optional servers that do not run here.
    """

    kinds: Sequence[Kind]
    preset: Preset
    measure: Measure
    ledger: Ledger
    _: KW_ONLY
    seed: int
    report: Callable[[str], None] = lambda _: None
    kept: list[Kept] = field(init=False, default_factory=list)
    not_started: dict[str, str] = field(init=False, default_factory=dict)
    _costs: ServerCosts | None = field(init=False, default=None)

    @property
    def runs(self) -> list[Run]:
        return [kept.run for kept in self.kept]

    def run_all(self) -> None:
        """Measure the whole preset. Finished runs are kept if this is interrupted.

        Raises:
            HarnessError: stock finished no job.
        """
        preset = self.preset
        main = [kind for kind in self.kinds if kind.name in (STOCK, CONTROL, TIERED)]
        idle = [kind for kind in self.kinds if not kind.needs_costs]
        for number in range(preset.idle_rounds):
            for kind in drawn_order(main if number else idle, self.seed, number):
                self._one(kind, IDLE, number, None)
        rate = self._calibrate()
        for number in range(preset.rounds):
            skipped = (CONTROL, *(BOUNDS if number and preset.bounds_once else ()))
            kinds = [kind for kind in self.kinds if kind.name not in skipped]
            for load, jobs_per_s in ((PRESSURE, rate), (BEYOND, rate * BEYOND_TIMES)):
                for kind in drawn_order(kinds, self.seed, number):
                    self._one(kind, load, number, jobs_per_s)

    def _calibrate(self) -> float:
        """Find the arrival rate at which stock vLLM has the target slowdown, jobs per second. That
        run counts as stock's first run under pressure.
        """
        stock = next(kind for kind in self.kinds if kind.name == STOCK)
        alone = [run for run in self.runs if (run.server, run.load) == (STOCK, IDLE)]
        idle_s, wanted = _mean(alone), self.preset.slowdown
        tried: dict[float, Kept] = {}
        slower: list[tuple[float, float]] = []
        rate = FIRST_RATE / idle_s
        for number in range(TRIES):
            found = self._measured(stock, CALIBRATION, number, rate)
            if isinstance(found, str):
                raise HarnessError(f"stock vLLM does not run: {found}")
            rate = found.run.jobs_per_s  # possibly from before a resumption
            tried[rate] = found
            slower.append((rate, _mean([found.run]) / idle_s))
            if abs(slower[-1][1] / wanted - 1) <= NEAR:
                break
            rate = next_rate(slower, wanted)
        rate = nearest_rate(slower, wanted)
        run = tried[rate].run
        try:
            self._costs = ServerCosts.of(alone[0], run)
        except ValueError:  # too few turns
            self._costs = None
        taken = replace(tried[rate], run=replace(run, load=PRESSURE, round=0))
        self.ledger.put(PRESSURE, 0, STOCK, taken)
        return rate

    def _one(self, kind: Kind, load: str, number: int, jobs_per_s: float | None) -> None:
        if kind.name in self.not_started:
            return
        found = self._measured(kind, load, number, jobs_per_s)
        if isinstance(found, str):
            self.not_started[kind.name] = found
        else:
            self.kept.append(found)

    def _measured(self, kind: Kind, load: str, number: int, jobs_per_s: float | None) -> Kept | str:
        """Return a run, measured now or earlier, or the message of a server that did not start."""

        def measure() -> Kept | str:
            self.report(f"{load}, round {number + 1}, {kind.name}")
            try:
                return self.measure(kind, load, number, jobs_per_s, self._costs)
            except NotStarted as error:
                return str(error)

        return self.ledger.get_or_measure(load, number, kind.name, measure)


def next_rate(tried: Sequence[tuple[float, float]], wanted: float) -> float:
    """The arrival rate to try next, from pairs of rate and slowdown: log-linear interpolation
    around the wanted slowdown, or extrapolation with slope ``STEEP`` if all pairs are on one side
    of it."""
    below = [(rate, slow) for rate, slow in tried if slow < wanted]
    above = [(rate, slow) for rate, slow in tried if slow >= wanted]
    if not (below and above):
        rate, slow = max(below) if below else min(above)
        return float(rate * (wanted / slow) ** (1 / STEEP))
    low, high = max(below), min(above)
    if low[0] >= high[0]:  # not monotone because of noise: continue in the middle
        return math.sqrt(low[0] * high[0])
    share = math.log(wanted / low[1]) / math.log(high[1] / low[1])
    # Keep away from the ends, or a steep curve would try the same rate again.
    return float(low[0] * (high[0] / low[0]) ** min(max(share, 0.1), 0.9))


def nearest_rate(tried: Sequence[tuple[float, float]], wanted: float) -> float:
    """The rate whose slowdown is closest to the target."""
    return min(tried, key=lambda pair: abs(math.log(pair[1] / wanted)))[0]


def total_runs(kinds: Sequence[Kind], preset: Preset) -> int:
    """Maximum number of runs, for a progress bar."""
    idle = len(kinds) + 3 * (preset.idle_rounds - 1)
    busy = preset.rounds * (len(kinds) - 1)
    if preset.bounds_once:
        busy -= (preset.rounds - 1) * sum(kind.name in BOUNDS for kind in kinds)
    return idle + TRIES - 1 + 2 * busy


def _mean(runs: Iterable[Run]) -> float:
    times = [s for run in runs for s in completions(run)]
    if not times:
        raise HarnessError("stock vLLM finished no job, so the loads cannot be calibrated")
    return math.fsum(times) / len(times)
