"""Page keys of a context, computed from its tokens alone, and the contexts of jobs between turns.

The engine hashes the blocks of its requests. The keys of a context that is not a request come from
a request that is created for this purpose and never runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiered_kv.connectors.runtime.base import EngineFacts, MakeRequest, Request
from tiered_kv.connectors.runtime.pages.hits import PageNames
from tiered_kv.connectors.runtime.pages.saves import kept_tokens
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import tail_key
from tiered_kv.orders import ContextPage
from tiered_kv.page_group import KvKind
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.hints import TurnHints


class ContextNames:
    """Computes page keys of contexts. May be used on any thread, because hashing a long context is
    slow.

    Args:
        make_request: creates requests of the engine.
    """

    def __init__(self, facts: EngineFacts, names: PageNames, make_request: MakeRequest) -> None:
        self._facts = facts
        self._names = names
        self._make_request = make_request

    def name(self, token_ids: Sequence[int], salt: str | None) -> Turn:
        """Return a turn of these tokens that never runs, with all page keys."""
        request = self._make_request(token_ids, salt, self._facts.hash_tokens)
        pages = self._names.of(request, 0)
        named = Turn(
            request=request, hints=TurnHints(), job=None, number=1, arrived_at=0.0, pages=pages
        )
        for group in range(len(pages.fingerprints)):
            named.page_keys(group)
        return named


def context_pages(named: Turn, facts: EngineFacts) -> tuple[ContextPage, ...]:
    """Return all pages that a context of exactly the tokens of ``named`` needs.

    The key of a partially filled page is a ``tail_key``.
    """
    tokens = named.request.num_tokens
    end = _tail(named, facts)
    tail = tail_key(end[0], end[2], end[1]) if end is not None else None
    found = list[ContextPage]()
    for at, group in enumerate(facts.groups):
        needed, keys = group.needs(tokens), named.page_keys(at)
        last = None if tail is None else named.in_group(tail, at)
        if group.reach.kind is KvKind.STATE:
            whole = tokens % facts.hash_tokens == 0
            named_pages = [(needed.start, named.state_key(at, tokens) if whole else last)]
        else:
            full = tokens // group.block_size
            named_pages = [(block, keys[block] if block < full else last) for block in needed]
        found += (ContextPage(at, block, key) for block, key in named_pages if key is not None)
    return tuple(found)


def _tail(named: Turn, facts: EngineFacts) -> tuple[bytes, object, Sequence[int]] | None:
    """Return the identity of the page before the tail, the engine's extra key, and the tail's
    tokens; None for inputs that token ids do not identify."""
    tokens = named.request.num_tokens
    start = tokens // facts.hash_tokens * facts.hash_tokens
    place = named.tail_place(start)
    return None if place is None else (*place, named.request.all_token_ids[start:tokens])


def remember_tail(named: Turn, facts: EngineFacts, tails: TailIndex) -> None:
    """Register the last tokens of a context if they are too few for a block hash, so that lookups
    find them."""
    tail = _tail(named, facts)
    if tail is not None and tail[2]:
        tails.add(*tail)


MOST_TOKENS = 1 << 22
"""Maximum number of tokens kept for all jobs together, about 150 MB. The least recently used
contexts are forgotten first. Tokens that contexts share, as forks do, count once."""
OVERHEAD_TOKENS = 256
"""Number of tokens that is added to the tokens of each context for the memory of its bookkeeping.
Longer names and sampling parameters add more."""
TOKEN_BYTES = 36
"""Memory per token in a list, bytes: a pointer and an int."""
MOST_PARENTS = 100
"""Maximum number of parents recorded for a context. The oldest parents are dropped."""


@dataclass(frozen=True, slots=True)
class Context:
    """A job's context at the end of a turn, or at a boundary of its answer.

    Attributes:
        token_ids: prompt and answer.
        kv_tokens: number of these tokens whose KV existed.
        prompt_tokens: length of the prompt.
        salt: cache salt of its pages.
        turns: number of turns of the job so far.
        parents: names of the jobs that the job was forked or restored from, oldest first.
        sampling: sampling parameters of its answer, as JSON.
    """

    token_ids: Sequence[int]
    kv_tokens: int
    prompt_tokens: int
    salt: str | None
    turns: int
    parents: tuple[str, ...] = ()
    sampling: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, turns: int, parents: tuple[str, ...]) -> Context:
        """Return the context of a request, as far as it was computed."""
        kv_tokens = kept_tokens(request)
        return cls(
            token_ids=request.all_token_ids,
            kv_tokens=kv_tokens,
            prompt_tokens=request.num_prompt_tokens,
            salt=request.cache_salt,
            turns=turns,
            parents=parents,
            sampling=request.sampling.parameters,
        )


class Contexts:
    """The last context of each job that is between two turns. Used on one thread.

    Each context belongs to an existing job: code that forgets a job must call ``forget``.
    """

    def __init__(self) -> None:
        self._contexts: OrderedDict[JobKey, Context] = OrderedDict()
        self._sharing: dict[int, int] = {}  # contexts per token list, by the list's id
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, job: JobKey) -> Context | None:
        """Return a job's context; None if it is not stored."""
        return self._contexts.get(job)

    def remember(self, job: JobKey, context: Context) -> None:
        """Store a job's context, replacing the previous one. The token list must not change."""
        self.forget(job)
        self._contexts[job] = context
        tokens = id(context.token_ids)
        sharing = self._sharing[tokens] = self._sharing.get(tokens, 0) + 1
        self._tokens += _own_tokens(job, context) + (sharing == 1) * len(context.token_ids)
        while self._tokens > MOST_TOKENS:
            self.forget(next(iter(self._contexts)))

    def forget(self, job: JobKey) -> None:
        """Forget a job's context. Unknown jobs are ignored."""
        context = self._contexts.pop(job, None)
        if context is None:
            return
        tokens = id(context.token_ids)
        self._sharing[tokens] -= 1
        self._tokens -= _own_tokens(job, context)
        if not self._sharing[tokens]:
            del self._sharing[tokens]
            self._tokens -= len(context.token_ids)

    def clear(self) -> None:
        """Forget every job."""
        self._contexts.clear()
        self._sharing.clear()
        self._tokens = 0


def _own_tokens(job: JobKey, context: Context) -> int:
    """Return the memory of a context without its tokens, expressed in tokens."""
    names = len(job.name) + len(context.salt or "") + sum(map(len, context.parents))
    return OVERHEAD_TOKENS + (names + len(repr(context.sampling))) // TOKEN_BYTES
