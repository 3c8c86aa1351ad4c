"""Functions that run in an engine's workers: they copy KV in VRAM, digest the copies, and zero KV.

The scheduler process calls them by ``collective_rpc``, so the workers may run in any process.
Copies stay in the workers, and only digests are returned. KV groups are read from vLLM's own
configuration. The connector reads it too; this code is separate, so that the two can disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.page_group import KvKind, KvReach
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.host_memory import CpuPool

HARMLESS = "watch,keep,arm,digests,draft_layers,start_zeroing,end_zeroing"
"""Names of these functions for ``TIERED_KV_HARMLESS_CALLS``, because they change no weights."""
NULL_BLOCK = 0
Tables = Sequence[Sequence[int]]
"""Block ids of a request, by group."""
Digests = Mapping[str, str]
"""The digest of each group's bytes, or the reason why there is none, by the group's description."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose blocks have the same type.

    Attributes:
        index: the engine's number of the group.
        block_size: tokens per block.
        words: type and block size as text.
    """

    index: int
    reach: KvReach
    block_size: int
    layers: tuple[str, ...]
    words: str

    def needs(self, tokens: int) -> range:
        """Return the blocks that a hit of ``tokens`` needs."""
        return self.reach.blocks(tokens, self.block_size)


def kv_groups(kv_cache_config: Any) -> list[KvGroup]:
    """Return the groups whose blocks vLLM can find in its prefix cache."""
    groups = kv_cache_config.kv_cache_groups
    found = []
    for index in getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(groups))):
        spec, layers = groups[index].kv_cache_spec, tuple(groups[index].layer_names)
        inner = getattr(spec, "kv_cache_specs", None)
        reach, name = _reach(next(iter(inner.values())) if inner else spec)
        plural = "s" if len(layers) > 1 else ""
        words = f"{name}, {len(layers)} layer{plural}, blocks of {spec.block_size}"
        found.append(KvGroup(index, reach, spec.block_size, layers, words))
    return found


def _reach(spec: Any) -> tuple[KvReach, str]:
    if hasattr(spec, "shapes"):
        mamba = getattr(spec, "mamba_type", "")
        name = str(getattr(mamba, "name", mamba)).lower().removesuffix("_attn")
        return KvReach(KvKind.STATE), f"{name} state"
    if (chunk := getattr(spec, "attention_chunk_size", None)) is not None:
        return KvReach(KvKind.CHUNK, chunk), f"chunks of {chunk}"
    if (window := getattr(spec, "sliding_window", None)) is not None:
        extra = int(getattr(spec, "extra_retained_tokens", 0))
        return KvReach(KvKind.WINDOW, window, extra), f"window of {window}"
    return KvReach(), "MLA" if type(spec).__name__.startswith("MLA") else "full attention"


@dataclass(slots=True)
class Snapshot:
    """Copy of the blocks that a hit of ``tokens`` needs.

    Attributes:
        blocks: tensors of each block, by group and block index. Blocks that the request does not
            have are missing.
    """

    tokens: int
    blocks: dict[int, dict[int, list[Any]]]

    def digest(self, group: KvGroup, tokens: int) -> str:
        """Return the digest of the group's bytes that a hit of ``tokens`` needs, which must be at
        most the copy's ``tokens``. If bytes are missing, returns the reason instead."""
        is_state = group.reach.kind is KvKind.STATE
        if is_state and self.tokens != tokens:
            return f"a state after {self.tokens} tokens, not {tokens}"
        digest = hashlib.sha256()
        for at in group.needs(tokens):
            if at not in self.blocks[group.index]:
                return f"block {at} is missing of {self.tokens} tokens"
            used = min(group.block_size, tokens - at * group.block_size)
            for part in self.blocks[group.index][at]:
                digest.update(_raw_bytes(part if is_state else part[..., :used, :]))
        return digest.hexdigest()[:16]


def _raw_bytes(tensor: Any) -> bytes:
    import torch

    raw: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


class Vram:
    """KV memory of one worker, in the worker's process.

    Args:
        runner: the worker's model runner.
    """

    def __init__(self, runner: Any) -> None:
        config = runner.kv_cache_config
        self.groups = kv_groups(config)
        self.snapshots = dict[str, Snapshot]()
        self.armed = list[tuple[str, Tables, int, Sequence[str]]]()
        self._num_blocks = config.num_blocks
        self._layers = runner.compilation_config.static_forward_context
        self._forward: Callable[..., Any] = runner._model_forward  # noqa: SLF001 - after sync loads
        runner._model_forward = self._about_to_compute  # noqa: SLF001

    def keep(self, label: str, tables: Tables, tokens: int) -> None:
        """Copy the blocks that a hit of ``tokens`` needs."""
        self.snapshots[label] = Snapshot(
            tokens,
            {
                group.index: {
                    at: self._copy(group, table[at])
                    for at in group.needs(tokens)
                    if at < len(table) and table[at] != NULL_BLOCK
                }
                for group in self.groups
                for table in [tables[group.index]]
            },
        )

    def _about_to_compute(self, *args: Any, **kwargs: Any) -> Any:
        for label, tables, tokens, zeroed in self.armed:
            self.keep(label, tables, tokens)
            for group in self.groups:
                blocks = [tables[group.index][at] for at in group.needs(tokens)]
                for layer in set(zeroed).intersection(group.layers):
                    self._layers[layer].kv_cache[blocks] = 0
        self.armed.clear()
        return self._forward(*args, **kwargs)

    def _copy(self, group: KvGroup, block: int) -> list[Any]:
        caches = [self._layers[layer].kv_cache for layer in group.layers]
        if group.reach.kind is KvKind.STATE:
            parts = (one if isinstance(one, (list, tuple)) else [one] for one in caches)
            return [part[block].clone() for cache in parts for part in cache]
        return [self._rows(cache, block).clone() for cache in caches]

    def _rows(self, cache: Any, block: int) -> Any:
        """Return a layer's block as a tensor ``[..., tokens, numbers per token]``."""
        pieces = cache.shape[0] // self._num_blocks  # kernel blocks per block
        if pieces == 1:
            return cache[block]
        import torch

        return torch.cat(list(cache[block * pieces : (block + 1) * pieces]), dim=-2)


class ZeroedGroup(TransferBackend):
    """Transfer backend that zeroes a group's pages in CPU memory just before they are restored.

    Args:
        group: position of the group among the offloaded groups.

    Attributes:
        struck: number of pages zeroed so far.
    """

    def __init__(self, inner: TransferBackend, pool: CpuPool, group: int) -> None:
        self.inner = inner
        self.struck = 0
        self._pool = pool
        self._group = group

    def submit(self, job: CopyJob) -> None:
        self._zero(job)
        self.inner.submit(job)

    def run(self, job: CopyJob) -> CopyResult:
        self._zero(job)
        return self.inner.run(job)

    def poll(self) -> list[CopyResult]:
        return self.inner.poll()

    def drain(self) -> None:
        self.inner.drain()

    def close(self) -> None:
        self.inner.close()

    def _zero(self, job: CopyJob) -> None:
        if job.direction is Direction.LOAD and job.group == self._group:
            self._pool.slots[list(job.slots)] = 0
            self.struck += len(job.slots)


# -- functions that the scheduler process calls -----------------------------------------


def watch(worker: Any) -> None:
    """Start watching a worker's KV memory."""
    worker.model_runner.watched_vram = Vram(worker.model_runner)


def keep(worker: Any, label: str, tables: Tables, tokens: int) -> None:
    """Copy blocks (see ``Vram.keep``)."""
    worker.model_runner.watched_vram.keep(label, tables, tokens)


def arm(worker: Any, label: str, tables: Tables, tokens: int, zeroed: Sequence[str]) -> None:
    """Copy blocks when the next forward pass starts, then zero the KV of some layers."""
    worker.model_runner.watched_vram.armed.append((label, tables, tokens, zeroed))


def digests(worker: Any, label: str, tokens: int) -> Digests:
    """Return the digests of a copy's bytes that a hit of ``tokens`` needs."""
    vram: Vram = worker.model_runner.watched_vram
    taken = vram.snapshots.get(label)
    return {
        f"group {group.index} ({group.words})": (
            taken.digest(group, tokens) if taken is not None else "nothing was found"
        )
        for group in vram.groups
    }


def draft_layers(worker: Any) -> list[str]:
    """Return the names of the draft model's layers."""
    drafter = getattr(worker.model_runner, "drafter", None)
    return sorted(getattr(drafter, "_draft_attn_layer_names", ()))


def start_zeroing(_worker: Any, position: int) -> None:
    """Make restores write zeros in place of a group's pages."""
    half = _half()
    half.backend = ZeroedGroup(half.backend, half.pool, position)


def end_zeroing(_worker: Any) -> int:
    """Restore the worker's own transfer backend. Returns the number of zeroed pages."""
    half = _half()
    zeroed: ZeroedGroup = half.backend
    half.backend = zeroed.inner
    return zeroed.struck


def _half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_half


def unlike(one: Sequence[Digests], other: Sequence[Digests]) -> list[str]:
    """Compare two digests of each rank. Returns the differences as sentences; empty if all bytes
    are equal."""
    wrong = []
    for rank, (before, after) in enumerate(zip(one, other, strict=True)):
        where = f"rank {rank}, " if len(one) > 1 else ""
        for group, digest in before.items():
            if digest != after[group]:
                wrong.append(f"bytes of {where}{group}: {digest}, then {after[group]}")
            elif " " in digest:  # words, so there are no bytes to compare
                wrong.append(f"bytes of {where}{group}: {digest}")
    return wrong
