"""Servers that are compared: policies by their names, and servers that others describe.

A name is a base, and the tiers beside VRAM that it has: ``occupancy``, ``occupancy+cpu``,
``occupancy+cpu+ssd``. ``@`` and an eviction rule of ``TIERED_KV_EVICTION`` may stand behind:
``occupancy+cpu@lru``. Bases that are policies of ``TIERED_KV_POLICY`` run the connector, and so
does any ``module:Class``; the others are:

- ``fcfs``: stock vLLM, requests in the order of their arrival.
- ``job-fcfs``: stock vLLM, requests in the order in which their jobs arrived.
- ``autellix``: PLAS, see ``ordering``. ``thunderagent``: see ``gate``.
- ``lmcache``: CPU memory, filled as KV is made and evicted in LRU order; restores in chunks of 256
  tokens, before the step that needs them.
- ``clairvoyant``: pins for exactly the gap, which it knows.
- ``infinite``: stock vLLM with a pool that holds everything.
- ``in-batches``: stock vLLM with static batches, see ``static_batches``.
- ``reach``: the same, but only as many contexts run at once as the machine's pool holds.
  ``job-reach``: so, in the order in which jobs arrived.

``occupancy`` runs ``ContinuumScheduler``, ``occupancy-alone`` the connector under vLLM's own, and
``occupancy-patient`` has clients that never time out, as those of ``thunderagent`` must not.
``occupancy-open`` holds no job back. ``occupancy-unpinned`` pins nothing, ``occupancy-late`` brings
nothing up before a job is back, and ``occupancy-blind`` forecasts every gap alike.
``occupancy-knowing`` is told of each job how many turns it takes and how long its context gets, to
see what forecasts of these could still gain.
``continuum`` and ``continuum-fixed`` take requests in the order of their jobs, as their paper has
it; ``lru+cpu`` is offloading alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tiered_kv.bench.forecast.clairvoyant import Clairvoyant
from tiered_kv.policies import registry
from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.base import Costs, Decision, JobKey, TurnEnd
from tiered_kv.policies.registry import POLICIES

from .ablated import Part

CHUNK = 256
"""Tokens of a chunk of LMCache."""


class Order(Enum):
    """Order of requests."""

    ARRIVAL = "arrival"
    JOB = "job"
    ATTAINED = "attained"


@dataclass(frozen=True, slots=True)
class Server:
    """One of those compared.

    Attributes:
        policy: the connector's; None for stock vLLM.
        eviction: rule by which pages leave CPU memory.
        cpu, ssd: whether it has these tiers.
        infinite: its pool holds everything.
        within_reach: yet what runs at once must fit into the machine's pool.
        gated: whole programs are paused, as ThunderAgent does.
        chunk: restores come in whole chunks of so many tokens, before a step; 0: as ours do.
        in_job_order: it runs ``ContinuumScheduler``.
        patient: it may hold a job for as long as it takes.
        eviction: rule by which pages leave CPU memory; None for the default.
        open: it holds no job back.
        lacks: part of its policy that is switched off.
        in_batches: it begins no request while one of those that it began together runs.
        knowing: admission is told how many turns every job takes, and how long its context gets.
    """

    name: str
    policy: str | None = None
    cpu: bool = False
    ssd: bool = False
    order: Order = Order.ARRIVAL
    infinite: bool = False
    within_reach: bool = False
    gated: bool = False
    chunk: int = 0
    in_job_order: bool = False
    patient: bool = False
    open: bool = False
    lacks: Part | None = None
    in_batches: bool = False
    knowing: bool = False
    eviction: str | None = None

    @property
    def outside(self) -> frozenset[str]:
        """Names of the modules that its policy and rule come from, if these are not ours."""
        parts = (self.policy or "", self.eviction or "")
        return frozenset(part.partition(":")[0] for part in parts if ":" in part)


CLAIRVOYANT = "clairvoyant"
_STOCK = {
    "fcfs": Server("fcfs"),
    "job-fcfs": Server("job-fcfs", order=Order.JOB),
    "autellix": Server("autellix", order=Order.ATTAINED),
    "thunderagent": Server("thunderagent", gated=True),
    "in-batches": Server("in-batches", in_batches=True),
    "infinite": Server("infinite", infinite=True),
    "reach": Server("reach", infinite=True, within_reach=True),
    "job-reach": Server("job-reach", order=Order.JOB, infinite=True, within_reach=True),
}
_JOB_ORDERED = ("continuum", "continuum-fixed")
OURS = "occupancy"
CONNECTOR_ALONE = "occupancy-alone"
PATIENT, KNOWING, OPEN = "occupancy-patient", "occupancy-knowing", "occupancy-open"
LACKING: Mapping[str, Part] = {
    "occupancy-unpinned": Part.PINS,
    "occupancy-late": Part.PROMOTION,
    "occupancy-blind": Part.FORECAST,
}
OURS_VARIED = (PATIENT, KNOWING, OPEN, *LACKING)
BASES = (*_STOCK, "lmcache", CLAIRVOYANT, CONNECTOR_ALONE, *OURS_VARIED, *POLICIES)


def server(name: str) -> Server:
    """Find the server of that name.

    Raises:
        ValueError: there is none; the message says what can be written.
    """
    tiered, at, rule = name.partition("@")
    base, *tiers = tiered.split("+")
    ours = base in BASES or ":" in base
    if not ours or tiers not in ([], ["cpu"], ["cpu", "ssd"]) or (at and not tiers):
        known = ", ".join(BASES)
        raise ValueError(
            f"no server {name!r}: write one of {known}, or module:Class, then +cpu or +cpu+ssd, "
            "and behind these @ and an eviction rule"
        )
    if base in _STOCK:
        if tiers:
            raise ValueError(f"{base} is stock vLLM, which has no {tiers[-1]} tier")
        return _STOCK[base]
    if at:
        registry.eviction(rule)
    found = _connector(base)
    cpu, ssd = found.cpu or "cpu" in tiers, "ssd" in tiers
    return replace(found, name=name, cpu=cpu, ssd=ssd, eviction=rule or None)


def _connector(base: str) -> Server:
    """The server of a base that runs the connector, without its tiers."""
    if base == "lmcache":
        return Server(base, "lru", cpu=True, chunk=CHUNK)
    if base == CONNECTOR_ALONE:
        return Server(base, OURS)
    if base in (OURS, *OURS_VARIED):
        return Server(
            base,
            OURS,
            in_job_order=True,
            patient=base == PATIENT,
            knowing=base == KNOWING,
            open=base == OPEN,
            lacks=LACKING.get(base),
        )
    if ":" in base:
        registry.policy(base)
    return Server(base, base, order=Order.JOB if base in _JOB_ORDERED else Order.ARRIVAL)


class KnownGaps(Clairvoyant):
    """Knows every gap of a workload, by the job's name and the number of the turn."""

    def __init__(self, gaps_s: dict[tuple[str, int], float]) -> None:
        super().__init__()
        self._gaps_s = gaps_s

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        job = turn.job.name if turn.job is not None else ""
        self.gap_s = self._gaps_s.get((job, turn.turn), float("inf"))
        return super().decide(turn, costs)


class KnownJobs(JobForecast):
    """Knows how many turns every job of a workload takes, and what its longest context will be, to
    which it is taken to grow evenly.

    Args:
        contexts: tokens at the end of each of its turns, by the job's name.
        block: tokens of a block.
    """

    def __init__(self, contexts: Mapping[str, Sequence[int]], block: int) -> None:
        super().__init__()
        self._contexts = contexts
        self._block = block
        self._asked: dict[str, int] = {}

    def asked(self, job: str, turns: int) -> None:
        """Number of the job's turns that have arrived. Fewer have begun while one waits."""
        self._asked[job] = turns

    def ahead(self, job: JobKey, turns: int, grown: float) -> tuple[float, float]:
        contexts = self._contexts.get(job.name)
        if contexts is None:  # inferred, where clients say nothing
            return super().ahead(job, turns, grown)
        asked = self._asked.get(job.name, 1)
        left = len(contexts) - asked
        if left <= 0:
            return 0.0, 0.0
        more = max(contexts[asked:]) - contexts[asked - 1]  # it may be cut short on the way
        return max(0, more) / self._block / left, float(left)
