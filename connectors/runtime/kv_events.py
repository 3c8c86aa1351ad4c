"""KV events for routers: which pages the tiers outside VRAM have, block by block.

A router credits an engine for blocks whose tokens it knows, so a page is reported with its tokens
and its parent once a request has named it. Names are kept for pages that some tier has or that are
being saved.

Events are derived from state, not queued: the indices report which pages may have changed, and
``take`` compares what the tiers have with what was reported last. So a page that changes often
between two steps takes one entry, no change can be lost, and the entries are bounded by the names.
If there are too many names, the oldest pages are reported as removed, which every consumer
understands. A gap in the sequence or an AllBlocksCleared would also cost VRAM's credit.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice, repeat
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
"""Maximum number of pages that ``take`` compares, which takes about a millisecond. It returns at
most one event for each page and tier, so that a step stays below the 4,096 events that vllm-router
accepts."""
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
        parent: hash of the block before them; None if they start the context.
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


@dataclass(frozen=True, slots=True)
class _Text:
    """Consecutive blocks of a context, with what identifies them."""

    group: int
    keys: Sequence[PageKey]
    parent: bytes | None
    tokens: array[int]
    block_size: int
    adapter: object | None
    extra_keys: Sequence[object] | None


class _Name:
    """The name of a page.

    Attributes:
        text, at: the page is block ``at`` of this text.
        reported: tiers that consumers believe to have the page, one bit each.
        dropped: True if the page is to be reported as removed, and its name forgotten.
    """

    __slots__ = ("at", "dropped", "reported", "text")

    def __init__(self, text: _Text, at: int) -> None:
        self.text = text
        self.at = at
        self.reported = 0
        self.dropped = False


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
        self._names: dict[PageKey, _Name] = {}
        self._changed: dict[PageKey, None] = {}  # a subset of the names
        self._searches = deque[_Search](maxlen=MOST_SEARCHES)
        self._error: Exception | None = None
        shared = {store.tier: tier.spec.shared for store, tier in pages.tiers.items()}
        # vllm-router counts every block with an owner as one of an external store.
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
        """Name those pages of a turn's prompt that tiers have, such as pages that the previous
        engine left behind."""
        if self._is_reported(turn):
            self._searches.append(_Search(turn))

    def _on_filled(self, turn: Turn, group: int, blocks: range) -> None:
        """Name pages that are about to be saved. Never raises, because the save must go on."""
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
        """Name pages of a turn, those that have no name yet."""
        names, keys = self._names, turn.page_keys(group)
        if blocks and blocks[-1] >= len(keys):
            blocks = [block for block in blocks if block < len(keys)]
        fresh = [block for block in blocks if keys[block] not in names]
        for first, stop in _runs(fresh):
            text = self._text(turn, group, first, stop)
            names.update(zip(text.keys, map(_Name, repeat(text), range(stop - first)), strict=True))
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
        )

    def _drop(self, oldest: Sequence[PageKey]) -> None:
        keys = [key for key in oldest if not self._names[key].dropped]
        for key in keys:
            self._names[key].dropped = True
        self._changed.update(dict.fromkeys(keys))
        self._counters.add("kv_event_pages_dropped", len(keys))

    # -- changes --------------------------------------------------------------------------

    def _on_changed(self, keys: Collection[PageKey]) -> None:
        """Compare these pages at the next opportunity."""
        self._changed.update(zip(filter(self._names.__contains__, keys), repeat(None)))

    def on_cleared(self) -> None:
        """Report all pages once more, because the engine has told consumers to forget everything
        that it has reported, in every tier."""
        for name in self._names.values():
            name.reported = 0
        self._changed.update(dict.fromkeys(self._names))

    def stop(self) -> None:
        """Observe nothing from now on, and forget all names."""
        self._pages.index.on_changed = self._pages.saves.on_filled = None
        for tier in self._pages.tiers.values():
            tier.pages.index.on_changed = None
        self._pages.dispatch.awaits_demotions = False
        self._names.clear()
        self._changed.clear()
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
        events: list[list[KvEvent]] = [[] for _ in self._places]
        for key in keys:
            self._compare(key, events)
        found = [event for of_place in events for event in of_place]
        self._counters.add("kv_events", len(found))
        return found

    def _compare(self, key: PageKey, events: list[list[KvEvent]]) -> None:
        name = self._names[key]
        text, state = name.text, self._index.state(key)
        has = 0 if state in _NOWHERE else 1
        coming = state is not PageState.MISSING
        for bit, pages in self._stores[text.group]:
            if pages.index.lists(key):
                has |= bit
            coming = coming or key in pages.demoting
        if name.dropped or not (has or coming):
            has = 0
            del self._names[key]
        elif self._narrowed:
            has &= -has  # the fastest tier
        if changed := has ^ name.reported:
            name.reported = has
            for at, of_place in enumerate(events):
                if changed >> at & 1:
                    if has >> at & 1:
                        self._stored(self._places[at], of_place, name)
                    else:
                        _removed(self._places[at], of_place, text.group, key)

    def _stored(self, place: Place, events: list[KvEvent], name: _Name) -> None:
        text, at = name.text, name.at
        parent = text.keys[at - 1][DIGEST_BYTES:] if at else text.parent
        tokens = text.tokens[at * text.block_size : (at + 1) * text.block_size]
        extra = text.extra_keys
        last = events[-1] if events else None
        if (
            isinstance(last, BlocksStored)
            and last.hashes[-1] == parent
            and last.group == text.group
            and last.adapter is text.adapter
            and (last.extra_keys is None) == (extra is None)
        ):
            last.hashes.append(text.keys[at][DIGEST_BYTES:])
            last.tokens.extend(tokens)
            if last.extra_keys is not None and extra is not None:
                last.extra_keys.append(extra[at])
            return
        events.append(
            BlocksStored(
                place,
                text.group,
                [text.keys[at][DIGEST_BYTES:]],
                parent,
                tokens.tolist(),
                text.adapter,
                None if extra is None else [extra[at]],
            )
        )


def _removed(place: Place, events: list[KvEvent], group: int, key: PageKey) -> None:
    last = events[-1] if events else None
    if isinstance(last, BlocksRemoved) and last.group == group:
        last.hashes.append(key[DIGEST_BYTES:])
    else:
        events.append(BlocksRemoved(place, group, [key[DIGEST_BYTES:]]))


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
    """Start observing pages. Returns None if the engine publishes no events, or moves no pages."""
    consumer, observes = deps.config.events, deps.config.observes
    if not deps.facts.publishes_events or consumer is EventConsumer.OFF or observes:
        return None
    return KvEvents(engine, pages, consumer)
