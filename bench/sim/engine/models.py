"""Models: cost per token, and the KV types of their layers.

If layers have several KV types, vLLM divides them into page groups with the same number of layers
and the same page size (``_get_kv_cache_groups_uniform_page_size``). The number of layers per group
is the layer count of the type with the fewest layers. In a model with recurrent layers, blocks are
long enough that an attention page is no smaller than a layer's state
(``Platform.update_block_size_for_backend``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_kv.page_group import KvKind
from tiered_kv.testing.vllm.groups import GroupSpec

BF16, FP32 = 2, 4
"""Size of an element, bytes."""
KERNEL_BLOCK = 16
"""Block sizes are multiples of this many tokens (``CacheConfig.DEFAULT_BLOCK_SIZE``)."""
ALIKE = 1.5
"""Ratio of the largest to the smallest layer count below which the number of layers per group is
the largest count."""


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers that keep a state instead of KV per token.

    Attributes:
        count: number of layers.
        nbytes: state size per layer, bytes.
    """

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """Layers of sliding-window attention, with the same heads as the full-attention layers.

    Attributes:
        count: number of layers.
        span: window length, tokens.
    """

    count: int
    span: int


@dataclass(frozen=True, slots=True)
class Model:
    """A dense model in bf16.

    Attributes:
        layers: number of full-attention layers.
        heads, kv_heads: attention heads per layer.
        head: dimension of a head.
        max_len: maximum request length, tokens.
        source: where these figures come from.
        states, windows: further layers; None if there are none.
        reduced: number of all-reduces per step; 0 means two per layer with KV.
    """

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head: int
    max_len: int
    source: str
    states: StateLayers | None = None
    windows: WindowLayers | None = None
    reduced: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes per token of keys and values in one layer."""
        return 2 * BF16 * self.kv_heads * self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes per token of keys and values in all full-attention layers."""
        return self.layers * self.layer_bytes

    @property
    def weight_bytes(self) -> float:
        return BF16 * self.parameters

    @property
    def all_reduces(self) -> int:
        """Number of all-reduces per step with several ranks."""
        return self.reduced or 2 * (self.layers + (self.windows.count if self.windows else 0))

    @property
    def state_bytes(self) -> int:
        """State size per request, bytes."""
        return self.states.count * self.states.nbytes if self.states else 0

    @property
    def group_layers(self) -> int:
        """Number of layers in a page group."""
        counts = [self.layers, *(one.count for one in (self.states, self.windows) if one)]
        fewest, most = min(counts), max(counts)
        return most if most < ALIKE * fewest else fewest

    @property
    def group_kv_bytes(self) -> int:
        """Bytes per token in an attention page group."""
        return self.group_layers * self.layer_bytes

    @property
    def block(self) -> int:
        """Tokens per block that the model's states require; 0 if any size is possible."""
        if self.states is None:
            return 0
        return KERNEL_BLOCK * -(-self.states.nbytes // (KERNEL_BLOCK * self.layer_bytes))

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """KV type of each page group, without its block size; empty for models with only full
        attention.
        """
        if self.states is None and self.windows is None:
            return ()
        size = self.group_layers
        made = [GroupSpec(KvKind.FULL) for _ in _split(self.layers, size)]
        if self.windows is not None:
            span = self.windows.span
            made += [GroupSpec(KvKind.WINDOW, span=span) for _ in _split(self.windows.count, size)]
        if self.states is not None:
            made += [
                GroupSpec(KvKind.STATE, state_bytes=count * self.states.nbytes)
                for count in _split(self.states.count, size)
            ]
        return tuple(made)


def _split(layers: int, size: int) -> list[int]:
    """Return the sizes of groups of at most ``size`` layers, as even as possible."""
    groups = -(-layers // size)
    return [len(range(at, layers, groups)) for at in range(groups)]


def mamba2_bytes(*, heads: int, head: int, state: int, groups: int, kernel: int) -> int:
    """Return the state size of a Mamba-2 layer, bytes: the last inputs of its convolution in bf16,
    and the SSM state in float32, vLLM's default for Nemotron-H.
    """
    inner = heads * head
    return (inner + 2 * groups * state) * (kernel - 1) * BF16 + inner * state * FP32


MODELS: Mapping[str, Model] = {
    "llama-3.1-8b": Model(8.03e9, 32, 32, 8, 128, 131_072, "config.json of Llama-3.1-8B"),
    "llama-3.1-70b": Model(70.6e9, 80, 64, 8, 128, 131_072, "config.json of Llama-3.1-70B"),
    "nemotron-nano-9b-v2": Model(
        8.89e9,
        4,
        40,
        8,
        128,
        131_072,
        "config.json of NVIDIA-Nemotron-Nano-9B-v2; parameters added up from it",
        states=StateLayers(27, mamba2_bytes(heads=128, head=80, state=128, groups=8, kernel=4)),
        reduced=56,  # 25 of them for multilayer perceptrons
    ),
    "gemma-3-12b": Model(
        11.8e9,
        8,
        16,
        8,
        256,
        131_072,
        "config.json of gemma-3-12b-it, its text model; parameters added up from it",
        windows=WindowLayers(40, 1024),
    ),
}
