"""Snapshots of jobs: a job is taken out of the engine, brought into one, or forked.

Exact ones have names of their own, by a cache salt that nobody else has: the engine looks in VRAM
first, and would find other bytes of the same text under the usual names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.gaps.gap_manager import GapManager
from tiered_kv.connectors.runtime.job_table import Job
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.metrics import Counters
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.pages.snapshot_orders import SnapshotOrders
from tiered_kv.policies.base import JobKey, TurnEnd
from tiered_kv.snapshot.manifest import SnapshotError

from .capture import Captured
from .context_pages import context_pages, remember_tail
from .file_thread import SnapshotFiles
from .job_capture import JobCaptures, is_named_by_tokens
from .job_contexts import Context
from .operations import Operations, Steps, Wait, file_work

MOST_NAMESAKES = 2
"""Jobs of one name that are looked for."""


class Snapshots:
    """Takes, brings back and forks jobs. One thread, the scheduler's.

    Args:
        manager: gaps and jobs.
        clock: monotonic seconds. wall: seconds since the epoch.

    Attributes:
        operations: those under way, and what came of others.
        contexts: contexts of the jobs that wait.
        orders: orders for snapshots.
    """

    def __init__(
        self,
        facts: EngineFacts,
        index: PageIndex,
        tails: TailIndex,
        manager: GapManager,
        captures: JobCaptures,
        files: SnapshotFiles,
        orders: SnapshotOrders,
        counters: Counters,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.operations = Operations(clock)
        self.contexts = captures.contexts
        self.orders = orders
        self._facts = facts
        self._index = index
        self._tails = tails
        self._manager = manager
        self._captures = captures
        self._files = files
        self._counters = counters
        self._clock = clock
        self._wall = wall

    # -- what is asked for ------------------------------------------------------------

    def take(self, name: str, to: str, *, wait_turn: bool, stop: bool, exact: bool) -> int | None:
        """Begin to take a job's snapshot; gives the number of the operation, or None if there is no
        such job.

        Args:
            to: name of the snapshot.
            wait_turn: True to take it once its turn has ended.
            stop: True to have that end with its next token.

        Raises:
            SnapshotError: it cannot be done; the sentence says what to do.
        """
        job = self._job(name)
        if job is None:
            return None
        self._check(exact)
        return self.operations.begin(self._take(job, to, wait_turn, stop, exact))

    def restore(self, name: str, job: str | None, *, salt: str | None) -> int:
        """Begin to bring a snapshot back; gives the number of the operation.

        Args:
            job: name of the job that it becomes; None for its own.
            salt: cache salt that nobody else has, for an exact one; None for a near one.

        Raises:
            SnapshotError: it cannot be done.
        """
        self._check(exact=salt is not None)
        return self.operations.begin(self._restore(name, job, salt))

    def fork(self, name: str, children: Sequence[str], *, exact: bool) -> int | None:
        """Begin to fork a job; gives the number of the operation, or None if there is no such job.

        Raises:
            SnapshotError: it cannot be done.
        """
        job = self._job(name)
        if job is None:
            return None
        self._check(exact)
        return self.operations.begin(self._fork(job, children, exact))

    def _check(self, exact: bool) -> None:
        if not self._facts.groups or not self._index.num_slots:
            raise SnapshotError(
                "This engine keeps no KV in CPU memory: snapshots need TIERED_KV_CPU_GIB above 0, "
                "and a model whose KV can be offloaded."
            )
        if self.operations.full:
            raise SnapshotError("Too much is under way already: ask again in a while.")
        if exact and self._facts.speculates:
            raise SnapshotError(
                "Exact needs an engine without speculative decoding: serve without it, or leave "
                "--exact out."
            )

    def _job(self, name: str) -> Job | None:
        found = [
            job
            for job in self._manager.jobs.named(name, MOST_NAMESAKES)
            if job.running or self.contexts.get(job.key) is not None
        ]
        if len(found) > 1:
            raise SnapshotError(
                "Several jobs have this name, under cache salts of their own: give them names of "
                "their own."
            )
        return found[0] if found else None

    # -- operations ---------------------------------------------------------------------

    def _take(self, job: Job, to: str, wait_turn: bool, stop: bool, exact: bool) -> Steps:
        began = self._clock()
        drafting = self._files.begin(to)
        captured: Captured | None = None
        try:
            yield file_work("the folder is made", drafting)
            draft = drafting.result()
            self._files.identity()
            if stop or wait_turn:
                yield from self._captures.turn_over(job, stop=stop)
            pausing = self._clock()
            captured = yield from self._captures.of(job, exact=exact)
            pause_s = self._clock() - pausing
            order = self.orders.write(str(draft.folder), captured.pages)
            yield Wait("pages are written", lambda: self.orders.over(order))
            if failed := self.orders.failures(order):
                raise SnapshotError(
                    f"{failed} pages could not be written: see the engine's log, and whether the "
                    "folder has room."
                )
            sealing = self._files.seal(draft, captured, job.key.name, exact, self._wall())
            yield file_work("the manifest is written", sealing)
            manifest = sealing.result()
        finally:
            self._files.abandon(drafting)  # nothing is left of it to abandon once it is sealed
            if captured is not None:
                self._captures.release(captured)
        self._counters.add("snapshots_taken")
        return {
            "name": to,
            "job": job.key.name,
            "tokens": len(manifest.token_ids),
            "kv_tokens": manifest.kv_tokens,
            "pages": len(manifest.pages),
            "stored_bytes": manifest.stored_bytes,
            "shared_bytes": manifest.shared_bytes,
            "exact": exact,
            "capture_ms": round(1e3 * pause_s, 3),
            "durable_ms": round(1e3 * (self._clock() - began), 3),
        }

    def _restore(self, name: str, job: str | None, salt: str | None) -> Steps:
        began = self._clock()
        opening = self._files.open(name, salt)
        yield file_work("the snapshot is looked at", opening)
        opened = opening.result()
        manifest, named = opened.manifest, opened.named
        key = JobKey(opened.salt or "", job or manifest.job)
        if any(found.key == key and found.running for found in self._named(key)):
            raise SnapshotError("A job of this name runs: give another with --job.")
        pages = context_pages(named, self._facts)
        theirs = {(page.group, page.block) for page in manifest.pages}
        if theirs != {(page.group, page.block) for page in pages}:
            raise SnapshotError(f"{name} has not the pages that a context of its length needs.")
        if len(pages) > self._index.num_slots:
            raise SnapshotError(
                f"{name} has {len(pages)} pages, and CPU memory holds {self._index.num_slots}: set "
                "TIERED_KV_CPU_GIB higher."
            )
        index = self._index
        wanted = [page for page in pages if not index.known(page.key)]
        # What is there already must not make room for the rest.
        held = {page.key: index.acquire(page.key) for page in pages if index.readable(page.key)}
        try:
            order = self.orders.read(str(opened.path), wanted) if wanted else None
            if order is not None:
                yield Wait("pages are read", lambda: self.orders.over(order))
            elif wanted:
                raise SnapshotError("CPU memory has no room now: all of it is in use. Try again.")
        finally:
            for held_key, place in held.items():
                index.release(held_key, place, used=False)
        if order is not None and (failed := self.orders.failures(order)):
            raise SnapshotError(
                f"{failed} pages of {name} are damaged or gone; nothing of it was restored."
            )
        keys = [page.key for page in pages]
        self._index.touch(reversed(keys))
        remember_tail(named, self._facts, self._tails)
        parents = (
            manifest.parents if key.name == manifest.job else (*manifest.parents, manifest.job)
        )
        context = Context(
            token_ids=manifest.token_ids,
            kv_tokens=manifest.kv_tokens,
            prompt_tokens=manifest.prompt_tokens,
            salt=opened.salt,
            turns=manifest.turns,
            parents=parents,
            sampling=manifest.sampling,
        )
        self._adopt(key, context, named, keys)
        self._counters.add("snapshots_restored")
        return {
            "job": key.name,
            "tokens": len(manifest.token_ids),
            "kv_tokens": manifest.kv_tokens,
            "pages": len(pages),
            "cache_salt": opened.salt,
            "ms": round(1e3 * (self._clock() - began), 3),
        }

    def _named(self, key: JobKey) -> list[Job]:
        return self._manager.jobs.named(key.name, MOST_NAMESAKES)

    def _fork(self, job: Job, children: Sequence[str], exact: bool) -> Steps:
        captured = yield from self._captures.of(job, exact=exact)
        try:
            salt = captured.salt
            keys = [JobKey(salt or "", child) for child in children]
            for key in keys:
                if any(one.key == key for one in self._named(key)):
                    raise SnapshotError(f"There is a job called {key.name!r} already.")
            remember_tail(captured.named, self._facts, self._tails)
            pages = [page.key for page in captured.pages]
            parents = (*captured.context.parents, job.key.name)
            context = replace(captured.context, salt=salt, parents=parents)
            for key in keys:
                self._adopt(key, context, captured.named, pages)
        except BaseException:
            self._captures.release(captured)
            raise
        self._captures.release(captured, forget=False)
        self._counters.add("jobs_forked", len(keys))
        return {
            "jobs": list(children),
            "tokens": len(context.token_ids),
            "kv_tokens": context.kv_tokens,
            "cache_salt": salt,
            "extra_pages": captured.saved,
        }

    def _adopt(self, key: JobKey, context: Context, named: Turn, pages: Sequence[PageKey]) -> None:
        self.contexts.remember(key, context)
        end = TurnEnd(
            job=key,
            turn=context.turns,
            is_last_step=False,
            aborted=True,
            context_tokens=len(context.token_ids),
            output_tokens=len(context.token_ids) - context.prompt_tokens,
            ended_at=self._clock(),
        )
        self._manager.adopt(end, named.request, pages)

    # -- the engine's events --------------------------------------------------------------

    def on_ended(self, turn: Turn) -> None:
        """Remember the context of a turn that ended, while its job goes on."""
        job = turn.job
        if job is None:
            return
        goes_on = turn.source.admitted and not turn.hints.is_last_step
        if not (goes_on and is_named_by_tokens(turn)):
            self.contexts.forget(job.key)
            return
        self.contexts.remember(
            job.key, Context.of(turn.request, turn.number, self._captures.parents(job.key))
        )

    def advance(self) -> None:
        """Go on with what is under way, between two steps."""
        self.operations.advance()

    @property
    def under_way(self) -> bool:
        """True if a step would bring an operation on."""
        return self.operations.under_way

    def parents(self, job: JobKey) -> tuple[str, ...]:
        """Names of the jobs that a job was forked or restored from, oldest first."""
        return self._captures.parents(job)

    def outcome(self, number: int) -> dict[str, Any]:
        """State of an operation, as JSON."""
        return self.operations.outcome(number)

    def on_reset(self) -> None:
        """Give up everything: all KV is of the past."""
        self.operations.end_all("The cache was reset meanwhile.")
        self.contexts.clear()

    def drain(self) -> None:
        """Wait until the work on files that was begun is done. For tests."""
        self._files.thread.submit(int).result()

    def close(self) -> None:
        """Give up what is under way, and end the thread. Idempotent."""
        self.operations.end_all("The engine ends.")
        self._files.close()
