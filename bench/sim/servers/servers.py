"""Servers to compare: policies by name, and models of other systems.

A name is a base and the tiers below VRAM: ``occupancy``, ``occupancy+cpu``, ``occupancy+cpu+ssd``.
``@`` and a value of ``TIERED_KV_EVICTION`` may follow: ``occupancy+cpu@lru``. Bases that are values
of ``TIERED_KV_POLICY``, or any ``module:Class``, run the connector. The other bases are:

- ``fcfs``: stock vLLM, requests in order of arrival.
- ``job-fcfs``: stock vLLM, requests in the order in which their jobs arrived.
- ``autellix``, ``thunderagent``: see ``arrivals``.
- ``lmcache``: CPU memory, filled as KV is computed and evicted in LRU order; restores in chunks of
  256 tokens, before the step that needs them.
- ``clairvoyant``: knows each gap and pins for exactly that time.
- ``infinite``: stock vLLM with a pool that holds all KV.
- ``in-batches``: stock vLLM with static batches, see ``schedulers``.
- ``reach``: ``infinite``, but no more contexts run concurrently than the machine's pool holds.
  ``job-reach``: the same, in the order in which jobs arrived.

``occupancy`` runs the connector under ``ContinuumScheduler``, and ``occupancy-alone`` runs it under
vLLM's own scheduler. ``occupancy-patient`` assumes clients that never time out, as ``thunderagent``
requires. ``occupancy-open`` holds no job back, ``occupancy-unpinned`` pins nothing,
``occupancy-late`` promotes nothing before a job returns, and ``occupancy-blind`` makes the same
forecast for every gap. ``occupancy-orphans`` does not know which job started a sub-agent.
``occupancy-knowing`` knows each job's number of turns and its longest context. ``continuum`` and
``continuum-fixed`` serve requests in job order, as in their paper. ``lru+cpu`` is plain offloading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tiered_kv.policies import registry
from tiered_kv.policies.base import TurnPolicy
from tiered_kv.policies.registry import POLICIES

from .arrivals import Order
from .foresight import Blind, Late, Unpinned

CHUNK = 256
"""Chunk size of LMCache, tokens."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to compare.

    Attributes:
        name: see the module docstring.
        policy: the connector's policy; None for stock vLLM.
        cpu, ssd: True if the server has these tiers.
        order: order in which requests are served.
        infinite: True if the pool never evicts.
        within_reach: True if running requests must still fit into the machine's pool.
        gated: True to pause whole programs, as in ThunderAgent.
        chunk: tokens per chunk, if whole chunks are restored before a step; 0 restores as tiered-kv
            does.
        in_job_order: True to run ``ContinuumScheduler``.
        patient: True if a job may be held back for any length of time.
        open: True if no job is held back.
        variant: creates the policy that replaces ``policy``; None uses the policy itself.
        in_batches: True for static batches.
        knowing: True if admission knows each job's number of turns and its longest context.
        orphans: True if clients do not name the parents of sub-agents.
        eviction: eviction rule of CPU memory; None for the default.
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
    variant: Callable[[], TurnPolicy] | None = None
    in_batches: bool = False
    knowing: bool = False
    orphans: bool = False
    eviction: str | None = None

    @property
    def outside(self) -> frozenset[str]:
        """Modules of the policy and the eviction rule, if these come from other packages."""
        parts = (self.policy or "", self.eviction or "")
        return frozenset(part.partition(":")[0] for part in parts if ":" in part)


CLAIRVOYANT = "clairvoyant"
_STOCK = {
    one.name: one
    for one in (
        Server("fcfs"),
        Server("job-fcfs", order=Order.JOB),
        Server("autellix", order=Order.ATTAINED),
        Server("thunderagent", gated=True),
        Server("in-batches", in_batches=True),
        Server("infinite", infinite=True),
        Server("reach", infinite=True, within_reach=True),
        Server("job-reach", order=Order.JOB, infinite=True, within_reach=True),
    )
}
_OURS = Server("occupancy", "occupancy", in_job_order=True)
_CONNECTOR = {
    one.name: one
    for one in (
        Server("lmcache", "lru", cpu=True, chunk=CHUNK),
        Server(CLAIRVOYANT, CLAIRVOYANT),
        Server("occupancy-alone", "occupancy"),
        replace(_OURS, name="occupancy-patient", patient=True),
        replace(_OURS, name="occupancy-knowing", knowing=True),
        replace(_OURS, name="occupancy-open", open=True),
        replace(_OURS, name="occupancy-unpinned", variant=Unpinned),
        replace(_OURS, name="occupancy-late", variant=Late),
        replace(_OURS, name="occupancy-blind", variant=Blind),
        replace(_OURS, name="occupancy-orphans", orphans=True),
        *(Server(name, name) for name in POLICIES if name != _OURS.name),
        _OURS,
        Server("continuum", "continuum", order=Order.JOB),
        Server("continuum-fixed", "continuum-fixed", order=Order.JOB),
    )
}
BASES = (*_STOCK, *_CONNECTOR)


def server(name: str) -> Server:
    """Return the server with this name; see the module docstring.

    Raises:
        ValueError: there is no such server, or stock vLLM cannot have the tiers.
        ConfigError: the eviction rule, or a policy given as ``module:Class``, does not exist.
    """
    tiered, at, rule = name.partition("@")
    base, *tiers = tiered.split("+")
    ours = base in BASES or ":" in base
    if not ours or tiers not in ([], ["cpu"], ["cpu", "ssd"]) or (at and not tiers):
        known = ", ".join(BASES)
        raise ValueError(
            f"unknown server {name!r}: use one of {known}, or module:Class. Append +cpu or "
            "+cpu+ssd to add tiers, and then @ and a name to choose an eviction rule"
        )
    if base in _STOCK:
        if tiers:
            raise ValueError(f"{base} is stock vLLM, which has no {tiers[-1]} tier")
        return _STOCK[base]
    if at:
        registry.eviction(rule)
    if ":" in base:
        registry.policy(base)
    found = _CONNECTOR.get(base, Server(base, base))
    cpu, ssd = found.cpu or "cpu" in tiers, "ssd" in tiers
    return replace(found, name=name, cpu=cpu, ssd=ssd, eviction=rule or None)
