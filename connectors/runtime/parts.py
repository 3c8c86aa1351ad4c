"""Two groups of the scheduler half's components: pages outside VRAM, and admission to VRAM."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.connectors.runtime.admission.gate import Admission
from tiered_kv.connectors.runtime.admission.queue import JobQueue
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.pages.dispatch import OrderDispatch, Settlements
from tiered_kv.connectors.runtime.pages.hits import HitFinder, PageNames
from tiered_kv.connectors.runtime.pages.pieces import RestorePieces
from tiered_kv.connectors.runtime.pages.promotions import Promotions
from tiered_kv.connectors.runtime.pages.restores import Restores
from tiered_kv.connectors.runtime.pages.saves import Saves
from tiered_kv.connectors.runtime.pins.boundary_blocks import BoundaryBlocks
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.pins.pressure import PinPressure
from tiered_kv.pages.base import EvictionOrder
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.partial_blocks import TailIndex

from .fairness import Fairness


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Components that keep pages outside VRAM and issue the orders that move them.

    Attributes:
        names: page keys of requests.
        order: eviction order of CPU memory.
        finder: finds prefixes that can be restored.
        settlements: notifications of finished orders for the workers, if CPU memory outlives the
            engine.
        dispatch: sends orders and handles reports.
    """

    index: PageIndex
    names: PageNames
    order: EvictionOrder
    book: OrderBook
    tails: TailIndex
    finder: HitFinder
    settlements: Settlements
    restores: Restores
    pieces: RestorePieces
    saves: Saves
    tiers: Tiers
    promotions: Promotions
    dispatch: OrderDispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionGroup:
    """Components that divide VRAM among running requests, waiting requests and pins.

    Attributes:
        pins: blocks of jobs between their turns that stay allocated.
        boundaries: holds blocks at the ends of prompts, which pins take over.
        pressure: releases pins when requests need their blocks.
        gate: holds new jobs back.
        fairness: bounds waits and divides VRAM equally among clients.
        queue: order in which requests are admitted.
    """

    pins: PinTable
    boundaries: BoundaryBlocks
    pressure: PinPressure
    gate: Admission
    fairness: Fairness
    queue: JobQueue
