"""Contexts of jobs between their turns: the tokens that their KV is of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiered_kv.connectors.runtime.base import Request
from tiered_kv.connectors.runtime.pages.saves import kept_tokens
from tiered_kv.policies.base import JobKey

MOST_TOKENS = 1 << 22
"""Tokens remembered of all jobs together, some 150 MB. The least recently used contexts are
forgotten first. Contexts that share their tokens, as forks do, count them once."""
OVERHEAD_TOKENS = 256
"""Tokens that a context counts as in addition to its own: its job's name, sampling parameters and
bookkeeping take memory as well."""
TOKEN_BYTES = 36
"""Memory that a token takes in a list, bytes: a pointer and an int."""
MOST_PARENTS = 100
"""Parents that a context names: the last ones."""


@dataclass(frozen=True, slots=True)
class Context:
    """A job's context at the end of a turn, or at a boundary of its answer.

    Attributes:
        token_ids: prompt and answer.
        kv_tokens: those of them whose KV was there.
        prompt_tokens: length of the prompt.
        salt: cache salt of its pages.
        turns: turns of the job so far.
        parents: names of the jobs that it was forked or restored from, oldest first.
        sampling: parameters that its answer was sampled with, as JSON.
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
        """The context of a request as far as it has come."""
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
    """The last context of each job that is between two turns. One thread.

    Each belongs to a job that exists: whoever forgets a job calls ``forget``.
    """

    def __init__(self) -> None:
        self._contexts: OrderedDict[JobKey, Context] = OrderedDict()
        self._sharing: dict[int, int] = {}  # contexts that have a list of tokens, by its id
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, job: JobKey) -> Context | None:
        """A job's context; None if it is not remembered."""
        return self._contexts.get(job)

    def remember(self, job: JobKey, context: Context) -> None:
        """Remember a job's context in place of the one before. The tokens may not change."""
        self.forget(job)
        self._contexts[job] = context
        tokens = id(context.token_ids)
        sharing = self._sharing[tokens] = self._sharing.get(tokens, 0) + 1
        self._tokens += _own_tokens(job, context) + (sharing == 1) * len(context.token_ids)
        while self._tokens > MOST_TOKENS:
            self.forget(next(iter(self._contexts)))

    def forget(self, job: JobKey) -> None:
        """Forget a job. Unknown ones are ignored."""
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
    """Number of tokens that take as much memory as a context without its tokens."""
    names = len(job.name) + len(context.salt or "") + sum(map(len, context.parents))
    return OVERHEAD_TOKENS + (names + len(repr(context.sampling))) // TOKEN_BYTES
