"""Carries out KV hints: retains, pins, prefetches, demotes and releases pages, and revises gaps.

A hint acts only on jobs and pages of its caller's scope, and its result reports only on these. Page
keys cover the cache salt, so no two scopes have a page in common. Work on many pages is divided
into portions, one per step, and a hint that has to wait is continued in later steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from tiered_kv.connectors.runtime.between_turns.open_gaps import Retention
from tiered_kv.connectors.runtime.between_turns.turn_ends import TOOL_OVER
from tiered_kv.connectors.runtime.pins.pin_table import Lease
from tiered_kv.connectors.runtime.snapshots.context_pages import ContextNames, context_pages
from tiered_kv.formatting import count
from tiered_kv.keys import DIGEST_BYTES, PageKey
from tiered_kv.metrics import hint_event
from tiered_kv.policies.base import JobKey, Tier, ToolUse, job_scope
from tiered_kv.policies.jobs.kv_hints import HintResult, Intent, KvHint, Outcome, Target
from tiered_kv.policies.pins.release_order import PinState, PinValue, pin_value
from tiered_kv.remote.address import RUN_PAGES
from tiered_kv.trace.turn_record import PinEnd

from .base import Block
from .build import GapGroup
from .dependencies import Dependencies
from .engine_state import EngineState
from .hook_guard import HookErrors
from .job_table import Job
from .parts import AdmissionGroup, Pages
from .turn import Turn

PAGES_A_STEP = 512
"""Maximum number of pages that all hints together handle in a step, which takes a few
milliseconds."""
SEARCHED_PER_PAGE = 32
"""Number of keys that can be compared with block hashes in the time that handling one page
takes."""
HINTS_A_STEP = 64
"""Maximum number of unfinished hints that are continued in a step."""
MOST_HINTS = 4096
"""Maximum number of retentions, of unfinished hints, and of jobs with hints that wait for the end
of a turn."""
MOST_OF_A_JOB = 16
"""Maximum number of hints that wait for the end of one job's turn."""
TOKENS_AT_ONCE, MOST_TOKENS = 4096, 1 << 20
"""``TOKENS_AT_ONCE``: maximum length of a token prefix that is hashed immediately. Longer prefixes,
up to ``MOST_TOKENS`` tokens, are hashed on another thread."""
MOST_NAMED = 16
"""Maximum number of long token prefixes (see ``TOKENS_AT_ONCE``) that are being hashed or wait to
be hashed."""
TTL_S = 300.0
"""Default duration of a retention or a pin, seconds."""
LONGEST_RETENTION_S, LONGEST_PIN_S = 86_400.0, 600.0
RETAINED_SHARE, RETAINED_SHARE_OF_SCOPE = 2, 4
"""One slot of CPU memory in ``RETAINED_SHARE`` may be retained in total, and one in
``RETAINED_SHARE_OF_SCOPE`` for one scope."""
LEASED_SHARE_OF_SCOPE = 2
"""One block of the pin budget in ``LEASED_SHARE_OF_SCOPE`` may be pinned by the hints of one
scope."""
PREFETCHED_SHARE = 2
"""One slot of CPU memory in ``PREFETCHED_SHARE`` may be reserved for promotions. Once that many
slots are reserved, a hint orders no further promotions."""
MOST_PRIORITY = 4.0
"""Factor by which priority 1 multiplies the worth of retained pages. Priority -1 divides it by this
factor."""
LOOKUP_S = 0.5
"""Maximum time for a store to answer a lookup, seconds."""
PATIENCE_S, EAGER_S = 60.0, 5.0
"""``PATIENCE_S``: longest wait for pages in use, seconds. ``EAGER_S``: time for which an otherwise
idle engine keeps stepping for a hint that waits for copies, seconds."""
AGAIN_S = 0.25
"""Time between two attempts while running requests use the pages, seconds."""

LEAST_REST_S = 0.05
"""Shortest forecast of the rest of a gap, seconds."""

_NOT_FOUND = "The job or the pages were not found."
_AT_TURN_END = (Intent.RETAIN, Intent.PIN, Intent.DEMOTE, Intent.RELEASE)

Carrying: TypeAlias = Generator[bool, None, HintResult]
"""A hint that is being carried out. The generator yields when it has to continue in a later step:
True if an idle engine should make a step for the hint."""
_Item = TypeVar("_Item")


class _Refused(Exception):
    """The hint cannot be carried out. The methods that find pages or carry out an intent raise this
    exception to end the hint with an outcome and a reason."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Until:
    """Forecast for a retention: its pages are needed at an unknown time before the retention
    ends."""

    ttl_s: float

    def within(self, t: float) -> float:
        return min(1.0, max(0.0, t / self.ttl_s))


@dataclass(frozen=True, slots=True)
class _Found:
    """The pages that a hint concerns.

    Attributes:
        salt: scope of the pages.
        job: the job whose context the pages are; None if the hint names the pages themselves.
        ended: the job's turn that has just ended, whose blocks may still be allocated; None between
            turns.
    """

    salt: str
    pages: Sequence[PageKey]
    job: Job | None = None
    ended: Turn | None = None

    def is_mine(self, owner: Hashable) -> bool:
        """Return True if ``owner``, a job or a retention, is the hint's own: the named job or, if
        the hint names pages, any owner of the same scope."""
        key = owner.job if isinstance(owner, Retention) else owner
        assert isinstance(key, JobKey)
        return key.salt == self.salt if self.job is None else owner == self.job.key


@dataclass(slots=True)
class _Work:
    hint: KvHint
    steps: Carrying
    report: Callable[[HintResult], None]
    job: Job | None
    eager: bool = True


@dataclass(slots=True)
class _Retained:
    pages: int
    until: float


class HintActions:
    """Carries out KV hints. Used on the scheduler's thread.

    Attributes:
        works: unfinished hints.
        retained: the retentions, by their keys in the eviction order.
    """

    def __init__(
        self,
        deps: Dependencies,
        engine: EngineState,
        pages: Pages,
        admission: AdmissionGroup,
        gaps: GapGroup,
        errors: HookErrors,
    ) -> None:
        self.works: deque[_Work] = deque()
        self.retained: dict[Retention, _Retained] = {}
        self._retained_by = Counter[str]()  # salt -> retained pages
        self._next_end = float("inf")
        self._observes = deps.config.observes
        self._facts = engine.facts
        self._counters = engine.counters
        self._pool = engine.pool
        self._turns = engine.turns.by_id
        self._clock = engine.clock
        self._pages = pages
        self._index = pages.index
        self._order = pages.order
        self._pins = admission.pins
        self._boundaries = admission.boundaries
        self._manager = gaps.manager
        self._costs = gaps.costs
        self._log = gaps.log
        self._group_of = deps.fingerprints.group_of
        self._errors = errors
        self._names = ContextNames(engine.facts, pages.names, deps.make_request)
        self._thread: ThreadPoolExecutor | None = None
        self._named = 0  # token prefixes that the thread hashes or has queued
        self._left = PAGES_A_STEP
        self._acts: dict[Intent, Callable[[KvHint, _Found], HintResult | Carrying]] = {
            Intent.RETAIN: self._retain,
            Intent.PIN: self._pin,
            Intent.PREFETCH: self._prefetch,
            Intent.DEMOTE: self._demote,
            Intent.RELEASE: self._release,
            Intent.REVISE: self._revise,
        }

    # -- hints in, results out ------------------------------------------------------------

    def carry_out(
        self, scope: str | None, hints: Sequence[KvHint], request_id: str | None = None
    ) -> list[HintResult]:
        """Carry out hints as far as possible now. Never raises.

        Args:
            scope: job scope of the caller (``job_scope``); None for an operator, who may name any
                job.
            request_id: the request that carries the hints; None if no request does. The request's
                turn stores the results, and later the final results of deferred hints.

        Returns:
            The result of each hint. In the counters, a deferred hint is counted again with its
                final outcome.
        """
        turn = self._turns.get(request_id) if request_id is not None else None
        results = turn.hint_results if turn is not None else []
        start = len(results)
        for at, hint in enumerate(hints, start):
            results.append(_result(hint, Outcome.DEFERRED))
            report = partial(results.__setitem__, at)
            try:
                result = self._begin(scope, hint, turn, report)
            except Exception as error:
                result = self._failed(hint, error)
            self._count(result)
            results[at] = result
        return results[start:]

    def _begin(
        self,
        scope: str | None,
        hint: KvHint,
        turn: Turn | None,
        report: Callable[[HintResult], None],
    ) -> HintResult:
        if self._observes:
            reason = "In observe mode hints move no KV: unset TIERED_KV_MODE."
            raise _Refused(Outcome.REJECTED, reason)
        job = self._job_of(scope, hint.target, turn)
        if job is None or not job.running or hint.intent not in _AT_TURN_END:
            finding = self._find(scope, hint, job, turn)
            return self._start(_Work(hint, self._carry(hint, finding), report, job))
        at_end = self._manager.at_end
        waiting = at_end.get(job.key, [])
        if len(waiting) >= MOST_OF_A_JOB or len(at_end) >= MOST_HINTS:
            reason = "Too many hints are waiting for a turn to end: try again later."
            raise _Refused(Outcome.REJECTED, reason)
        at_end[job.key] = [*waiting, partial(self._at_turn_end, job, hint, report)]
        if hint.intent is Intent.RELEASE:
            self._manager.jobs.end_with_turn(job)
        reason = "The hint will be carried out when the job's turn ends."
        return _result(hint, Outcome.DEFERRED, reason)

    def _at_turn_end(
        self, job: Job, hint: KvHint, report: Callable[[HintResult], None], turn: Turn
    ) -> None:
        """Carry out a hint that waited for the end of ``turn``, a turn of the job."""
        pages = turn.save.pages or self._manager.pages_of(job.key)
        found = _Found(job.key.salt, pages, job, turn)
        result = self._start(_Work(hint, self._carry(hint, found), report, job))
        self._count(result)
        report(result)

    def _start(self, work: _Work) -> HintResult:
        if len(self.works) >= MOST_HINTS:
            reason = "Too many hints are being carried out: try again later."
            return _result(work.hint, Outcome.REJECTED, reason)
        result = self._go_on(work)
        if result is None:
            self.works.append(work)
            return _result(work.hint, Outcome.DEFERRED, "The hint is being carried out.")
        return result

    def _go_on(self, work: _Work) -> HintResult | None:
        """Continue a hint. Returns its result; None if it is unfinished."""
        result: HintResult
        try:
            work.eager = next(work.steps)
            return None
        except StopIteration as done:
            result = done.value
        except Exception as error:
            result = self._failed(work.hint, error)
        if work.job is not None and work.hint.intent is not Intent.RELEASE:
            self._log.trace.hinted(work.job.key, f"{work.hint.intent} {result.outcome}")
        return result

    def _failed(self, hint: KvHint, error: Exception) -> HintResult:
        if isinstance(error, _Refused):
            return _result(hint, error.outcome, str(error))
        self._errors.add("a KV hint", "it is rejected")
        return _result(hint, Outcome.REJECTED, "The hint failed: see the engine's log.")

    def _count(self, result: HintResult) -> None:
        assert result.intent is not None
        self._counters.add(hint_event(result.intent.value, result.outcome.value))

    def advance(self) -> None:
        """Continue unfinished hints, as far as the limits per step allow."""
        self._left = PAGES_A_STEP
        for _ in range(min(len(self.works), HINTS_A_STEP)):
            if not self._left:
                break
            work = self.works.popleft()
            result = self._go_on(work)
            if result is None:
                self.works.append(work)
            else:
                self._count(result)
                work.report(result)

    @property
    def needs_steps(self) -> bool:
        """True if an otherwise idle engine should make a step for an unfinished hint."""
        return any(work.eager for work in self.works)

    def poll(self) -> None:
        """End the retentions that have expired."""
        now = self._clock()
        if now < self._next_end:
            return
        for key in [key for key, one in self.retained.items() if one.until <= now]:
            self._end_retention(key)
        ends = (one.until for one in self.retained.values())
        self._next_end = min(ends, default=float("inf"))

    def reset(self) -> None:
        """End every retention and every unfinished hint, because existing KV has become invalid."""
        for key in [*self.retained]:
            self._end_retention(key)
        works, self.works = self.works, deque()
        for work in works:
            work.steps.close()
            reason = "The cache was reset before the hint was completed."
            result = _result(work.hint, Outcome.REJECTED, reason)
            self._count(result)
            work.report(result)

    def close(self) -> None:
        """Stop the thread that hashes token prefixes. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    # -- targets ----------------------------------------------------------------------------

    def _job_of(self, scope: str | None, target: Target, turn: Turn | None) -> Job | None:
        """Return the job that a hint names; None if it names pages. Raises ``_Refused`` if the job
        is unknown, or if several jobs have the name."""
        jobs = self._manager.jobs
        found: Sequence[Job | None]
        if target.own:
            found = [turn.job if turn is not None else None]
        elif target.number is not None:
            after = jobs.after(target.number - 1, 1) if scope is None else ()
            found = [job for job in after if job.number == target.number]
        elif target.job is None:
            return None
        elif scope is not None:
            found = [jobs.get(JobKey(scope, target.job))]
        else:
            found = jobs.named(target.job, 2)
        if len(found) > 1:
            reason = "Several jobs have this id, with different cache salts: send the job's number."
            raise _Refused(Outcome.REJECTED, reason)
        if not found or found[0] is None:
            raise _Refused(Outcome.MISSING, _NOT_FOUND)
        return found[0]

    def _find(
        self, scope: str | None, hint: KvHint, job: Job | None, turn: Turn | None
    ) -> Generator[bool, None, _Found]:
        """Find the pages that a hint concerns. Raises ``_Refused`` if no such page is known."""
        target = hint.target
        if job is not None:
            return _Found(job.key.salt, self._manager.pages_of(job.key), job)
        if hint.intent is Intent.REVISE:
            raise _Refused(Outcome.REJECTED, "Only the gap of a job can be revised: send a job id.")
        if target.tokens:
            salt = turn.request.cache_salt if turn is not None else scope or None
            pages = yield from self._hashed(target.tokens, salt)
            if hint.intent is not Intent.PREFETCH:  # stores that are queried may have any page
                pages = yield from self._existing(pages)
            found = _Found(job_scope(salt), pages)
        else:
            found = yield from self._search(scope, hint)
        if not found.pages:
            raise _Refused(Outcome.MISSING, _NOT_FOUND)
        return found

    def _keys_of(self, tokens: Sequence[int], salt: str | None) -> Sequence[PageKey]:
        named = self._names.name(tokens, salt)
        return [page.key for page in context_pages(named, self._facts)]

    def _hashed(
        self, tokens: Sequence[int], salt: str | None
    ) -> Generator[bool, None, Sequence[PageKey]]:
        """Return the pages of the whole blocks of a token prefix, with the keys that they have for
        the base model. Raises ``_Refused`` if the prefix is too long, or if too many prefixes are
        being hashed."""
        tokens = tokens[: len(tokens) // self._facts.block_size * self._facts.block_size]
        if not tokens or not self._index.num_slots:
            return ()
        if len(tokens) <= TOKENS_AT_ONCE:
            return self._keys_of(tokens, salt)
        if len(tokens) > MOST_TOKENS or self._named >= MOST_NAMED:
            reason = (
                "The token prefix is too long, or too many prefixes are being hashed: send a job "
                "id instead."
            )
            raise _Refused(Outcome.REJECTED, reason)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tiered-kv-hints")
        hashing = self._thread.submit(self._keys_of, tokens, salt)
        self._named += 1
        try:
            while not hashing.done():
                yield True
        finally:
            self._named -= 1
            hashing.cancel()
        return hashing.result()

    def _existing(self, pages: Sequence[PageKey]) -> Generator[bool, None, Sequence[PageKey]]:
        """Return the pages up to the last one that any tier has."""
        at = last = 0
        for part in self._portions(pages):
            if not part:
                yield True
            for key in part:
                at += 1
                if self._is_outside(key) or self._in_vram(key) is not None:
                    last = at
        return pages[:last]

    def _search(self, scope: str | None, hint: KvHint) -> Generator[bool, None, _Found]:
        """Find the pages with the given block hashes in the contexts of the scope's jobs between
        turns.

        For intents that need a whole prefix, the pages are the longest prefix of a context that
        ends with one of the hashes. A hash of 8 bytes is the end of a longer hash, as in vLLM's
        events.
        """
        wanted = {one[-8:]: one for one in hint.target.hashes if len(one) >= 8}
        whole = hint.intent not in (Intent.DEMOTE, Intent.RELEASE)
        best, named = _Found("", ()), dict[PageKey, None]()
        for job in self._manager.open.jobs() if wanted else ():
            if scope is not None and job.salt != scope:
                continue
            if named and job.salt != best.salt:  # an operator's hint acts on one scope only
                continue
            if not self._left:
                yield True
            pages = self._order.context(job)
            last = 0
            for at in range(0, len(pages), PAGES_A_STEP):
                if not self._left:
                    yield True
                part = pages[at : at + PAGES_A_STEP]
                self._left = max(0, self._left - 1 - len(part) // SEARCHED_PER_PAGE)
                for place, key in enumerate(part, at + 1):
                    one = wanted.get(key[-8:])
                    if one is not None and key[DIGEST_BYTES:].endswith(one):
                        named[key], last = None, place
            if last > len(best.pages):
                best = _Found(job.salt, pages[:last])
            if len(named) >= len(wanted):
                break
        return best if whole else _Found(best.salt, [*named])

    # -- helpers ----------------------------------------------------------------------------

    def _portions(self, items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
        """Yield the items in portions, each as large as the current step still allows. An empty
        portion means that the step allows no further items."""
        at = 0
        while at < len(items):
            part = items[at : at + self._left]
            self._left -= len(part)
            at += len(part)
            yield part

    def _in_vram(self, key: PageKey) -> Block | None:
        group = self._group_of(key)
        return None if group is None else self._pool.cached(key[DIGEST_BYTES:], group)

    def _is_below(self, key: PageKey) -> bool:
        return any(key in tier.pages.index for tier in self._pages.tiers.own)

    def _is_outside(self, key: PageKey) -> bool:
        """Return True if CPU memory or a lower tier has the page, or if it is moving to CPU
        memory."""
        tiers = self._pages.tiers.values()
        return self._in_cpu(key) or any(key in tier.pages.index for tier in tiers)

    def _moving(self, keys: Sequence[PageKey]) -> set[PageKey]:
        """The pages among ``keys`` that a save, a promotion or a demotion copies now."""
        found = {key for key in keys if self._index.state(key).moving}
        return found.union(
            *(t.pages.demoting.intersection(keys) for t in self._pages.tiers.values())
        )

    def _end_retention(self, key: Retention) -> None:
        held = self.retained.pop(key, None)
        if held is not None:
            self._retained_by[key.job.salt] -= held.pages
            if not self._retained_by[key.job.salt]:
                del self._retained_by[key.job.salt]
            self._order.on_job_ended(key)

    def _is_pinned(self, key: PageKey) -> bool:
        block = self._in_vram(key)
        return block is not None and self._pins.holds(block)

    # -- intents ----------------------------------------------------------------------------

    def _carry(self, hint: KvHint, finding: _Found | Generator[bool, None, _Found]) -> Carrying:
        found = finding if isinstance(finding, _Found) else (yield from finding)
        made = self._acts[hint.intent](hint, found)
        return made if isinstance(made, HintResult) else (yield from made)

    def _retain(self, hint: KvHint, found: _Found) -> HintResult:
        """Add the pages to the eviction order as a separate context, with the forecast that it is
        certain to be needed before the retention ends."""
        slots, now = self._index.num_slots, self._clock()
        if not self._order.by_context or not slots:
            reason = "Retention needs KV in CPU memory, and TIERED_KV_EVICTION=worth."
            raise _Refused(Outcome.REJECTED, reason)
        if not found.pages:
            raise _Refused(Outcome.MISSING, "The engine has no record of this job's pages.")
        ttl_s, clipped = _ttl(hint, LONGEST_RETENTION_S)
        key = _retention(found)
        old = self.retained.get(key)
        again = old.pages if old is not None else 0
        room = slots // RETAINED_SHARE - self._retained_by.total()
        room = min(room, slots // RETAINED_SHARE_OF_SCOPE - self._retained_by[found.salt]) + again
        if room <= 0 or (old is None and len(self.retained) >= MOST_HINTS):
            reason = "The limit of retained pages is reached: try again once a retention has ended."
            raise _Refused(Outcome.REJECTED, reason)
        pages = found.pages[:room]
        factor = MOST_PRIORITY ** min(1.0, max(-1.0, hint.priority))
        page_s = self._costs.costs(len(pages) * self._facts.block_size).recompute_s / len(pages)
        self.retained[key] = _Retained(len(pages), now + ttl_s)
        self._retained_by[found.salt] += len(pages) - again
        self._next_end = min(self._next_end, now + ttl_s)
        self._order.on_gap_begun(key, pages, _Until(ttl_s), now, page_s * factor)
        if len(pages) < len(found.pages):
            reason = f"Only {count(len(pages), 'page')}: the limit of retained pages is reached."
            return _result(hint, Outcome.CLIPPED, reason, len(pages), ttl_s)
        return _timed(hint, len(pages), ttl_s, clipped=clipped)

    def _pin(self, hint: KvHint, found: _Found) -> Carrying:
        """Keep the job's pin or, for a hint that names pages, a separate pin until the hint's
        deadline. The leading pages whose blocks are still in VRAM are added to the pin."""
        pins, now, job = self._pins, self._clock(), found.job
        ttl_s, clipped = _ttl(hint, LONGEST_PIN_S)
        key = _pin_key(found)
        gap, held = self._manager.open.get(key), pins.look(key)
        value = pin_value(gap.decision.forecast, gap.costs, ttl_s) if gap else None
        # Other requests never wait for a pin that only a hint keeps.
        lease = Lease(now + ttl_s, PinValue(PinState.HELD, value.saves_s if value else 0.0))
        started_at = job.started_at if job is not None else now
        most = pins.budget // LEASED_SHARE_OF_SCOPE - pins.leased_blocks(found.salt, besides=key)
        if most < max(1, held.blocks if held is not None else 0):
            reason = (
                "The pin budget leaves no blocks for hints with this cache salt: try again once "
                "one of their pins has ended."
            )
            raise _Refused(Outcome.REJECTED, reason)
        wanted = pinned = 0
        if found.ended is not None and found.ended.has_kv:
            blocks = self._boundaries.of(found.ended)
            wanted = len(blocks)
            if wanted <= most or not self._facts.narrow:
                pinned = pins.lease(key, blocks[:most], lease, started_at)
        else:
            wanted = pinned = pins.lease(key, (), lease, started_at)
            # With sliding windows or recurrent states, the blocks at the prompt's end are needed,
            # and are unknown now.
            pages = () if self._facts.narrow else found.pages
            taken, wanted = 0, max(pinned, len(pages))
            for part in self._portions(pages):
                if not part:
                    yield True
                    if job is not None and job.running:
                        reason = "The job's next turn arrived before all blocks were pinned."
                        raise _Refused(Outcome.REJECTED, reason)
                    continue
                cached = [*map(self._in_vram, part)]
                end = cached.index(None) if None in cached else len(cached)
                blocks = [one for one in cached[: min(end, most - taken)] if one is not None]
                pinned = pins.lease(key, blocks, lease, started_at)
                taken += len(blocks)
                if len(blocks) < len(part):
                    wanted -= taken + 1 == wanted  # the partial page at the end is not in VRAM
                    break
        if gap is not None:
            gap.pinned = max(gap.pinned, pinned)
        after = pins.look(key)
        if after is None:
            reason = "The blocks are no longer in VRAM, or the pin budget is used up."
            raise _Refused(Outcome.REJECTED, reason)
        until_s = min(after.deadline, now + LONGEST_PIN_S) - now
        if pinned < wanted:
            reason = (
                f"Only {count(pinned, 'block')} could be pinned: the other blocks are not in VRAM, "
                "or exceed the pin budget."
            )
            return _result(hint, Outcome.CLIPPED, reason, pinned, until_s)
        return _timed(hint, pinned, until_s, clipped=clipped)

    def _prefetch(self, hint: KvHint, found: _Found) -> Carrying:
        """Promote the leading pages that some tier has, as far as CPU memory has space."""
        book, index, covered = self._pages.book, self._index, 0
        if not index.num_slots:
            reason = (
                "Prefetch needs CPU memory, and this engine keeps no KV there: set "
                "TIERED_KV_CPU_GIB above 0, and serve a model whose KV can be offloaded."
            )
            raise _Refused(Outcome.REJECTED, reason)
        why, short, stop = "", False, 0
        for part in self._portions(found.pages):
            if not part:
                yield True
                continue
            start, stop = stop, stop + len(part)
            lacking = [key for key in part if not self._in_cpu(key)]
            # Each group's runs are counted from its own first page.
            begin = start - start % RUN_PAGES if len(self._facts.groups) == 1 else 0
            yield from self._looked_up(lacking, found.pages[begin:stop])
            reach = self._pages.tiers.by_tier(lacking)
            known = {key for keys in reach.values() for key in keys}
            # Blocks in VRAM may be reused before the job returns, so their pages are promoted too.
            lost = (i for i, key in enumerate(part) if not self._is_here(key) and key not in known)
            end = next(lost, None)
            wanted = [key for key in part[:end] if key in known]
            room = index.num_slots // PREFETCHED_SHARE - len(book.promoting)
            ordered = self._pages.promotions.promote_ahead(wanted[: max(0, room)], self._clock())
            if found.job is not None:
                self._log.trace.brought_up(found.job.key, ordered)
            if ordered < len(wanted):
                covered += part.index(wanted[ordered])
                why, short = "CPU memory has no space to promote more pages.", True
                break
            index.touch(reversed(part[:end]))  # so that other promotions do not evict them
            covered += len(part[:end])
            if end is not None:
                why = "No tier has the pages that follow."
                break
        if not why:
            outcome = Outcome.ACCEPTED if covered else Outcome.MISSING
            return _result(hint, outcome, "" if covered else _NOT_FOUND, covered)
        if not covered and not short:
            raise _Refused(Outcome.MISSING, _NOT_FOUND)
        return _result(hint, Outcome.CLIPPED if covered else Outcome.REJECTED, why, covered)

    def _in_cpu(self, key: PageKey) -> bool:
        """True if CPU memory has the page, or if the page is being copied to CPU memory."""
        state = self._index.state(key)
        return state.readable or state.moving

    def _is_here(self, key: PageKey) -> bool:
        return self._in_cpu(key) or self._in_vram(key) is not None

    def _looked_up(
        self, keys: Sequence[PageKey], context: Sequence[PageKey]
    ) -> Generator[bool, None, None]:
        """Query the tiers whose pages are known only to their stores, and wait for the answers."""
        tiers = self._pages.tiers.values() if keys else ()
        orders = [tier.ask(keys, context, LOOKUP_S) for tier in tiers if tier.answers]
        while any(order is not None and self._pages.book.under_way(order) for order in orders):
            yield False

    def _demote(self, hint: KvHint, found: _Found) -> Carrying:
        """Copy pages to the engine's own tiers, and drop them from CPU memory once they are copied.
        Pages that other jobs share stay in CPU memory."""
        tiers, job, index = self._pages.tiers, found.job, self._index
        if not tiers.own:
            reason = "Demotion needs a tier below CPU memory, such as SSD: set TIERED_KV_SSD_PATH."
            raise _Refused(Outcome.REJECTED, reason)
        self._end_retention(_retention(found))
        self._pins.release(_pin_key(found), PinEnd.REVISED)
        moved, left, sent, until = 0, found.pages, set[PageKey](), self._clock() + EAGER_S
        while left:
            waiting = list[PageKey]()
            for part in self._portions(left):
                if not part:
                    yield self._clock() < until
                if job is not None and job.running:
                    reason = "The job's next turn arrived before all pages were demoted."
                    return _result(hint, Outcome.CLIPPED, reason, moved)
                private = self._order.private(part, found.is_mine)
                moving, queued = self._moving(private), any(tier.has_more for tier in tiers.own)
                below = [key for key in private if self._is_below(key)]
                index.forget_all(below)
                moved += len(below)
                left_here = [key for key in private if key in moving or index.readable(key)]
                down = [key for key in left_here if key not in moving and key not in sent]
                waiting += [key for key in left_here if key in moving or (queued and key in sent)]
                tiers.send_down(down, after=None)
                sent.update(down)
                waiting += down
            left = waiting
            if left:
                yield self._clock() < until
        if not moved:
            reason = "Each page is shared with other jobs, or has no copy in a lower tier."
            raise _Refused(Outcome.REJECTED, reason)
        whole = moved == len(found.pages)
        kept = "Shared pages, and pages without a copy in a lower tier, stay in CPU memory."
        reason = "" if whole else kept
        return _result(hint, Outcome.ACCEPTED if whole else Outcome.CLIPPED, reason, moved)

    def _release(self, hint: KvHint, found: _Found) -> Carrying:
        """Finish the job, and delete its pages in all tiers, except pages that other contexts or
        pins have. Pages in use are deleted if their use ends within ``PATIENCE_S``."""
        job, first = found.job, frozenset[PageKey]()
        if job is None:
            self._end_retention(_retention(found))
            self._pins.release(_pin_key(found), PinEnd.GIVEN_UP)
        else:
            self._end_retention(Retention(job.key))
            # The end of the job completes its record in the trace.
            self._log.trace.hinted(job.key, f"{hint.intent} {Outcome.ACCEPTED}")
            # Jobs of other engines may begin with the same prompt.
            first = frozenset(found.pages[: job.first_blocks])
            if found.ended is None:
                self._manager.end_job(job)
            elif not job.over:
                reason = "The job was not released, because its next turn has arrived."
                raise _Refused(Outcome.REJECTED, reason)
        if not found.pages:
            reason = "The job has ended. Its pages are unknown, and stay until they are evicted."
            return _result(hint, Outcome.CLIPPED, reason)
        gone, left, began, eager = 0, found.pages, self._clock(), True
        while left:
            waiting, moving = list[PageKey](), False
            for part in self._portions(left):
                if not part:
                    yield eager
                    continue
                private = self._order.private(part, found.is_mine)
                private = [key for key in private if not self._is_pinned(key)]
                busy = self._moving(private)
                moving |= bool(busy)
                busy |= self._forget_in_vram([key for key in private if key not in busy])
                waiting += [key for key in private if key in busy]
                free = [key for key in private if key not in busy]
                self._forget(free, first)
                gone += len(free)
            left, tried = waiting, self._clock()
            if not left or tried - began > PATIENCE_S:
                break
            eager = moving and tried - began < EAGER_S
            yield eager
            while not moving and self._clock() - tried < AGAIN_S and self._turns:
                yield False
        if left:
            reason = "The other pages are still used by running requests, or being copied."
            return _result(hint, Outcome.CLIPPED, reason, gone)
        kept = "Pages that other jobs share, or other hints pin, are kept."
        reason = "" if gone == len(found.pages) else kept
        return _result(hint, Outcome.ACCEPTED, reason, gone)

    def _forget_in_vram(self, keys: Sequence[PageKey]) -> set[PageKey]:
        """Remove unused blocks of pages from the prefix cache. Returns the pages with blocks in
        use."""
        in_use, left = set[PageKey](), keys
        while left:  # several blocks may have the same page
            blocks = {key: block for key in left if (block := self._in_vram(key)) is not None}
            in_use.update(key for key, block in blocks.items() if block.ref_cnt)
            left = [key for key in blocks if key not in in_use]
            self._pool.forget([blocks[key].block_id for key in left])
        return in_use

    def _forget(self, keys: Sequence[PageKey], first: frozenset[PageKey]) -> None:
        """Forget pages in CPU memory and in lower tiers. Tiers that other engines also use keep the
        pages in ``first``."""
        self._index.forget_all(keys)
        for tier in self._pages.tiers.values() if keys else ():
            tier.forget([key for key in keys if key not in first] if tier.spec.shared else keys)

    def _revise(self, hint: KvHint, found: _Found) -> HintResult:
        """Decide again where the job's KV is kept for the rest of its gap."""
        assert found.job is not None
        key, progress, now = found.job.key, hint.progress, self._clock()
        gap = self._manager.open.get(key)
        if gap is None:
            reason = "The job is not between turns, so there is no gap to revise."
            raise _Refused(Outcome.MISSING, reason)
        rest_s = hint.expected_s
        if rest_s is None and progress is not None and progress > 0:
            rest_s = max(0.0, (now - gap.since) * (1 - progress) / progress)
        if hint.done or (progress is not None and progress >= 1):
            rest = TOOL_OVER
        elif rest_s is not None:
            rest = ToolUse(path=("(revised)",), expected_s=max(rest_s, LEAST_REST_S))
        else:
            reason = "Send expected_tool_s, a progress above 0, or done."
            raise _Refused(Outcome.REJECTED, reason)
        self._manager.revise_gap(key, rest)
        pin = self._pins.look(key)
        if pin is None:
            where = "is not pinned" if gap.decision.tier is Tier.PIN else "will not stay in VRAM"
            return _result(hint, Outcome.ACCEPTED, f"The job's KV {where}.")
        reason, until_s = "The job's KV is pinned.", pin.deadline - now
        return _result(hint, Outcome.ACCEPTED, reason, pin.blocks, until_s)


def _retention(found: _Found) -> Retention:
    job = found.job
    return Retention(job.key) if job else Retention(JobKey(found.salt, ""), found.pages[-1])


def _pin_key(found: _Found) -> JobKey:
    job = found.job
    return job.key if job else JobKey(found.salt, f"(pages to {found.pages[-1].hex()})")


def _ttl(hint: KvHint, longest_s: float) -> tuple[float, bool]:
    """Return the duration of a hint in seconds, and True if it is shorter than the requested
    duration. Raises ``_Refused`` if the requested duration is not above 0."""
    asked_s = TTL_S if hint.ttl_s is None else hint.ttl_s
    if not asked_s > 0:
        raise _Refused(Outcome.REJECTED, "The duration must be above 0.")
    return min(asked_s, longest_s), asked_s > longest_s


def _timed(hint: KvHint, pages: int, until_s: float, *, clipped: bool) -> HintResult:
    reason = f"The duration was cut to the maximum of {until_s:g} seconds." if clipped else ""
    outcome = Outcome.CLIPPED if clipped else Outcome.ACCEPTED
    return _result(hint, outcome, reason, pages, until_s)


def _result(
    hint: KvHint,
    outcome: Outcome,
    reason: str = "",
    pages: int = 0,
    until_s: float | None = None,
) -> HintResult:
    return HintResult(hint.action_id, hint.intent, outcome, reason, pages, until_s)
