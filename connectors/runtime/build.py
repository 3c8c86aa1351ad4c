"""The parts of the scheduler half, each given what it asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.admission.gate import Admission
from tiered_kv.connectors.runtime.admission.queue import TIGHT_TOKENS, JobQueue
from tiered_kv.connectors.runtime.gaps.cost_model import Prices
from tiered_kv.connectors.runtime.gaps.gap_manager import Gaps
from tiered_kv.connectors.runtime.gaps.open_gaps import Waits
from tiered_kv.connectors.runtime.gaps.policy_state import PolicyKeeper
from tiered_kv.connectors.runtime.gaps.prefill_timer import PrefillClock
from tiered_kv.connectors.runtime.gaps.tool_reader import ToolReader
from tiered_kv.connectors.runtime.gaps.turn_log import Accounts
from tiered_kv.connectors.runtime.pages.dispatch import Exchange
from tiered_kv.connectors.runtime.pages.failed_restores import FailedRestores
from tiered_kv.connectors.runtime.pages.lower_tier import LowerTier
from tiered_kv.connectors.runtime.pages.lower_tiers import LowerTiers
from tiered_kv.connectors.runtime.pages.restores import Restores
from tiered_kv.connectors.runtime.pages.saves import Saves
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.pins.pressure import Room
from tiered_kv.errors import ConfigError
from tiered_kv.metrics import Counters
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.pages.tier_index import make_index
from tiered_kv.policies.base import TurnPolicy
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.cache.restore_mode import RestorePolicy
from tiered_kv.policies.jobs.lineage import Lineage
from tiered_kv.storage.registry import tiers_below
from tiered_kv.tiers import StoreId
from tiered_kv.trace import TraceWriter

from .base import BlockPool, EngineFacts
from .turn import Turn

ASSUMED_BANDWIDTH = 4e9
"""Bytes per second of a rank's copies until the first are measured."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Outside:
    """What the parts are given from outside.

    Attributes:
        facts: the engine. config: the operator's settings.
        policy: where a finished turn's KV waits. restores: sync or async.
        tools: reads tool calls; None if answers cannot be decoded.
        keeper: of ``policy``; owned by the parts.
        clock: monotonic seconds. wall: seconds since the epoch, for the trace.
    """

    facts: EngineFacts
    config: TierConfig
    policy: TurnPolicy
    restores: RestorePolicy
    tools: ToolReader | None
    keeper: PolicyKeeper
    clock: Clock
    wall: Clock


@dataclass(frozen=True, slots=True)
class Parts:
    """Those that hooks talk to.

    Attributes:
        admission: None if nothing is held.
        pool: the engine's block pool.
    """

    pool: BlockPool
    index: PageIndex
    planner: OrderBook
    tails: TailIndex
    prefills: PrefillClock
    restores: Restores
    saves: Saves
    tiers: LowerTiers
    pins: PinTable
    room: Room
    admission: Admission | None
    queue: JobQueue
    prices: Prices
    gaps: Gaps
    exchange: Exchange
    accounts: Accounts


def wire(
    given: Outside,
    pool: BlockPool,
    counters: Counters,
    turns: Mapping[str, Turn],
    running: Callable[[], int],
) -> Parts:
    """Make them.

    Args:
        pool: the engine's block pool.
        turns: those that live, by request. running: how many of them have blocks.

    Raises:
        ConfigError: the trace cannot be written.
    """
    facts, config, clock = given.facts, given.config, given.clock
    slots = facts.slots(config.cpu_bytes_per_rank(facts.ranks))
    specs = tiers_below(config) if slots else ()
    below = sum(spec.capacity_bytes or 0 for spec in specs)
    stored = below // max(1, facts.ranks * facts.slot_bytes)
    order = ByWorth(clock, lambda: prices.cpu_stay_s(), 2 * (slots + stored))
    index = PageIndex(slots, order)
    stores = {
        StoreId(spec.tier, group): spec for spec in specs for group in range(len(facts.groups))
    }
    indices = {store: make_index(spec, clock) for store, spec in stores.items()}
    page_bytes = [group.page_bytes for group in facts.groups]
    planner = OrderBook(index, facts.ranks, page_bytes, ASSUMED_BANDWIDTH, indices)
    tails = TailIndex()
    restores = Restores(facts, planner, tails, given.restores, counters)
    saves = Saves(facts, planner, tails, counters, pool)
    prefills = PrefillClock(ahead=facts.ahead)
    accounts = Accounts(counters, _trace(config), given.wall)

    usable = facts.num_blocks - 1  # vLLM keeps one as its null block
    pins = PinTable(pool, int(config.pin_fraction * usable))
    room = Room(facts, pins, saves, counters, pool, clock)
    admission = None
    if config.admission != "off":
        max_wait_s = config.admission_max_wait_s
        admission = Admission(
            facts, max_wait_s, pins, pool, slots, running, lambda job: waits.forecast(job), clock
        )
    queue = JobQueue(turns, admission, pins, pool, TIGHT_TOKENS // facts.block_size, clock)
    prices = Prices(
        facts,
        planner,
        prefills.fit,
        pins,
        pool,
        admission.demand_with_pin if admission is not None else None,
        running,
        clock,
    )
    tiers = LowerTiers(
        [
            LowerTier(
                store,
                spec,
                facts,
                planner,
                counters.of_tier(spec.tier),
                lambda key: order.chance(key, math.inf),
                clock,
            )
            for store, spec in stores.items()
        ],
        facts,
        planner,
        tails,
        counters,
        lambda block_hash: pool.cached(block_hash) is not None,
        clock,
    )
    waits = Waits(given.policy, prices, order, clock)
    gaps = Gaps(
        Lineage(facts.block_size),
        waits,
        prices,
        pins,
        planner,
        tiers,
        pool,
        given.tools,
        given.keeper,
        accounts,
        counters,
        admission.over if admission is not None else lambda _: None,
        clock,
    )
    failed_restores = FailedRestores(pool, saves)
    exchange = Exchange(planner, saves, restores, tiers, failed_restores, turns, clock)
    return Parts(
        pool,
        index,
        planner,
        tails,
        prefills,
        restores,
        saves,
        tiers,
        pins,
        room,
        admission,
        queue,
        prices,
        gaps,
        exchange,
        accounts,
    )


def _trace(config: TierConfig) -> TraceWriter | None:
    if config.trace is None:
        return None
    try:
        return TraceWriter(config.trace)
    except OSError as error:
        raise ConfigError(
            f"TIERED_KV_TRACE={config.trace} cannot be written ({error.strerror or error}): "
            "give a file that can, or leave it out."
        ) from error
