"""KV events for routers: which pages the tiers outside VRAM have, block by block.

A router credits an engine for blocks whose tokens it knows, so a page is reported once a request
has provided its *name*: its tokens and its parent. Names are kept for pages that some tier has or
that are being saved.

Events are derived from state, not queued: the indices report which pages may have changed, and
``take`` compares what the tiers have with what was reported last. So a page that changes often
between two steps takes one entry, no change can be lost, and the entries are bounded by the names.
If there are too many names, the oldest pages are reported as removed, which every consumer
understands. A gap in the event sequence or an AllBlocksCleared event would also discard the credit
for blocks in VRAM.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import filterfalse, groupby, islice, repeat
from typing import NamedTuple, TypeAlias

from tiered_kv.config import EventConsumer
from tiered_kv.keys import DIGEST_BYTES, PageKey
from tiered_kv.page_group import KvKind
from tiered_kv.pages.base import PageState
from tiered_kv.pages.tier_index import TierPages

from .dependencies import Dependencies
from .engine_state import EngineState
from .parts import Pages
from .turn import Turn

PAGES_A_STEP = 1024
"""Maximum number of pages that ``take`` compares, which takes about a millisecond. ``take`` returns
at most one event for each page and tier, so that a step stays below the 4,096 events that
vllm-router accepts."""
SEARCHED_A_STEP = 4096
"""Maximum number of pages of admitted prompts that are searched for pages without a name."""
MOST_NAMED = 1 << 20
"""Maximum number of names, about 300 MB."""
MOST_SEARCHES = 1024
"""Maximum number of admitted turns whose prompts wait to be searched. The oldest is dropped."""
BLOCKS_TOGETHER = 32
"""Maximum number of blocks whose names share memory, which is freed with the last of them."""


class Place(NamedTuple):
    """A tier outside VRAM, as routers see it.

    Attributes:
        storage: False for CPU memory.
        shared: True if the pages are not on this engine's machine.
        owner: name of the tier; None for CPU memory, or if the consumer misreads names.
    """

    storage: bool = False
    shared: bool = False
    owner: str | None = None


@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks of a context that a tier has now.

    Attributes:
        group: position of the page group.
        hashes: the engine's hash of each block.
        parent: hash of the block before the first of these blocks; None if they start the context.
        tokens: tokens of all blocks.
        adapter: the engine's object for the LoRA adapter; None for the base model.
        extra_keys: the engine's extra key of each block; None if no block has one.
    """

    place: Place
    group: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    adapter: object | None
    extra_keys: list[object] | None


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks of a page group that a tier no longer has."""

    place: Place
    group: int
    hashes: list[bytes]


KvEvent: TypeAlias = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """Consecutive blocks of a context, with the data that identifies them.

    Attributes:
        reported: for each block, the tiers in which consumers expect it, one bit each.
    """

    group: int
    keys: Sequence[PageKey]
    parent: bytes | None
    tokens: array[int]
    block_size: int
    adapter: object | None
    extra_keys: Sequence[object] | None
    reported: bytearray

    def hashes(self, first: int, stop: int) -> list[bytes]:
        """Return the engine's hashes of the blocks from ``first`` up to, but excluding,
        ``stop``."""
        return [key[DIGEST_BYTES:] for key in self.keys[first:stop]]


@dataclass(slots=True)
class _Search:
    """A prompt whose pages up to block ``at`` of a group were searched for pages without names."""

    turn: Turn
    group: int = 0
    at: int = 0


_NOWHERE = (PageState.MISSING, PageState.BEING_WRITTEN)


class KvEvents:
    """Names of pages, and the changes that were not reported yet. Used on the scheduler's thread.

    Args:
        consumer: ``VLLM_ROUTER`` reports only what its version 0.1 credits correctly: for each
            block the fastest of this engine's own tiers, only in the engine's first group and only
            if that group keeps all tokens, and no blocks with a cache salt, an adapter or inputs
            other than text.
    """

    def __init__(self, engine: EngineState, pages: Pages, consumer: EventConsumer) -> None:
        self._facts = engine.facts
        self._counters = engine.counters
        self._pages = pages
        self._index = pages.index
        self._narrowed = consumer is EventConsumer.VLLM_ROUTER
        self._names: dict[PageKey, _Text] = {}
        self._changed: dict[PageKey, None] = {}  # a subset of the names
        self._dropped = set[PageKey]()  # to be reported as removed, and their names forgotten
        self._searches = deque[_Search](maxlen=MOST_SEARCHES)
        self._error: Exception | None = None
        shared = {store.tier: tier.spec.shared for store, tier in pages.tiers.items()}
        # vllm-router counts every block with an owner as a block of an external store.
        places = {
            tier: Place(True, is_shared, None if self._narrowed else str(tier))
            for tier, is_shared in shared.items()
            if not (self._narrowed and is_shared)
        }
        self._places = [Place(), *dict.fromkeys(places.values())]
        bits = {tier: 1 << self._places.index(place) for tier, place in places.items()}
        self._stores: list[list[tuple[int, TierPages]]] = [
            [
                (bits[store.tier], tier.pages)
                for store, tier in pages.tiers.items()
                if store.group == at and store.tier in bits
            ]
            for at in range(len(self._facts.groups))
        ]
        self._reported_groups = [
            not self._narrowed or (group.index == 0 and group.reach.kind is KvKind.FULL)
            for group in self._facts.groups
        ]
        pages.index.on_changed = self._on_changed
        for one in pages.tiers.values():
            one.pages.index.on_changed = self._on_changed
        pages.saves.on_filled = self._on_filled
        pages.dispatch.awaits_demotions = True

    @property
    def pending(self) -> bool:
        """True if ``take`` has work left."""
        return bool(self._changed or self._searches or self._error)

    # -- names ----------------------------------------------------------------------------

    def on_admitted(self, turn: Turn) -> None:
        """Queue a search of a turn's prompt for pages that tiers have and that have no name, such
        as pages that the previous engine left behind."""
        if self._is_reported(turn):
            self._searches.append(_Search(turn))

    def _on_filled(self, turn: Turn, group: int, blocks: range) -> None:
        """Name pages that are about to be saved. Never raises, because the save must continue;
        ``take`` raises the error."""
        if self._reported_groups[group] and self._is_reported(turn):
            try:
                self._name(turn, group, blocks)
            except Exception as error:
                self._error = error

    def _is_reported(self, turn: Turn) -> bool:
        request = turn.request
        return not self._narrowed or (
            request.text_only and request.adapter is None and request.cache_salt is None
        )

    def _search(self) -> None:
        left = SEARCHED_A_STEP
        while self._searches and left > 0:
            search = self._searches[0]
            turn, group, at = search.turn, search.group, search.at
            if not turn.pages.fingerprints or group >= len(self._reported_groups):
                self._searches.popleft()
                continue
            keys = turn.page_keys(group) if self._reported_groups[group] else ()
            part = keys[at : at + left]
            if not part:
                search.group, search.at = group + 1, 0
                continue
            left -= len(part)
            search.at += len(part)
            if there := self._unnamed(part, group):
                blocks = [block for block, key in enumerate(part, at) if key in there]
                self._name(turn, group, blocks)

    def _unnamed(self, keys: Sequence[PageKey], group: int) -> set[PageKey]:
        """Return those pages that some tier has and that have no name."""
        unnamed = dict.fromkeys(filterfalse(self._names.__contains__, keys))
        absent: Collection[PageKey] = self._index.missing(unnamed).keys() if unnamed else ()
        for _, pages in self._stores[group]:
            absent = [*filterfalse(pages.index.lists, absent)]
        return unnamed.keys() - absent if len(absent) < len(unnamed) else set()

    def _name(self, turn: Turn, group: int, blocks: Sequence[int]) -> None:
        """Name those of a turn's ``blocks`` that have no name yet."""
        names, keys = self._names, turn.page_keys(group)
        if blocks and blocks[-1] >= len(keys):
            blocks = [block for block in blocks if block < len(keys)]
        fresh = [block for block in blocks if keys[block] not in names]
        for first, stop in _runs(fresh):
            text = self._text(turn, group, first, stop)
            names.update(dict.fromkeys(text.keys, text))
            self._changed.update(dict.fromkeys(text.keys))
        if (over := len(names) - MOST_NAMED) > 0:
            self._drop([*islice(names, over)])

    def _text(self, turn: Turn, group: int, first: int, stop: int) -> _Text:
        request, keys = turn.request, turn.page_keys(group)
        size = self._facts.groups[group].block_size
        return _Text(
            group,
            keys[first:stop],
            keys[first - 1][DIGEST_BYTES:] if first else None,
            array("i", request.all_token_ids[first * size : stop * size]),
            size,
            request.adapter,
            request.extra_keys(first * size, size, stop - first),
            bytearray(stop - first),
        )

    def _drop(self, oldest: Sequence[PageKey]) -> None:
        keys = [*filterfalse(self._dropped.__contains__, oldest)]
        self._dropped.update(keys)
        self._changed.update(dict.fromkeys(keys))
        self._counters.add("kv_event_pages_dropped", len(keys))

    # -- changes --------------------------------------------------------------------------

    def _on_changed(self, keys: Collection[PageKey]) -> None:
        """Queue these pages, if they have names, for comparison by ``take``."""
        self._changed.update(zip(filter(self._names.__contains__, keys), repeat(None)))

    def on_cleared(self) -> None:
        """Report all pages once more, because the engine has told consumers to forget everything
        that it has reported, in every tier."""
        for text in set(self._names.values()):
            text.reported[:] = bytes(len(text.keys))
        self._changed.update(dict.fromkeys(self._names))

    def stop(self) -> None:
        """Observe nothing from now on, and forget all names."""
        self._pages.index.on_changed = self._pages.saves.on_filled = None
        for tier in self._pages.tiers.values():
            tier.pages.index.on_changed = None
        self._pages.dispatch.awaits_demotions = False
        self._names.clear()
        self._changed.clear()
        self._dropped.clear()
        self._searches.clear()

    def take(self) -> Sequence[KvEvent]:
        """Return events for the next changes.

        Raises:
            Exception: a page could not be named. From then on events are incomplete.
        """
        if self._error is not None:
            raise self._error
        if self._searches:
            self._search()
        if not self._changed:
            return ()
        keys = [*islice(self._changed, PAGES_A_STEP)]
        if len(keys) == len(self._changed):
            self._changed.clear()
        else:
            deque(map(self._changed.pop, keys), maxlen=0)
        found = self._compare(keys)
        self._counters.add("kv_events", len(found))
        return found

    def _compare(self, keys: Sequence[PageKey]) -> list[KvEvent]:
        """Return events for the differences between what consumers believe and what tiers have."""
        stored = [list[BlocksStored]() for _ in self._places]
        removed: list[dict[int, list[bytes]]] = [{} for _ in self._places]
        at = 0
        for text, same in groupby([*map(self._names.__getitem__, keys)]):
            part = keys[at : (at := at + len([*same]))]
            first = text.keys.index(part[0])
            blocks: Sequence[int] = range(first, first + len(part))
            if part != text.keys[first : first + len(part)]:
                blocks = [*map(text.keys.index, part)]
            before = bytes(map(text.reported.__getitem__, blocks))
            now = bytes(self._has(text.group, part))
            if now == before:
                continue
            for first, stop, was, has in _differences(blocks, before, now):
                text.reported[first:stop] = bytes([has]) * (stop - first)
                for place in range(len(self._places)):
                    if has & ~was & 1 << place:
                        _add_stored(stored[place], self._places[place], text, first, stop)
                    elif was & ~has & 1 << place:
                        removed[place].setdefault(text.group, []).extend(text.hashes(first, stop))
        events = list[KvEvent]()
        for where, gone, come in zip(self._places, removed, stored, strict=True):
            events += [BlocksRemoved(where, group, hashes) for group, hashes in gone.items()]
            events += come
        return events

    def _has(self, group: int, keys: Sequence[PageKey]) -> Sequence[int]:
        """Return, for each page, the tiers in which consumers should expect it, one bit each.
        Forgets the names of pages that no tier has or is about to have."""
        stores, states = self._stores[group], self._index.states(keys)
        missing = [at for at, state in enumerate(states) if state is PageState.MISSING]
        has = [int(state not in _NOWHERE) for state in states]
        for bit, pages in stores:
            lists = pages.index.lists
            if any(map(lists, keys)):
                has = [now | bit if lists(key) else now for key, now in zip(keys, has, strict=True)]
        coming = any(pages.demoting for _, pages in stores)
        for at in missing:
            key = keys[at]
            if not (has[at] or (coming and any(key in pages.demoting for _, pages in stores))):
                del self._names[key]
        for at, key in enumerate(keys if self._dropped else ()):
            if key in self._dropped:
                has[at] = 0
                self._dropped.discard(key)
                self._names.pop(key, None)
        return [now & -now for now in has] if self._narrowed else has  # the fastest tier


def _differences(
    blocks: Sequence[int], before: bytes, now: bytes
) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of consecutive blocks that changed alike as (first, stop, before, now)."""
    at = 0
    while at < len(blocks):
        first, was, has = at, before[at], now[at]
        while (
            at < len(blocks)
            and blocks[at] - blocks[first] == at - first
            and (before[at], now[at]) == (was, has)
        ):
            at += 1
        if was != has:
            yield blocks[first], blocks[at - 1] + 1, was, has


def _add_stored(
    events: list[BlocksStored], place: Place, text: _Text, first: int, stop: int
) -> None:
    """Add an event for blocks that a tier has now, or extend the last event if they continue its
    blocks."""
    size, last = text.block_size, events[-1] if events else None
    parent = text.hashes(first - 1, first)[0] if first else text.parent
    tokens = text.tokens[first * size : stop * size].tolist()
    extra = None if text.extra_keys is None else [*text.extra_keys[first:stop]]
    if (
        last is None
        or last.hashes[-1] != parent
        or last.group != text.group
        or last.adapter is not text.adapter
        or (last.extra_keys is None) != (extra is None)
    ):
        hashes = text.hashes(first, stop)
        events.append(BlocksStored(place, text.group, hashes, parent, tokens, text.adapter, extra))
        return
    last.hashes += text.hashes(first, stop)
    last.tokens += tokens
    if last.extra_keys is not None and extra is not None:
        last.extra_keys += extra


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive blocks as (first, stop), each of at most ``BLOCKS_TOGETHER``."""
    at = 0
    while at < len(blocks):
        stop = min(at + BLOCKS_TOGETHER, len(blocks))
        if blocks[stop - 1] - blocks[at] != stop - 1 - at:
            stop = next(i for i in range(at + 1, stop) if blocks[i] != blocks[i - 1] + 1)
        yield blocks[at], blocks[stop - 1] + 1
        at = stop


def make_events(deps: Dependencies, engine: EngineState, pages: Pages) -> KvEvents | None:
    """Start observing pages. Returns None if the engine publishes no events, if they are switched
    off, or in observe mode."""
    consumer, observes = deps.config.events, deps.config.observes
    if not deps.facts.publishes_events or consumer is EventConsumer.OFF or observes:
        return None
    return KvEvents(engine, pages, consumer)
