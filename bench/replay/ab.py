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
"""The highest load's arrival rate over that of pressure."""
NEAR = 0.25
"""Distance from the wanted slowdown at which a calibration may end, as a fraction of it."""
TRIES = 2
"""Calibration runs at most; the nearest is taken."""
FIRST_RATE = 1.9
"""Jobs that the first try lets arrive in the time that one alone takes. 30 jobs of the preset were
1.3, 1.5 and 1.7 times as slow at 1.1, 1.3 and 1.5 (two cores, SmolLM2-135M)."""
STEEP = 2.5
"""Beyond that, slowdown rises about with this power of the rate."""
BOUNDS = (REACH, BOUND)


@dataclass(frozen=True, slots=True)
class Preset:
    """Size of a measurement.

    Attributes:
        jobs: number of jobs of every load except idle.
        turns: number of turns of each job.
        idle_jobs: number of these jobs that run at idle, one after another.
        idle_rounds, rounds: number of rounds at idle and under the other loads.
        bounds_once: run the bounds only in the first round of a load, to save time.
        pool_tokens: KV pool of every server but the bounds.
        slowdown: stock's mean completion time under pressure over that at idle.
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
"""``cpu``: two cores, three and a half hours. ``peers``: with all peers, two and a half.
``tiny``: whether everything works, in minutes."""


class NotStarted(Exception):
    """An optional server does not run on this machine. The message comes from that server."""


class HarnessError(RuntimeError):
    """The measurement cannot go on; the message says why."""


Measure: TypeAlias = Callable[[Kind, str, int, float | None, ServerCosts | None], Kept]
"""Measures one run of a kind under a load, with its number. The arrival rate is None for one job
after the other, and the costs of stock's steps are None where they are not known. Raises
``NotStarted`` for an optional kind that does not serve here."""


@dataclass(slots=True)
class Harness:
    """Loads, rounds and servers, in an order that favours no server (see ``drawn_order``).

    Attributes:
        seed: of that order.
        report: called before every run with its name.
        kept: the runs so far, resumed ones included, without those that only calibrated.
        not_started: optional servers that do not serve here, with their messages.
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
        """Measure everything that the preset has. What was measured stays when this is
        interrupted.

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
        """The arrival rate at which stock vLLM has the wanted slowdown, jobs per second. The run
        that shows it is stock's first under pressure."""
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
            rate = found.run.jobs_per_s  # perhaps of before a resumption
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
        """A run, measured now or before; the message of a server that did not start."""

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
    if low[0] >= high[0]:  # not monotone: noise decides, go on in the middle
        return math.sqrt(low[0] * high[0])
    share = math.log(wanted / low[1]) / math.log(high[1] / low[1])
    # Kept off the ends, or a steep curve would have the same rate tried again.
    return float(low[0] * (high[0] / low[0]) ** min(max(share, 0.1), 0.9))


def nearest_rate(tried: Sequence[tuple[float, float]], wanted: float) -> float:
    """The rate whose slowdown is closest to the wanted one."""
    return min(tried, key=lambda pair: abs(math.log(pair[1] / wanted)))[0]


def total_runs(kinds: Sequence[Kind], preset: Preset) -> int:
    """Largest number of runs, for a progress bar."""
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
