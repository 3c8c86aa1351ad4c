"""The port: what the runtime requires of an inference engine.

An adapter presents each request as a ``Request`` and the block pool as a ``BlockPool``, reads the
engine's configuration into ``EngineFacts``, and calls the hooks of ``SchedulerHalf`` and
``WorkerHalf`` in the order that their modules document. The engine must also

- call ``on_allocated`` again, with 0, after an async load, and ``refuse_restore`` if
  ``on_allocated`` raises;
- call ``build_orders`` before the requests' ``num_computed_tokens`` increase, ``on_finished`` while
  a finished request still owns its blocks, and ``on_reports`` last;
- rewind every request that uses a block from ``take_bad_blocks``, and discard its sampled tokens;
- call ``release_for_running`` before it preempts, and retry in the next step if that returns True;
- call ``before_reset`` before its prefix cache is reset;
- keep stepping without requests while ``has_pending_push_work`` is true;
- in a server, catch exceptions of hooks and call ``release_all``.
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
    """Sampling parameters of an answer.

    Attributes:
        parameters: the client's sampling parameters, as JSON.
        inexact: sentence that explains why an answer may differ when it is continued on another
            engine with equal KV; None if it cannot differ.
    """

    parameters: Mapping[str, object] = field(default_factory=dict)
    inexact: str | None = None


class Request(Protocol):
    """A request of the engine. Its counts change while it runs.

    Attributes:
        prompt_token_ids: None if the prompt is given as embeddings.
        text_only: True if its token ids alone identify its prompt.
        block_hashes: hashes of its full blocks so far; each covers all blocks before it.
        num_tokens: length of prompt and answer.
        num_computed_tokens: tokens computed once all scheduled steps have run.
        num_in_flight_tokens: tokens that scheduled, unfinished steps compute.
        arrival_time: seconds on the engine's clock.
        adapter: the engine's object for its LoRA adapter; None for the base model.
        reads_cache: False if its whole prompt must be prefilled.
        streams_input: True if its prompt still grows.
        waits_for_kv: True while KV is loaded into its blocks.
        answered: True if it finished with an answer, rather than cancelled or failed.
        text_cut: True if the last tokens of its answer may not have reached the client.
        shared_tokens: length of the prefix that other requests are known to share, in tokens; 0 if
            the engine does not track this.
        outcome: the engine's name of its finish reason.
        priority: the priority that its client set; lower values run first. Unused unless
            ``EngineLimits.priorities``.
        ready: True if it waits only to be admitted, for blocks or for a place among the running
            requests.
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
        """Sampling parameters of the request's answer."""
        ...

    def end_after_next_token(self) -> None:
        """Stop the request's answer after the next token, as if the answer had reached its maximum
        length."""
        ...

    def extra_key(self, token: int) -> object:
        """Return the part of a block's identity that is not its tokens, such as adapter and salt.

        Args:
            token: position of a token in the block.
        """
        ...

    def extra_keys(self, start: int, block_size: int, blocks: int) -> Sequence[object] | None:
        """Return the extra key of each of ``blocks`` consecutive blocks, for KV events; None if no
        block has one.

        Args:
            start: position of the first token of the first block.
            block_size: tokens of a block.
        """
        ...


MakeRequest: TypeAlias = Callable[[Sequence[int], str | None, int], Request]
"""Creates a request that never runs, in order to compute the keys of a context. Arguments: tokens,
cache salt, and number of tokens per block hash. Called on any thread."""


class Block(Protocol):
    """A block of VRAM.

    Attributes:
        ref_cnt: number of references; the block may be reused at 0.
        block_hash: None unless the block is full and prefix lookups can find it.
        is_null: True for a placeholder, which is never free.
    """

    block_id: int
    ref_cnt: int

    @property
    def block_hash(self) -> object | None: ...
    @property
    def is_null(self) -> bool: ...


class BlockPool(Protocol):
    """The engine's VRAM blocks. Used on one thread, the scheduler's.

    Attributes:
        blocks: all blocks, by id.
        tables: for each page group, the blocks of each request, first to last; a single table if
            there are no groups. A placeholder may replace a block that a request no longer needs.
        watermark: blocks that the engine keeps free when it admits a request.
    """

    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def tables(self) -> Sequence[Mapping[str, Sequence[Block]]]: ...
    @property
    def watermark(self) -> int: ...

    def num_free(self) -> int:
        """Number of blocks without a reference."""
        ...

    def num_cached(self) -> int:
        """Number of blocks that prefix lookups can find, in use or not. Duplicates count once."""
        ...

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block."""
        ...

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each block. The first block is reused first."""
        ...

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove blocks from the prefix cache, so that no prompt finds them."""
        ...

    def blocks_of(self, request_id: str) -> Sequence[Block]:
        """Return the blocks of a request, in every group."""
        ...

    def hashed_blocks_of(self, request_id: str) -> list[Block]:
        """Return the blocks of a request that have a hash, in every group."""
        ...

    def hash_prefix(self, request: Request, tokens: int) -> None:
        """Let prefix lookups find the blocks of a request's first ``tokens`` tokens before the
        request's restore has finished. The KV of these blocks must be complete. May do nothing,
        because the engine hashes the blocks of a finished restore."""
        ...

    def cached_prefix(self, hashes: Sequence[bytes], group: int) -> int:
        """Return the number of hashes before the first hash without a cached block of a page
        group."""
        ...

    def num_in_use(self, hashes: Sequence[bytes], group: int) -> int:
        """Return the number of hashes whose cached block of a page group has a reference."""
        ...

    def cached(self, block_hash: bytes, group: int) -> Block | None:
        """Return the cached block of a page group with that hash; None if there is none."""
        ...


class Fingerprints(Protocol):
    """Fingerprints of the engine's pages, for the current generation."""

    def base(self, group: int) -> Fingerprint:
        """Return the fingerprint of the base model's pages in a group, after which the workers'
        stores are named."""
        ...

    def of(self, adapter: object | None, group: int) -> bytes | None:
        """Return the digest for a group's pages of requests with that adapter; None until it is
        known."""
        ...

    def group_of(self, key: PageKey) -> int | None:
        """Return the group whose digest is part of the page key; None if no group matches."""
        ...

    def next_generation(self) -> None:
        """Invalidate all existing keys."""
        ...

    def forget_weights(self) -> None:
        """Invalidate all existing keys, and no longer identify the base model by its weight files.
        Other engines do not find pages computed after this call."""
        ...

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class KeptState:
    """A recurrent state, such as a Mamba layer's, that the engine keeps for later prompts.

    Attributes:
        group: position of its page group.
        block: id of its block.
        tokens: tokens that the state covers, a multiple of ``hash_tokens``.
    """

    request_id: str
    group: int
    block: int
    tokens: int


class ScheduledStep(NamedTuple):
    """A step that the engine has scheduled.

    Attributes:
        tokens: number of tokens that the step computes for each request.
        total: number of tokens that the step computes for all requests.
        begun: requests computed for the first time, or resumed after preemption.
        preempted: requests preempted since the previous step.
    """

    tokens: Mapping[str, int]
    total: int
    begun: Collection[str]
    preempted: Collection[str]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and queue order of the engine's scheduler. A limit of 0 is unknown.

    Attributes:
        step_tokens: maximum tokens per step.
        running: maximum number of running requests.
        context_tokens: maximum context length.
        job_order: True if requests are admitted in the order of their jobs.
        priorities: True if requests are admitted by client priority.
    """

    step_tokens: int = 0
    running: int = 0
    context_tokens: int = 0
    job_order: bool = False
    priorities: bool = False


@dataclass(frozen=True)  # no slots: cached_property needs a __dict__
class EngineFacts:
    """Engine configuration that the scheduler half and the worker half must agree on.

    Attributes:
        ranks: number of workers (tensor-parallel ranks times pipeline stages), each of which must
            report every order.
        block_size: tokens per block of the first group.
        hash_tokens: tokens per block hash.
        hit_tokens: granularity of prefix hits in VRAM, tokens.
        num_blocks: blocks of the VRAM pool, including placeholders.
        groups: page groups that can be offloaded; empty if none can.
        replica: index of this engine among data-parallel engines.
        ahead: True with asynchronous scheduling: a step is scheduled while the previous one runs.
        sync_restores: True if synchronous restores are allowed.
        whole_blocks: True if the engine uses a restore only if the restore ends at a block
            boundary.
        speculates: True if a step may compute tokens that are later rejected.
        placeholders: blocks of the pool that are never allocated to a request.
        publishes_events: True if the engine publishes KV events.
        model: display name of the model.
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
    publishes_events: bool = False
    model: str = ""
    version: str = ""
    limits: EngineLimits = EngineLimits()

    @property
    def usable_blocks(self) -> int:
        """Number of blocks that can be allocated to requests."""
        return self.num_blocks - self.placeholders

    @property
    def slot_bytes(self) -> int:
        """Size of a CPU slot on a rank, bytes; 0 if pages cannot be offloaded."""
        return slot_bytes(self.groups)

    @cached_property
    def narrow(self) -> bool:
        """True if some group keeps less than the whole context."""
        return any(group.reach.kind is not KvKind.FULL for group in self.groups)

    @property
    def recovers_by_block(self) -> bool:
        """True if the engine accepts single blocks as failed restores, and recomputes from the
        first of them. False with sliding windows, because the blocks before that point are missing,
        and with several groups, because a block id is then ambiguous."""
        return len(self.groups) == 1 and not self.narrow

    @cached_property
    def has_states(self) -> bool:
        """True if some group keeps recurrent states, such as a Mamba layer's, rather than KV per
        token."""
        return any(group.reach.kind is KvKind.STATE for group in self.groups)

    @cached_property
    def draft_tokens(self) -> int:
        """Number of following tokens that a token's KV depends on in a drafter's layers; 0 without
        a drafter."""
        return max((group.draft_tokens for group in self.groups), default=0)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Tokens per block of each group."""
        return tuple(group.block_size for group in self.groups) or (self.block_size,)

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that the KV of a context occupies."""
        if not self.narrow:  # the usual case; called several times for every waiting request
            return sum([-(-tokens // size) for size in self._sizes])
        return sum(len(group.needs(tokens)) for group in self.groups)

    def blocks_to_go_on(self, computed: int, tokens: int) -> int:
        """Return the number of blocks of a context of ``tokens`` tokens that continues after
        ``computed`` tokens. The recurrent state from which it continues stays allocated in addition
        to the recurrent state being written."""
        if not self.has_states:
            return self.blocks(tokens)
        states = (group for group in self.groups if group.reach.kind is KvKind.STATE)
        return self.blocks(tokens) + sum(
            computed > 0 and group.needs(computed) != group.needs(tokens) for group in states
        )

    def blocks_on_the_way(self, computed: int, tokens: int) -> int:
        """Return the peak number of blocks while a context grows from ``computed`` to ``tokens``
        tokens. Blocks of sliding windows are freed only once no token needs them."""
        narrow = (group for group in self.groups if group.reach.kind is not KvKind.STATE)
        return self.blocks_to_go_on(computed, tokens) + sum(
            max(0, group.needs(tokens).start - group.needs(computed).start) for group in narrow
        )

    @cached_property
    def blocks_per_token(self) -> float:
        """Number of blocks by which a context grows per token."""
        if not self.groups:
            return 1 / self.block_size
        full = (group for group in self.groups if group.reach.kind is KvKind.FULL)
        return sum(1 / group.block_size for group in full)

    def mean_blocks(self, tokens: float) -> float:
        """Return the average number of blocks of contexts of about ``tokens`` tokens."""
        if not self.narrow:
            return tokens * self.blocks_per_token
        narrow = (group for group in self.groups if group.reach.kind is not KvKind.FULL)
        return tokens * self.blocks_per_token + sum(
            len(group.needs(int(tokens))) for group in narrow
        )

    @property
    def pool_tokens(self) -> float:
        """Total number of tokens by which contexts can grow in the pool."""
        growth = self.blocks_per_token
        return self.usable_blocks / growth if growth else math.inf

    def slots(self, cpu_bytes_per_rank: int) -> int:
        """Return the number of page slots in a rank's CPU tier; 0 if pages cannot be offloaded."""
        return cpu_bytes_per_rank // self.slot_bytes if self.groups else 0
