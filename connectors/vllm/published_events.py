"""Converts KV events to vLLM's classes, and reports when vLLM publishes that all blocks were
cleared.

vLLM publishes what ``take_events`` returns after its own events of the step, in the same batch, and
numbers the batches of each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tiered_kv.connectors.runtime.kv_events import BlocksStored, KvEvent, Place
from tiered_kv.page_group import PageGroup

STORAGE = "STORAGE"
"""Medium of every tier below CPU memory, in vLLM's terms."""
STORED_FIELDS = frozenset(BlockStored.__struct_fields__)
REMOVED_FIELDS = frozenset(BlockRemoved.__struct_fields__)
"""Fields of the events in the installed version of vLLM."""


def _as_published(hashes: Sequence[bytes]) -> list[Any]:
    """Return block hashes as vLLM publishes them. vLLM's own function reads an environment variable
    on every call, so it is called once, to find out whether hashes are published as integers."""
    if hashes and isinstance(maybe_convert_block_hash(BlockHash(hashes[0])), int):
        return [int.from_bytes(one[-8:]) for one in hashes]
    return [*hashes]


def _untagged(extra_keys: list[Any]) -> list[Any] | None:
    """Return extra keys as vLLM publishes them: since 0.31 without the tags that it hashes."""
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return convert(extra_keys) if convert is not None else extra_keys


class EventConverter:
    """Creates vLLM's events. They differ from vLLM's own events of the same blocks in VRAM only in
    the fields that describe the tier.

    Args:
        manager: vLLM's KV cache manager.
        groups: the page groups.
    """

    def __init__(self, manager: Any, groups: Iterable[PageGroup]) -> None:
        self._sizes: list[int] = []
        self._stored: list[dict[str, Any]] = []
        self._removed: list[dict[str, Any]] = []
        for group in groups:
            kind, window = manager.kv_cache_event_metadata[group.index]
            fields = {
                "group_idx": group.index,
                "kv_cache_spec_kind": kind,
                "kv_cache_spec_sliding_window": window,
            }
            self._sizes.append(group.block_size)
            self._stored.append(_only(fields, STORED_FIELDS))
            self._removed.append(_only(fields, REMOVED_FIELDS))

    def __call__(self, events: Iterable[KvEvent]) -> list[Any]:
        """Return vLLM's events, in the same order."""
        return [
            self._stored_event(event) if isinstance(event, BlocksStored) else self._event(event)
            for event in events
        ]

    def _stored_event(self, event: BlocksStored) -> Any:
        adapter: Any = event.adapter
        return BlockStored(
            block_hashes=_as_published(event.hashes),
            parent_block_hash=None if event.parent is None else _as_published([event.parent])[0],
            token_ids=event.tokens,
            block_size=self._sizes[event.group],
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=_untagged(event.extra_keys or [None] * len(event.hashes)),
            **self._stored[event.group],
            **_only(_fields_of(event.place), STORED_FIELDS),
        )

    def _event(self, event: Any) -> Any:
        return BlockRemoved(
            block_hashes=_as_published(event.hashes),
            **self._removed[event.group],
            **_only(_fields_of(event.place), REMOVED_FIELDS),
        )


def _fields_of(place: Place) -> dict[str, Any]:
    return {
        "medium": STORAGE if place.storage else MEDIUM_CPU,
        "locality": "REMOTE" if place.shared else "LOCAL",
        "ownership": place.owner,
    }


def _only(fields: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the fields that the event has in the installed version of vLLM."""
    return {name: value for name, value in fields.items() if name in known}


def watch_cleared(manager: Any, told: Callable[[], None]) -> None:
    """Call ``told`` after each successful reset of a block pool. vLLM then publishes
    AllBlocksCleared, upon which consumers forget every tier."""
    for pool in dict.fromkeys(one.block_pool for one in manager.coordinator.single_type_managers):

        def reset(reset: Callable[[], bool] = pool.reset_prefix_cache) -> bool:
            done = reset()
            if done:
                told()
            return done

        pool.reset_prefix_cache = reset
