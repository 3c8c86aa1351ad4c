"""Helpers for tests of KV events: a consumer that checks each event and computes vllm-router's
score, and the state that the consumer is expected to have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from tiered_kv.connectors.runtime.kv_events import BlocksStored
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import DIGEST_BYTES, PageKey
from tiered_kv.pages.base import PageState
from tiered_kv.testing.rig import EngineRig

BlockHash: TypeAlias = Hashable
"""A block hash: bytes, or the integer that vLLM publishes by default."""
Tier: TypeAlias = tuple[str, str | None]
"""A tier as events describe it: its medium and its owner."""


def publish_events(config: Any) -> None:
    """Make vLLM publish KV events, to a publisher that tests replace."""
    from vllm.config.kv_events import KVEventsConfig

    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Block(NamedTuple):
    """A block as an event describes it."""

    parent: BlockHash | None
    tokens: tuple[int, ...]
    extra_keys: object


class Consumer:
    """Records all events, and asserts that each is consistent with the earlier ones.

    Attributes:
        has: stored hashes, by group and tier.
        blocks: blocks by group and hash, from events of tiers outside VRAM.
        blocks_of_vram: blocks by group and hash, from vLLM's own events about VRAM.
        cleared: number of AllBlocksCleared events.
        events: every event, in order.
    """

    def __init__(self) -> None:
        self.has: defaultdict[tuple[int, Tier], set[BlockHash]] = defaultdict(set)
        self.blocks: dict[tuple[int, BlockHash], Block] = {}
        self.blocks_of_vram: dict[tuple[int, BlockHash], Block] = {}
        self.cleared = 0
        self.events: list[Any] = []

    def shutdown(self) -> None:
        """Do nothing when the engine stops, as vLLM's publisher requires."""

    def publish(self, batch: Any) -> None:
        """Receive a batch, like vLLM's publisher."""
        self.take(batch.events)

    def take(self, events: Iterable[Any]) -> None:
        """Receive events of vLLM or of the runtime."""
        for event in events:
            self.events.append(event)
            if type(event).__name__ == "AllBlocksCleared":
                self.cleared += 1
                self.has.clear()
            elif hasattr(event, "place"):
                self._change(event, event.group, _tier(event), event.hashes)
            else:
                tier = (event.medium, event.ownership)
                self._change(event, event.group_idx, tier, event.block_hashes)

    def _change(self, event: Any, group: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        there = self.has[group, tier]
        ours = tier[0] != "GPU"
        if not _stores(event):
            assert not ours or there.issuperset(hashes), "removed, but was not stored"
            there.difference_update(hashes)
            return
        if ours:
            # llm-d has weights for these media only, and Dynamo ignores blocks of other sizes.
            assert tier[0] in ("CPU", "STORAGE")
            assert len([*blocks_of(event)]) == len(hashes) > 0, "blocks without their tokens"
            assert there.isdisjoint(hashes), "stored twice"
        there.update(hashes)
        for block_hash, block in zip(hashes, blocks_of(event), strict=False):
            known = self.blocks if ours else self.blocks_of_vram
            known[group, block_hash] = block

    def compare_with_vram(self) -> int:
        """Assert that each block is described as in VRAM. Returns the number of blocks."""
        both = self.blocks.keys() & self.blocks_of_vram.keys()
        for one in both:
            assert self.blocks[one] == self.blocks_of_vram[one], one
        return len(both)

    def score(self, prompt: Sequence[BlockHash]) -> float:
        """Return vllm-router 0.1's score of the engine for a prompt: the number of blocks of its
        prefix in VRAM, plus the length of its longest continuation in one other tier, multiplied by
        that tier's weight. A tier with an owner has the weight of an external store."""
        gpu = self.has[0, ("GPU", None)]
        prefix = sum(1 for _ in takewhile(gpu.__contains__, prompt))
        runs = {
            tier: sum(1 for _ in takewhile(hashes.__contains__, prompt[prefix:]))
            for (group, tier), hashes in self.has.items()
            if group == 0 and tier[0] != "GPU"
        }
        if not runs:
            return prefix
        (medium, owner), run = max(runs.items(), key=lambda one: one[1])
        return prefix + run * (0.6 if owner else {"CPU": 0.8, "STORAGE": 0.3}[medium])


def _stores(event: Any) -> bool:
    return type(event).__name__ in ("BlockStored", "BlocksStored")


def _tier(event: Any) -> Tier:
    return ("STORAGE" if event.place.storage else "CPU"), event.place.owner


def blocks_of(event: Any) -> Iterator[Block]:
    """Yield the blocks of an event; none if its tokens cannot be assigned to blocks."""
    if isinstance(event, BlocksStored):
        hashes, parent, tokens = event.hashes, event.parent, event.tokens
    else:
        hashes, parent, tokens = event.block_hashes, event.parent_block_hash, event.token_ids
    size, rest = divmod(len(tokens), len(hashes)) if hashes else (0, 1)
    if rest or size != getattr(event, "block_size", size):
        return
    extra = event.extra_keys or [None] * len(hashes)
    for at, block_hash in enumerate(hashes):
        yield Block(parent, tuple(tokens[at * size : (at + 1) * size]), extra[at])
        parent = block_hash


class Expected:
    """The expected state of a consumer: the pages in the indices whose tokens are known, because an
    admitted request contained them.

    Args:
        groups: the engine's number of each page group.
        convert: converts a block hash as the engine does for events.

    Attributes:
        named: pages that admitted requests have contained, by group.
        prompts: the pages among them that were part of a live request's prompt when a step ended.
    """

    def __init__(
        self, rig: EngineRig, groups: Sequence[int], convert: Callable[[Any], BlockHash]
    ) -> None:
        self._rig = rig
        self._groups = groups
        self._convert = convert
        self.named: dict[int, set[PageKey]] = {at: set() for at in range(len(groups))}
        self.prompts: dict[int, set[PageKey]] = {at: set() for at in range(len(groups))}
        half = rig.half
        finished, admitted = half.on_finished, half.events.on_admitted

        def on_admitted(turn: Turn) -> None:
            self._name(turn)  # a restore that is refused makes the turn lose its pages
            admitted(turn)

        def on_finished(request_id: str) -> Any:
            for turn in half.turns.by_id.values():  # one may start and end within one step
                self._name(turn)
            return finished(request_id)

        half.events.on_admitted = on_admitted
        half.on_finished = on_finished

    def look(self) -> None:
        """Record the pages that admitted live requests contain. Call at the end of a step."""
        half: SchedulerHalf = self._rig.half
        for turn in half.turns.by_id.values():
            self._name(turn)
            for at, keys in self._pages(turn):
                size = half.facts.groups[at].block_size
                self.prompts[at].update(keys[: turn.request.num_prompt_tokens // size])

    def _name(self, turn: Turn) -> None:
        for at, keys in self._pages(turn):
            self.named[at].update(keys)

    def _pages(self, turn: Turn) -> Iterator[tuple[int, Sequence[PageKey]]]:
        """Yield the pages of a turn by group; nothing if the turn is not admitted or has none."""
        if turn.source.admitted and turn.pages.fingerprints:
            yield from ((at, turn.page_keys(at)) for at in self.named)

    def tiers(self, pages: Mapping[int, set[PageKey]]) -> Mapping[tuple[int, Tier], set[BlockHash]]:
        """Return the hashes of the pages that each tier has."""
        found: dict[tuple[int, Tier], set[BlockHash]] = {}
        for at, named in pages.items():
            group = self._groups[at]
            cpu = {key for key in named if self._in_cpu(key)}
            found[group, ("CPU", None)] = self._hashes(cpu)
            for store, tier in self._rig.tiers.items():
                if store.group == at:
                    there = {key for key in named if tier.pages.index.lists(key)}
                    found[group, ("STORAGE", str(store.tier))] = self._hashes(there)
        return found

    def _in_cpu(self, key: PageKey) -> bool:
        return self._rig.index.state(key) not in (PageState.MISSING, PageState.BEING_WRITTEN)

    def _hashes(self, keys: Iterable[PageKey]) -> set[BlockHash]:
        return {self._convert(key[DIGEST_BYTES:]) for key in keys}
