"""KV groups of an engine under test, and their layout in vLLM.

All groups share one allocation of vLLM. A block id belongs to one group at a time, so pages of all
groups have the same size. Groups with less KV per page leave the end of the page unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.page_group import KvKind, KvReach

CONV_BYTES = 8
"""Size of a state's convolution part, bytes. This part is bfloat16, and the rest is float32."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """KV type of some layers.

    Attributes:
        kind: KV type.
        block_size: tokens per block. States need the smallest block size, because vLLM splits
            prefills at the ends of these blocks and caches the states there.
        span: length of the window or chunk, tokens; 0 for other kinds.
        state_bytes: size of a state, a multiple of 8; 0 uses three quarters of a page.
    """

    kind: KvKind = KvKind.FULL
    block_size: int = 16
    span: int = 0
    state_bytes: int = 0

    @property
    def reach(self) -> KvReach:
        """Tokens whose KV the next token attends to."""
        return KvReach(self.kind, self.span)


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of a group.

    Attributes:
        index: vLLM's number of the group.
        spec: KV type.
        page_bytes: size of a page, the same for all groups.
        used_bytes: bytes of a page that contain KV.
    """

    index: int
    spec: GroupSpec
    page_bytes: int
    used_bytes: int

    @property
    def layer(self) -> str:
        """Name of the group's only layer."""
        return f"layer.{self.index}"

    @property
    def token_bytes(self) -> int:
        """Size of a token's KV, bytes; for a state, the size of the whole state."""
        is_state = self.spec.kind is KvKind.STATE
        return self.used_bytes if is_state else self.used_bytes // self.spec.block_size

    def vllm_spec(self) -> Any:
        """Return vLLM's description of a layer's KV."""
        import torch
        from vllm.v1 import kv_cache_interface as vllm

        block, span = self.spec.block_size, self.spec.span
        padded = self.page_bytes if self.used_bytes < self.page_bytes else None
        if self.spec.kind is KvKind.STATE:
            shapes = ((CONV_BYTES // 2,), ((self.used_bytes - CONV_BYTES) // 4,))
            return vllm.MambaSpec(
                block_size=block,
                shapes=shapes,
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=padded,
                mamba_cache_mode="align",
            )
        head = min(128, self.token_bytes // 4)  # K and V of two bytes each
        attention: dict[str, Any] = {
            "block_size": block,
            "num_kv_heads": self.token_bytes // 4 // head,
            "head_size": head,
            "dtype": torch.bfloat16,
            "page_size_padded": padded,
        }
        match self.spec.kind:
            case KvKind.WINDOW:
                return vllm.SlidingWindowSpec(sliding_window=span, **attention)
            case KvKind.CHUNK:
                return vllm.ChunkedLocalAttentionSpec(attention_chunk_size=span, **attention)
            case _:
                return vllm.FullAttentionSpec(**attention)

    def view(self, memory: Any) -> Any:
        """Return the group's layer in the allocation, an int8 tensor, as vLLM passes it to
        connectors.

        The shape of an attention layer is ``[blocks, heads, tokens, K and V of a head]``. A state
        is one row of bytes per block, whatever the types of its parts.
        """
        import torch

        blocks = memory.numel() // self.page_bytes
        pages = memory.view(blocks, self.page_bytes)[:, : self.used_bytes]
        if self.spec.kind is KvKind.STATE:
            return pages.unflatten(1, (1, 1, self.used_bytes))
        spec = self.vllm_spec()
        heads, content = spec.num_kv_heads, spec.state_content_size_bytes
        layer = pages.view(torch.bfloat16)
        return layer.unflatten(1, (heads, self.spec.block_size, content // 2))


def group_pages(specs: Sequence[GroupSpec], token_bytes: int) -> tuple[GroupPages, ...]:
    """Return the page geometry of the groups. All pages have the same size, as vLLM requires.

    Groups with the largest blocks have ``token_bytes`` per token. Groups with smaller blocks have
    the largest multiple of ``token_bytes`` per token that fits, and the rest is unused. A state
    without a given size uses three quarters of a page.

    Raises:
        ValueError: a state's blocks are not the smallest, or a state does not fit into a page.
    """
    smallest = min(spec.block_size for spec in specs)
    if any(spec.kind is KvKind.STATE and spec.block_size > smallest for spec in specs):
        raise ValueError(
            f"the blocks of a state must have {smallest} tokens, the smallest block size of all "
            "groups"
        )
    attention = [spec.block_size for spec in specs if spec.kind is not KvKind.STATE]
    page = token_bytes * max(attention, default=smallest)

    if any(spec.state_bytes > page for spec in specs):
        raise ValueError(f"a state does not fit into a page of {page} bytes: use longer blocks")

    def used(spec: GroupSpec) -> int:
        if spec.kind is KvKind.STATE:
            return spec.state_bytes or max(2 * CONV_BYTES, page * 3 // 4 // 8 * 8)
        return page // (spec.block_size * token_bytes) * spec.block_size * token_bytes

    return tuple(GroupPages(i, spec, page, used(spec)) for i, spec in enumerate(specs))


def kept_blocks(groups: Sequence[GroupPages], tokens: int, *, sparse: bool) -> int:
    """Return the minimum number of blocks in which vLLM finds a context of that many tokens.

    Args:
        sparse: True if vLLM keeps windows and states only at the ends of prompts.
    """
    kinds = (KvKind.FULL, KvKind.CHUNK) if sparse else KvKind
    return sum(tokens // one.spec.block_size for one in groups if one.spec.kind in kinds) or 1
