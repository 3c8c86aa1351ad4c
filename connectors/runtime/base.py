"""The port: what the runtime needs of an inference engine.

An adapter gives each request as a ``Request`` and its block pool as a ``BlockPool``, reads its
configuration into ``EngineFacts``, and calls the hooks of ``SchedulerHalf`` and ``WorkerHalf``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

from tiered_kv.keys import Fingerprint, PageKey
from tiered_kv.page_group import KvKind, PageGroup, slot_bytes


@dataclass(frozen=True, slots=True)
class Sampling:
    """Way in which an answer is sampled.

    Attributes:
        parameters: the client's, as JSON.
        inexact: why an answer that goes on elsewhere might differ though its KV is equal, as a
            sentence; None if it cannot.
    """

    parameters: Mapping[str, object] = field(default_factory=dict)
    inexact: str | None = None


class Request(Protocol):
    """A request of the engine. Its numbers change as it runs.

    Attributes:
        prompt_token_ids: None if the prompt is given as embeddings.
        text_only: True if tokens alone tell its prompt from others.
        block_hashes: hashes of its full blocks so far, each over all before it.
        num_tokens: length of prompt and answer. num_computed_tokens: tokens that the steps
            scheduled so far compute; num_in_flight_tokens: those of steps not over yet.
        arrival_time: the engine's clock, in seconds.
        adapter: the engine's handle of its LoRA adapter; None for the base model.
        reads_cache: False if its prompt must be computed whole.
        streams_input: True if its prompt still grows.
        waits_for_kv: True while KV is loaded into its blocks.
        answered: True if it ended with an answer, rather than cancelled or failed.
        text_cut: True if the last tokens of its answer may be missing from what the client got.
        shared_tokens: tokens of its prompt up to which others began alike, as far as the engine
            knows; 0 if it does not.
        outcome: the engine's name for how it ended.
        priority: its client's, the lowest first; of no meaning unless ``EngineLimits.priorities``.
        ready: True if it waits for nothing but a seat and blocks.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def text_only(self) -> bool: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_in_flight_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def adapter(self) -> object | None: ...
    @property
    def reads_cache(self) -> bool: ...
    @property
    def streams_input(self) -> bool: ...
    @property
    def waits_for_kv(self) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def answered(self) -> bool: ...
    @property
    def text_cut(self) -> bool: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def outcome(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def ready(self) -> bool: ...

    @property
    def sampling(self) -> Sampling:
        """Way in which its answer is sampled."""
        ...

    def end_after_next_token(self) -> None:
        """Have its answer end with the next token, as if it were as long as it may be."""
        ...

    def extra_key(self, token: int) -> object:
        """The part of the block's identity beside its tokens: adapter, salt."""
        ...


MakeRequest: TypeAlias = Callable[[Sequence[int], str | None, int], Request]
"""Makes a request that never runs, of tokens and a cache salt, to name a context: its hashes are
each of so many tokens. Called on any thread."""


class Block(Protocol):
    """A block of VRAM.

    Attributes:
        ref_cnt: references on it; it may be reused when there is none.
        block_hash: None unless it is full and can be found.
        is_null: True for a placeholder, which is never free.
    """

    block_id: int
    ref_cnt: int

    @property
    def block_hash(self) -> object | None: ...
    @property
    def is_null(self) -> bool: ...


class BlockPool(Protocol):
    """The engine's blocks. One thread, the scheduler's.

    Attributes:
        blocks: all of them, by id.
        tables: blocks of each request, first to last, for each page group; one table if there
            are none. Where a request needs a block no longer, a placeholder may stand.
        watermark: blocks that the engine keeps free when it admits a request.
    """

    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def tables(self) -> Sequence[Mapping[str, Sequence[Block]]]: ...
    @property
    def watermark(self) -> int: ...

    def num_free(self) -> int:
        """Blocks without a reference."""
        ...

    def num_cached(self) -> int:
        """Blocks that prompts can find, in use or not; those of the same KV count once."""
        ...

    def hold(self, blocks: Sequence[Block]) -> None:
        """Take a reference on each."""
        ...

    def release(self, blocks: Iterable[Block]) -> None:
        """Give a reference on each back. The first is reused first."""
        ...

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable."""
        ...

    def blocks_of(self, request_id: str) -> Sequence[Block]:
        """Blocks of a request, of every group."""
        ...

    def cached(self, block_hash: bytes, group: int) -> Block | None:
        """The block of a page group with that hash; None if there is none."""
        ...


class Fingerprints(Protocol):
    """Fingerprints of the engine's pages, for the current generation."""

    def base(self, group: int) -> Fingerprint:
        """The base model's pages of a group; it names the workers' stores."""
        ...

    def of(self, adapter: object | None, group: int) -> bytes | None:
        """Digest of a group's pages of requests with that adapter; None while it is not known."""
        ...

    def group_of(self, key: PageKey) -> int | None:
        """The group of a page with such a digest in its key; None if it is of none."""
        ...

    def next_generation(self) -> None:
        """Make every key so far unreachable."""
        ...

    def forget_weights(self) -> None:
        """Make every key so far unreachable, and identify the base model's weights with no files:
        no other engine finds what they compute."""
        ...

    def close(self) -> None:
        """Stop its threads. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state that the engine keeps for later prompts.

    Attributes:
        group: position of its page group.
        block: id of its block.
        tokens: tokens that it covers, a multiple of those of a block hash.
    """

    request_id: str
    group: int
    block: int
    tokens: int


class ScheduledStep(NamedTuple):
    """A step that the engine scheduled.

    Attributes:
        tokens: tokens that each request computes in it. total: their sum.
        begun: requests that compute for the first time, or again after they were preempted.
        preempted: requests that were preempted since the step before.
    """

    tokens: Mapping[str, int]
    total: int
    begun: Collection[str]
    preempted: Collection[str]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and order of the engine's scheduler; 0 if not known.

    Attributes:
        step_tokens: most tokens that a step computes.
        running: most requests that run at once.
        context_tokens: length of the longest context.
        job_order: True if requests go in the order of their jobs.
        priorities: True if requests go in the order of their clients' priorities.
    """

    step_tokens: int = 0
    running: int = 0
    context_tokens: int = 0
    job_order: bool = False
    priorities: bool = False


@dataclass(frozen=True)  # no slots: what follows from the groups is kept
class EngineFacts:
    """Facts that both halves must agree on.

    Attributes:
        ranks: tensor-parallel workers, each of which must report an order.
        block_size: tokens of a block of the first group.
        hash_tokens: tokens that each block hash adds to the one before.
        hit_tokens: multiple of tokens at which a prefix is found in VRAM.
        num_blocks: blocks of the VRAM pool, placeholders included.
        groups: page groups that can be offloaded; empty if there are none.
        replica: index of this engine among data-parallel ones.
        ahead: asynchronous scheduling: a step is scheduled while the one before it runs.
        sync_restores: whether restores may be sync.
        whole_blocks: True if the engine uses a restore only if that ends where a block does.
        speculates: True if a step computes tokens that may be taken back.
        placeholders: blocks of the pool that no request is ever given.
        model: name of the model, for people.
        version: the engine's version.
        limits: limits of the engine's scheduler.
    """

    ranks: int
    block_size: int
    hash_tokens: int
    hit_tokens: int
    num_blocks: int
    groups: tuple[PageGroup, ...] = ()
    replica: int = 0
    ahead: bool = False
    sync_restores: bool = True
    whole_blocks: bool = False
    speculates: bool = False
    placeholders: int = 0
    model: str = ""
    version: str = ""
    limits: EngineLimits = EngineLimits()

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.num_blocks - self.placeholders

    @property
    def slot_bytes(self) -> int:
        """Size of a CPU slot on a rank, bytes; 0 if pages cannot be offloaded."""
        return slot_bytes(self.groups)

    @cached_property
    def narrow(self) -> bool:
        """True if some group keeps less than all of a context."""
        return any(group.reach.kind is not KvKind.FULL for group in self.groups)

    @property
    def recovers_by_block(self) -> bool:
        """True if the engine is told of single blocks that could not be restored, and computes from
        there on. A window lacks the blocks before, and of several groups a number tells nothing."""
        return len(self.groups) == 1 and not self.narrow

    @cached_property
    def has_states(self) -> bool:
        """True if some group keeps states."""
        return any(group.reach.kind is KvKind.STATE for group in self.groups)

    @cached_property
    def draft_tokens(self) -> int:
        """Tokens behind one on which its KV depends in layers of a drafter; 0 without such."""
        return max((group.draft_tokens for group in self.groups), default=0)

    def blocks(self, tokens: int) -> int:
        """Blocks that the KV of a context takes."""
        if not self.groups:
            return -(-tokens // self.block_size)
        return sum(len(group.needs(tokens)) for group in self.groups)

    def blocks_to_go_on(self, computed: int, tokens: int) -> int:
        """Blocks that a context takes which goes on from so many tokens computed: the state that it
        goes on from stays beside the one that is written."""
        states = (group for group in self.groups if group.reach.kind is KvKind.STATE)
        return self.blocks(tokens) + sum(
            computed > 0 and group.needs(computed) != group.needs(tokens) for group in states
        )

    def blocks_on_the_way(self, computed: int, tokens: int) -> int:
        """The most blocks that a context takes while it goes on from so many tokens computed to
        ``tokens``: those of windows are let go only behind what no longer needs them."""
        narrow = (group for group in self.groups if group.reach.kind is not KvKind.STATE)
        return self.blocks_to_go_on(computed, tokens) + sum(
            max(0, group.needs(tokens).start - group.needs(computed).start) for group in narrow
        )

    @cached_property
    def blocks_per_token(self) -> float:
        """Blocks by which a context grows with each token."""
        if not self.groups:
            return 1 / self.block_size
        full = (group for group in self.groups if group.reach.kind is KvKind.FULL)
        return sum(1 / group.block_size for group in full)

    def mean_blocks(self, tokens: float) -> float:
        """Blocks that the KV of contexts of about that length takes in the mean."""
        narrow = (group for group in self.groups if group.reach.kind is not KvKind.FULL)
        return tokens * self.blocks_per_token + sum(
            len(group.needs(int(tokens))) for group in narrow
        )

    @property
    def pool_tokens(self) -> float:
        """Tokens by which the contexts in the pool can grow together."""
        growth = self.blocks_per_token
        return self.usable_blocks / growth if growth else math.inf

    def slots(self, cpu_bytes_per_rank: int) -> int:
        """Page slots of a rank's CPU tier."""
        return cpu_bytes_per_rank // self.slot_bytes if self.groups else 0
