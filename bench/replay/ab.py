"""Run the same jobs on every server type, once per round, in an order drawn for each round. Each
run is stored when it finishes.
"""

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
"""Arrival rate of the highest load (``BEYOND``), as a multiple of the rate of ``PRESSURE``."""
NEAR = 0.25
"""Relative distance from the target slowdown at which calibration ends."""
TRIES = 2
"""Maximum number of calibration runs. The run whose slowdown is nearest to the target is used."""
FIRST_RATE = 1.9
"""Arrival rate of the first calibration run, in jobs per mean duration of a job at idle. At rates
of 1.1, 1.3 and 1.5, the preset's 30 jobs took 1.3, 1.5 and 1.7 times as long as at idle (two cores,
SmolLM2-135M)."""
STEEP = 2.5
"""Beyond ``FIRST_RATE``, the slowdown grows roughly as this power of the rate."""
BOUNDS = (REACH, BOUND)


@dataclass(frozen=True, slots=True)
class Preset:
    """Size of a measurement.

    Attributes:
        jobs: number of jobs under every load except idle.
        turns: number of turns of each job.
        idle_jobs: number of jobs in the idle load, which run one at a time.
        idle_rounds, rounds: number of rounds of the idle load and of the other loads.
        bounds_once: run the servers in ``BOUNDS`` only in the first round of a load, to save time.
        pool_tokens: KV pool size of every server except those in ``BOUNDS``.
        slowdown: target for calibration: stock vLLM's mean completion time under pressure, as a
            multiple of its time at idle.
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
"""``cpu``: three and a half hours on two cores. ``peers``: for ``--peers``, two and a half hours.
``tiny``: a smoke test of a few minutes."""


class NotStarted(Exception):
    """An optional server does not run on this machine. The message is the server's own error."""


class HarnessError(RuntimeError):
    """The measurement cannot continue. The message gives the reason."""


Measure: TypeAlias = Callable[[Kind, str, int, float | None, ServerCosts | None], Kept]
"""Measures one run. Arguments: the server type, the load, the round, the arrival rate (None plays
one job at a time), and the costs of stock vLLM's steps (None if unknown). Raises ``NotStarted`` for
an optional server that does not run on this machine."""


@dataclass(slots=True)
class Harness:
    """Runs every load on every server, in rounds. The order of servers favours none of them (see
    ``drawn_order``).

    Attributes:
        seed: seed of the order of servers.
        report: called with the name of each run before it starts.
        kept: completed runs, including earlier runs that are resumed, without calibration runs.
        not_started: messages of optional servers that do not run on this machine.
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
        """Measure all runs of the preset. Completed runs are kept after an interrupt.

        Raises:
            HarnessError: stock vLLM does not run, or finished no job.
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
        """Find the arrival rate at which the slowdown of stock vLLM is nearest to the target, in at
        most ``TRIES`` runs. Returns the rate, jobs per second. The run at that rate counts as the
        first run of stock vLLM under pressure, and provides the costs of its steps.

        Raises:
            HarnessError: stock vLLM does not run, or finished no job.
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
            rate = (
                found.run.jobs_per_s
            )  # the stored run of an earlier, resumed measurement may have another rate
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
    """Return the arrival rate to try next.

    Args:
        tried: pairs of rate and slowdown. The rate is interpolated log-linearly if their slowdowns
            enclose ``wanted``, and otherwise extrapolated with slope ``STEEP``.
    """
    below = [(rate, slow) for rate, slow in tried if slow < wanted]
    above = [(rate, slow) for rate, slow in tried if slow >= wanted]
    if not (below and above):
        rate, slow = max(below) if below else min(above)
        return float(rate * (wanted / slow) ** (1 / STEEP))
    low, high = max(below), min(above)
    if low[0] >= high[0]:  # not monotonic because of noise: try the middle
        return math.sqrt(low[0] * high[0])
    share = math.log(wanted / low[1]) / math.log(high[1] / low[1])
    # Keep away from both ends. Otherwise a steep curve would yield a rate that was already tried.
    return float(low[0] * (high[0] / low[0]) ** min(max(share, 0.1), 0.9))


def nearest_rate(tried: Sequence[tuple[float, float]], wanted: float) -> float:
    """Return the rate whose slowdown is closest to the target."""
    return min(tried, key=lambda pair: abs(math.log(pair[1] / wanted)))[0]


def total_runs(kinds: Sequence[Kind], preset: Preset) -> int:
    """Return the maximum number of runs, for a progress bar."""
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
