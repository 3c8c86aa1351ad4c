"""Builds the components of the scheduler half, in three groups, and wires them together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiered_kv import __version__
from tiered_kv.config import GIB
from tiered_kv.connectors.runtime.admission.gate import Admission, Room
from tiered_kv.connectors.runtime.admission.queue import JobQueue
from tiered_kv.connectors.runtime.between_turns.cost_model import CostModel, PrefillTimer
from tiered_kv.connectors.runtime.between_turns.open_gaps import OpenGaps
from tiered_kv.connectors.runtime.between_turns.turn_ends import TurnEnds
from tiered_kv.connectors.runtime.between_turns.turn_log import TurnLog, TurnTrace
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import LowerTier
from tiered_kv.connectors.runtime.observe.observation import VirtualDispatch
from tiered_kv.connectors.runtime.pages.cpu_compression import Compression
from tiered_kv.connectors.runtime.pages.dispatch import OrderDispatch, Settlements
from tiered_kv.connectors.runtime.pages.hits import HitFinder, PageNames
from tiered_kv.connectors.runtime.pages.pieces import RestorePieces
from tiered_kv.connectors.runtime.pages.promotions import Promotions
from tiered_kv.connectors.runtime.pages.restores import Restores
from tiered_kv.connectors.runtime.pages.saves import Saves
from tiered_kv.connectors.runtime.pins.boundary_blocks import BoundaryBlocks
from tiered_kv.connectors.runtime.pins.ghost_blocks import GhostBoundaries, GhostPins, GhostPool
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.pins.pressure import PinPressure
from tiered_kv.connectors.runtime.steps.step_trace import StepTrace
from tiered_kv.errors import ConfigError
from tiered_kv.metrics import Counters
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.pages.tier_index import make_index
from tiered_kv.policies.pricing.estimators import PrefillFit
from tiered_kv.storage.registry import tiers_below
from tiered_kv.tiers import StoreId
from tiered_kv.trace.rotation import steps_of
from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.trace_writer import TraceWriter

from .base import BlockPool
from .dependencies import Dependencies
from .engine_state import EngineState
from .fairness import Fairness
from .parts import AdmissionGroup, Pages
from .turn import LiveTurns

ASSUMED_BANDWIDTH = 4e9
"""Assumed speed of a rank's copies until the first copies are measured, bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapGroup:
    """Components that work between turns: forecasts, costs and decisions.

    Attributes:
        prefills: measures prefills, for ``costs``.
    """

    prefills: PrefillTimer
    costs: CostModel
    manager: TurnEnds
    log: TurnLog


def build_engine(deps: Dependencies, pool: BlockPool) -> EngineState:
    """Build the state that all components share. In observe mode the components get a simulated
    pool, so that the engine's blocks are not touched."""
    return EngineState(
        facts=deps.facts,
        pool=GhostPool(pool, deps.clock) if deps.config.observes else pool,
        turns=LiveTurns(),
        counters=Counters(),
        clock=deps.clock,
    )


def build_pages(deps: Dependencies, engine: EngineState) -> Pages:
    """Build the components that keep pages outside VRAM, and move them."""
    facts, config, clock = engine.facts, deps.config, engine.clock
    slots = facts.slots(config.cpu_bytes_per_rank(facts.ranks))
    specs = tiers_below(config) if slots else ()
    below = sum(spec.capacity_bytes or 0 for spec in specs)
    stored = below // max(1, facts.ranks * facts.slot_bytes)
    order = deps.eviction(clock, 2 * (slots + stored))
    index = PageIndex(slots, order, clock)
    stores = {
        StoreId(spec.tier, group): spec for spec in specs for group in range(len(facts.groups))
    }
    indices = {store: make_index(spec, clock) for store, spec in stores.items()}
    page_bytes = [group.page_bytes for group in facts.groups] or [0]  # no groups: no copies
    book = OrderBook(index, facts.ranks, page_bytes, ASSUMED_BANDWIDTH, indices)
    tails = TailIndex(deps.notebook)
    finder = HitFinder(facts, tails)
    restores = Restores(engine, book, finder, deps.restore_policy, deps.step_timer)
    saves = Saves(engine, book, tails)
    lower = {
        store: LowerTier(
            store,
            spec,
            engine,
            book,
            chance=lambda key: order.return_chance(key, math.inf),
            group_of=deps.fingerprints.group_of,
            lasting=deps.fingerprints.base(store.group).lasting,
        )
        for store, spec in stores.items()
    }
    tiers = Tiers(lower, book, most_after=slots)
    index.unsaved = tiers.unsaved if tiers.own else None
    settlements = Settlements(index, wanted=config.cpu_path is not None)
    pieces = RestorePieces(engine, tiers, book, restores)
    return Pages(
        index=index,
        names=PageNames(facts, deps.fingerprints, slots),
        order=order,
        book=book,
        tails=tails,
        finder=finder,
        settlements=settlements,
        restores=restores,
        saves=saves,
        pieces=pieces,
        tiers=tiers,
        promotions=Promotions(engine, tiers, book, finder),
        dispatch=(VirtualDispatch if config.observes else OrderDispatch)(
            engine,
            book,
            saves,
            restores,
            pieces,
            Compression(engine, book, deps.fingerprints.group_of),
            tiers,
            settlements,
        ),
    )


def _blocks_below(deps: Dependencies) -> float:
    """Return the capacity of the largest tier below CPU memory, in blocks; 0 without lower
    tiers."""
    block_bytes = max(1, deps.facts.slot_bytes * deps.facts.ranks)
    sizes = (spec.capacity_bytes for spec in tiers_below(deps.config))
    blocks = (math.inf if size is None else size / block_bytes for size in sizes)
    return max(blocks, default=0.0)


def build_admission(
    deps: Dependencies, engine: EngineState, pages: Pages, gaps: OpenGaps, fit: PrefillFit
) -> AdmissionGroup:
    """Build the components that divide VRAM among requests and pins.

    Args:
        fit: estimates prefill times, seconds.
    """
    facts, config, pool = engine.facts, deps.config, engine.pool
    budget = int(config.pin_fraction * facts.usable_blocks)
    pins, boundaries = PinTable(pool, budget), BoundaryBlocks(facts, pool)
    if isinstance(pool, GhostPool):
        pins, boundaries = GhostPins(pool, budget), GhostBoundaries(facts, pool)
    gate = Admission(
        engine,
        config.admission_max_wait_s,
        pins,
        room=Room(facts.usable_blocks, pages.index.num_slots, _blocks_below(deps)),
        gap_forecast=gaps.forecast,
        job_forecast=deps.job_forecast,
        fit=fit,
        counts=config.admission != "off",
    )
    fairness = Fairness(engine, config.admission_max_wait_s)
    return AdmissionGroup(
        pins=pins,
        boundaries=boundaries,
        pressure=PinPressure(engine, pins, fairness, boundaries, pages.saves),
        gate=gate,
        fairness=fairness,
        queue=JobQueue(engine, gate, pins, fairness),
    )


def build_gaps(
    deps: Dependencies,
    engine: EngineState,
    pages: Pages,
    admission: AdmissionGroup,
    gaps: OpenGaps,
    prefills: PrefillTimer,
) -> GapGroup:
    """Build the components that work between turns.

    Raises:
        ConfigError: the trace cannot be written.
    """
    trace, steps = _traces(deps, engine, pages, admission)
    log = TurnLog(engine.counters, trace, gaps, engine.turns, engine.clock, steps)
    admission.pins.on_end = log.pin_ended
    jobs = admission.gate.jobs if deps.config.admission != "off" else None
    costs = CostModel(engine, pages.book, prefills.fit, admission.pins, jobs)
    manager = TurnEnds(deps, engine, pages, admission, gaps, costs, log)
    return GapGroup(prefills=prefills, costs=costs, manager=manager, log=log)


def _traces(
    deps: Dependencies, engine: EngineState, pages: Pages, admission: AdmissionGroup
) -> tuple[TurnTrace, StepTrace | None]:
    """Create the traces of turns and of steps. Without a trace path the turn trace writes
    nothing."""
    path = deps.config.trace
    of_turns = _writer(path, deps) if path is not None else None
    turns = TurnTrace(of_turns, deps.facts.replica, deps.clock, deps.wall, pages.order.waiting_job)
    if path is None:
        return turns, None
    try:
        of_steps = _writer(steps_of(path), deps) if deps.config.trace_steps else None
    except ConfigError:
        turns.close()
        raise
    steps = StepTrace(engine, pages, admission, of_steps, turns.preemptions, deps.wall)
    pages.index.on_evicted = partial(turns.evicted, "cpu")
    for store, tier in pages.tiers.items():
        tier.on_evicted = partial(turns.evicted, str(store.tier))
    return turns, steps


def _writer(path: Path, deps: Dependencies) -> TraceWriter:
    try:
        return TraceWriter(path, _header(deps))
    except OSError as error:
        raise ConfigError(
            f"TIERED_KV_TRACE={path} cannot be written ({error.strerror or error}): set a "
            "writable file, or unset it."
        ) from error


def _header(deps: Dependencies) -> TraceHeader:
    facts, config = deps.facts, deps.config
    below = {str(spec.tier): spec.capacity_bytes or 0 for spec in tiers_below(config)}
    return TraceHeader(
        version=__version__,
        started=deps.wall(),
        clock=deps.clock(),
        model=facts.model,
        policy=config.policy,
        replica=facts.replica,
        block_size=facts.block_size,
        vram_blocks=facts.usable_blocks,
        tiers_bytes={"cpu": int(config.cpu_gib * GIB), **below},
        mode=config.mode.value,
        page_bytes=sum(group.page_bytes for group in facts.groups) * facts.ranks,
        groups=tuple(str(group.reach.kind.value) for group in facts.groups),
        step_tokens=facts.limits.step_tokens,
        running=facts.limits.running,
        context_tokens=facts.limits.context_tokens,
        job_order=facts.limits.job_order,
        admission=config.admission,
        eviction=config.eviction,
    )
