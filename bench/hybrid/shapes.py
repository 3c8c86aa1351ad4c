"""Models of several KV groups, and the blocks that a job takes in each group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tiered_kv.bench.models.catalogue import MODELS, STATE_CHUNK, TinyModel

from .agents import Load

BF16 = "bfloat16"
"""The dtype of machines that run models with ``needs_bf16``."""

_TINY = {model.name: model for model in MODELS}
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"

_WIDE: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 768**-0.5,
}
"""Fields of the middle-sized models: some 90 M parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its KV groups, as vLLM makes them of its layers.

    Attributes:
        block: tokens of a block, in every group.
        chunk: most tokens of a prefill's step.
        full, windows, states: numbers of groups with full attention, with a sliding window and
            with states.
        window: length of the windows, tokens.
        needs_bf16: True if vLLM's CPU build runs the model in bf16 alone.
    """

    model: TinyModel
    block: int
    chunk: int
    full: int = 1
    windows: int = 0
    window: int = 0
    states: int = 0
    needs_bf16: bool = False

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def groups(self) -> str:
        """The groups in words."""
        said = [f"{self.full} full"]
        if self.windows:
            said.append(f"{self.windows} with a window of {self.window}")
        if self.states:
            said.append(f"{self.states} with states")
        return ", ".join(said)

    def context_blocks(self, tokens: int) -> int:
        """Blocks that a context waits in until its next turn: all of full attention, a window,
        and the state at its end with the one that goes on from it."""
        window = math.ceil((self.window - 1) / self.block) + 1 if self.windows else 0
        return self._full(tokens) + self.windows * window + self.states * 2

    def request_blocks(self, tokens: int) -> int:
        """Most blocks that one request of so many tokens takes while it runs."""
        reach = self.window - 1 + self.chunk
        window = math.ceil(reach / self.block) + 1 if self.windows else 0
        return self._full(tokens) + self.windows * window + self.states * 3

    def whole_blocks(self, tokens: int, turns: int) -> int:
        """Blocks that a job fills in all of its turns, if nothing is ever evicted: a window and
        states at every turn's ends, and those of every block where all are kept."""
        ends = 2 * turns * (self.context_blocks(tokens) - self._full(tokens))
        dense = math.ceil(tokens / self.block) * (self.windows + self.states)
        return self._full(tokens) + ends + dense

    def _full(self, tokens: int) -> int:
        return self.full * math.ceil(tokens / self.block)


def _named(name: str, **settings: object) -> TinyModel:
    tiny = _TINY[name]
    return replace(tiny, settings={**tiny.settings, **_WIDE, **settings})


MIDDLE = (
    Shape(
        model=_named(
            "gemma3",
            sliding_window=256,
            layer_types=[*[_SLIDING] * 5, _FULL] * 2,
            query_pre_attn_scalar=64,
        ),
        block=128,
        chunk=512,
        windows=5,
        window=256,
    ),
    Shape(
        model=_named(
            "qwen3_next",
            layer_types=[_STATE, _STATE, _STATE, _FULL] * 3,
            linear_num_key_heads=6,
            linear_num_value_heads=12,
            decoder_sparse_step=12,  # vLLM wants one layer with experts
            moe_intermediate_size=768,
            shared_expert_intermediate_size=768,
        ),
        block=128,
        chunk=512,
        states=3,
        needs_bf16=True,
    ),
    Shape(
        model=_named(
            "granite4",
            layer_types=["mamba", "mamba", "mamba", "attention"] * 3,
            num_local_experts=0,
            shared_intermediate_size=2304,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_chunk_size=128,
            attention_multiplier=0.125,
        ),
        block=256,
        chunk=256,
        states=3,
    ),
)
"""Gemma's five windows to one full layer; gated delta rule and full attention; Mamba 2 and full
attention, where the machine has no bf16."""

QUICK = (
    Shape(model=_TINY["gemma3"], block=128, chunk=512, windows=1, window=200),
    Shape(model=_TINY["qwen3_next"], block=384, chunk=512, states=3, needs_bf16=True),
    Shape(
        model=_TINY["granite4"],
        block=256,
        chunk=int(str(STATE_CHUNK["max_num_batched_tokens"])),
        states=3,
    ),
)
"""The same, tiny."""


def suited(shapes: tuple[Shape, ...], *, bf16: bool) -> tuple[Shape, ...]:
    """One shape with windows, and the one with states that the machine runs fast."""
    return tuple(one for one in shapes if not one.states or one.needs_bf16 == bf16)


@dataclass(frozen=True, slots=True)
class Pools:
    """KV pools, in blocks, and the longest request, in tokens."""

    longest: int
    pressed: int
    unlimited: int


def pools_for(shape: Shape, contexts: list[int], load: Load) -> Pools:
    """A pool for a third of the jobs' contexts, which still holds the longest request, and one
    for everything."""
    longest = -(-(max(contexts) + 1) // 256) * 256
    one = shape.request_blocks(longest) + 2  # vLLM keeps a block for itself
    waiting = sum(shape.context_blocks(tokens) for tokens in contexts)
    everything = sum(shape.whole_blocks(tokens, load.turns) for tokens in contexts)
    return Pools(longest, max(one, waiting // 3), everything + len(contexts) * one)
