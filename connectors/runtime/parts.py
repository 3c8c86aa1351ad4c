"""Two groups of the scheduler half's components: one keeps pages, the other allots VRAM."""

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
    """Pages outside VRAM: where they are, and what is ordered of them.

    Attributes:
        names: names of requests' pages.
        order: order of eviction from CPU memory.
        finder: prefixes that can be had.
        settlements: word to the workers, where CPU memory outlives the engine.
        dispatch: orders out, reports in.
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
    """Blocks of VRAM: who has them, who waits for them, and who gives way.

    Attributes:
        boundaries: blocks at the ends of prompts, which pins take over.
        pressure: has pins give way.
        gate: holds new jobs back.
        fairness: waits and shares of the live requests.
        queue: order of requests.
    """

    pins: PinTable
    boundaries: BoundaryBlocks
    pressure: PinPressure
    gate: Admission
    fairness: Fairness
    queue: JobQueue
