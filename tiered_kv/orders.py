"""Orders and reports, which pass between the scheduler half and the worker half.

The scheduler half decides where each page goes, and sends one list of orders per step. The worker
half moves the bytes and sends reports back. Orders and reports are plain frozen data, so that they
pickle compactly and a simulator can replace either side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NewType, TypeAlias, TypeVar

from .keys import PageKey
from .tiers import StoreId

OrderId = NewType("OrderId", int)
T = TypeVar("T")


class Outbox(list[T]):
    """Items for the workers that have not been sent yet."""

    def take(self) -> tuple[T, ...]:
        """Remove all items and return them."""
        items = tuple(self)
        self.clear()
        return items


class OrderKind(Enum):
    """Type of an order. The values are its name in the status and its name in the trace of
    steps."""

    SAVE = "save", "save"
    LOAD = "restore", "load"
    PACK = "compress", "pack"
    DEMOTE = "demote", "demote"
    PROMOTE = "promote", "promote"
    LOOK_UP = "look_up", "lookup"
    EXPORT = "write_snapshot", "export"
    IMPORT = "read_snapshot", "import"

    def __init__(self, status_name: str, trace_name: str) -> None:
        self.status_name = status_name
        self.trace_name = trace_name


class RestoreMode(Enum):
    """Mode of a restore: whether it delays the step, or runs while the model computes."""

    SYNC = "sync"
    """Restore before this step's forward pass, which waits for the restore."""
    ASYNC = "async"
    """Restore while forward passes run; the request is scheduled once the restore is done."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy ``blocks[i]`` of VRAM to ``slots[i]`` of the CPU pool, after this step's forward pass.

    Attributes:
        group: position of the pages' group among the engine's groups.
        keys: keys of the pages. They identify the contents of the worker's slots, which are
            flushed when the engine stops.
    """

    kind: ClassVar[OrderKind] = OrderKind.SAVE

    order_id: OrderId
    group: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class PackOrder:
    """Compress the pages in ``slots`` of the CPU pool contiguously into the first of these slots.
    The bundle replaces every bundle whose slots it fills. The report contains the number of slots
    that the bundle fills.

    Attributes:
        group: position of the pages' group among the engine's groups.
        keys: keys of the pages. Later orders refer to a page by its key and the bundle's first
            slot.
    """

    kind: ClassVar[OrderKind] = OrderKind.PACK

    order_id: OrderId
    group: int
    slots: tuple[int, ...]
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy ``slots[i]`` of the CPU pool to ``blocks[i]`` of VRAM for one request.

    Attributes:
        group: position of the pages' group among the engine's groups.
        slots: slot of each page; for a cold page, the ``cold_place`` of its bundle, which is
            negative.
        cold: keys of the cold (compressed) pages, in the order of ``slots``.
        more: True if further orders for the request follow in later steps, because it is restored
            in pieces.
    """

    kind: ClassVar[OrderKind] = OrderKind.LOAD

    order_id: OrderId
    group: int
    request_id: str
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    mode: RestoreMode
    more: bool = False
    cold: tuple[PageKey, ...] = ()


@dataclass(frozen=True, slots=True)
class FailLoad:
    """Report blocks as failed, because a restore that the engine expects, or the last pieces of a
    restore, cannot be ordered. The tokens of the blocks are recomputed. No further order for the
    request follows."""

    request_id: str
    blocks: tuple[int, ...]
    mode: RestoreMode


@dataclass(frozen=True, slots=True)
class DemoteOrder:
    """Write ``slots[i]`` of the CPU pool to a store as page ``keys[i]``.

    The slots do not change until the order is reported. The worker's I/O thread starts the order at
    ``due`` (time on the scheduler half's clock; immediately if 0), since an idle engine runs no
    hook.

    Attributes:
        runs: for each key, the first page of its run of consecutive pages; empty if the store does
            not need runs.
    """

    kind: ClassVar[OrderKind] = OrderKind.DEMOTE

    order_id: OrderId
    store: StoreId
    keys: tuple[PageKey, ...]
    slots: tuple[int, ...]
    due: float
    runs: tuple[PageKey, ...] = ()


@dataclass(frozen=True, slots=True)
class PromoteOrder:
    """Read page ``keys[i]`` from a store into ``slots[i]`` of the CPU pool, which is reserved for
    the page.

    ``due`` has the same meaning as in ``DemoteOrder``.
    """

    kind: ClassVar[OrderKind] = OrderKind.PROMOTE

    order_id: OrderId
    store: StoreId
    keys: tuple[PageKey, ...]
    slots: tuple[int, ...]
    due: float


@dataclass(frozen=True, slots=True)
class LookupOrder:
    """Look up whether a store has page ``keys[i]``. Missing pages are reported as failed.

    Attributes:
        deadline_s: maximum time for the answer, seconds. Pages without an answer by then are
            reported as failed.
        runs: as in ``DemoteOrder``.
    """

    kind: ClassVar[OrderKind] = OrderKind.LOOK_UP

    order_id: OrderId
    store: StoreId
    keys: tuple[PageKey, ...]
    deadline_s: float
    runs: tuple[PageKey, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextPage:
    """A page of a context. ``block`` is its position in the block table of group ``group``."""

    group: int
    block: int
    key: PageKey


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """Write pages of the CPU pool into the snapshot that is being created in ``folder``.

    Page ``keys[i]`` is in ``slots[i]``. It belongs to block ``blocks[i]`` of its context, in group
    ``groups[i]``. The slots do not change until the order is reported.

    Attributes:
        slots: slot of each page; for a cold page, the ``cold_place`` of its bundle, which is
            negative.
    """

    kind: ClassVar[OrderKind] = OrderKind.EXPORT

    order_id: OrderId
    folder: str
    groups: tuple[int, ...]
    blocks: tuple[int, ...]
    keys: tuple[PageKey, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """Read pages of the snapshot at ``path`` into the CPU pool. The page of block ``blocks[i]`` of
    its context, in group ``groups[i]``, is read into ``slots[i]`` as page ``keys[i]``."""

    kind: ClassVar[OrderKind] = OrderKind.IMPORT

    order_id: OrderId
    path: str
    groups: tuple[int, ...]
    blocks: tuple[int, ...]
    keys: tuple[PageKey, ...]
    slots: tuple[int, ...]


SnapshotOrder: TypeAlias = ExportOrder | ImportOrder
"""Orders that concern snapshots of jobs."""
StoreOrder: TypeAlias = DemoteOrder | PromoteOrder | LookupOrder
"""Orders that a tier's store carries out."""
Order: TypeAlias = SaveOrder | LoadOrder | PackOrder | StoreOrder | SnapshotOrder


@dataclass(frozen=True, slots=True)
class OrderReport:
    """Result of an order on ``ranks`` ranks.

    Attributes:
        ranks: number of ranks that this report covers.
        failed: indices of the order's pages whose copy failed on any of these ranks.
        nbytes: bytes of the pages moved by the slowest rank.
        seconds: time that the slowest rank spent copying, seconds; 0 if unknown.
        slots: number of slots that the order's bundle fills, on the rank where it fills most.
    """

    ranks: int
    failed: frozenset[int]
    nbytes: int
    seconds: float
    slots: int = 0

    def merge(self, other: OrderReport) -> OrderReport:
        """Return this report merged with a report of the same order from other ranks."""
        slower = max(self, other, key=lambda one: (one.seconds, -one.nbytes))
        return OrderReport(
            self.ranks + other.ranks,
            self.failed | other.failed,
            slower.nbytes,
            slower.seconds,
            max(self.slots, other.slots),
        )
