"""Snapshots of jobs: a job is saved to a snapshot, restored from a snapshot, or forked.

Exact snapshots have separate page keys, from a cache salt that no other request has. The engine
searches VRAM first, and under the usual keys it might find KV of the same text with different
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from tiered_kv.connectors.runtime.between_turns.turn_ends import TurnEnds
from tiered_kv.connectors.runtime.build import GapGroup
from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.job_table import Job
from tiered_kv.connectors.runtime.parts import Pages
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.formatting import count
from tiered_kv.keys import PageKey
from tiered_kv.orders import ContextPage
from tiered_kv.pages.held_pages import HeldPages
from tiered_kv.pages.snapshot_orders import SnapshotFlight
from tiered_kv.policies.base import JobKey, TurnEnd, job_scope
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.status import JobForked, JobRestored, SnapshotMade

from .capture import Captures, is_named_by_tokens
from .context_pages import MOST_PARENTS, Context, ContextNames, context_pages, remember_tail
from .file_thread import Opened, SnapshotFiles
from .operations import MOST_AT_ONCE, Operations, Steps, Wait, file_work


class NoFolderError(SnapshotError):
    """Refusal of an engine without a snapshot folder, or in observe mode. It can neither take nor
    restore snapshots, nor fork jobs."""


class NoSnapshots:
    """Stand-in for ``Snapshots`` when there is no folder, or in observe mode.

    Args:
        observes: True in observe mode.
    """

    under_way = False

    def __init__(self, *, observes: bool) -> None:
        self._observes = observes

    def take(self, *_: object, **__: object) -> NoReturn:
        """Refuse the request. Also used as ``restore``, ``fork`` and ``outcome``.

        Raises:
            NoFolderError: always.
        """
        raise NoFolderError(
            "In observe mode this engine keeps no KV: unset TIERED_KV_MODE, and restart the server."
            if self._observes
            else "This server has no snapshot folder: set TIERED_KV_SNAPSHOT_PATH, and restart it."
        )

    restore = fork = outcome = take

    def parents(self, job: JobKey) -> tuple[str, ...]:
        """Return an empty tuple, because no job was forked or restored."""
        return ()

    def on_ended(self, turn: Turn) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Do nothing. Also used as the handlers of the other events."""

    on_reports = release_vram = on_reset = close = advance


MOST_NAMESAKES = 2
"""Maximum number of jobs that are searched for by one name."""


class Snapshots:
    """Takes snapshots, and restores and forks jobs. Used on the scheduler's thread.

    Args:
        manager: gaps and jobs.
        wall: seconds since the epoch.

    Attributes:
        operations: running operations, and the outcomes of finished ones.
        contexts: contexts of jobs between turns.
        orders: snapshot orders for the workers.
    """

    def __init__(
        self,
        engine: EngineState,
        pages: Pages,
        manager: TurnEnds,
        captures: Captures,
        files: SnapshotFiles,
        wall: Callable[[], float],
    ) -> None:
        self.operations = Operations(engine.clock)
        self.contexts = captures.contexts
        manager.jobs.on_forgotten = self.contexts.forget
        self.orders = pages.dispatch.snapshots
        self._facts = engine.facts
        self._index = pages.index
        self._tails = pages.tails
        self._manager = manager
        self._captures = captures
        self._files = files
        self._counters = engine.counters
        self._clock = engine.clock
        self._wall = wall

    # -- requests -------------------------------------------------------------------------

    def take(self, name: str, to: str, *, wait_turn: bool, stop: bool, exact: bool) -> int | None:
        """Start taking a job's snapshot. Returns the number of the operation, or None if no job of
        that name runs or has a stored context.

        Args:
            to: name of the snapshot.
            wait_turn: True to take the snapshot once the running turn has finished.
            stop: True to stop the running turn after its next token.

        Raises:
            SnapshotError: the snapshot is not possible; the message says what to do.
        """
        job = self._job(name)
        if job is None:
            return None
        self._check(exact)
        return self.operations.begin(self._take(job, to, wait_turn, stop, exact))

    def restore(self, name: str, job: str | None, *, salt: str | None) -> int:
        """Start restoring a snapshot. Returns the number of the operation.

        Args:
            job: name of the restored job; None for the name in the snapshot.
            salt: an unused cache salt, to restore an exact snapshot as exact; None otherwise.

        Raises:
            SnapshotError: the restore is not possible.
        """
        self._check(exact=salt is not None)
        return self.operations.begin(self._restore(name, job, salt))

    def fork(self, name: str, children: Sequence[str], *, exact: bool) -> int | None:
        """Start forking a job. Returns the number of the operation, or None if no job of that name
        runs or has a stored context.

        Raises:
            SnapshotError: the fork is not possible.
        """
        job = self._job(name)
        if job is None:
            return None
        self._check(exact)
        return self.operations.begin(self._fork(job, children, exact))

    def _check(self, exact: bool) -> None:
        if not self._facts.groups or not self._index.num_slots:
            raise SnapshotError(
                "Snapshots pass through CPU memory, and this engine keeps no KV there: set "
                "TIERED_KV_CPU_GIB above 0, and serve a model whose KV can be offloaded."
            )
        if self.operations.full or self.orders.in_flight >= MOST_AT_ONCE:  # a disk may hang
            raise SnapshotError("Too many operations are in progress: try again later.")
        if exact and self._facts.speculates:
            raise SnapshotError(
                "--exact needs an engine without speculative decoding: serve without it, or "
                "leave out --exact."
            )

    def _job(self, name: str) -> Job | None:
        found = [
            job
            for job in self._manager.jobs.named(name, MOST_NAMESAKES)
            if job.running or self.contexts.get(job.key) is not None
        ]
        if len(found) > 1:
            raise SnapshotError(
                "Several jobs have this name, with different cache salts: give each job its "
                "own name."
            )
        return found[0] if found else None

    # -- operations ---------------------------------------------------------------------

    def _take(self, job: Job, to: str, wait_turn: bool, stop: bool, exact: bool) -> Steps:
        started = self._clock()
        with self._captures.hold_nothing() as held, self._files.draft(to) as drafting:
            draft = yield from file_work("creating the folder", drafting)
            self._files.identity()
            if stop or wait_turn:
                yield from self._captures.turn_over(job, stop=stop)
            pausing = self._clock()
            captured = yield from self._captures.of(job, held, exact=exact)
            pause_s = self._clock() - pausing
            writing = self.orders.write(str(draft.folder), captured.pages, held)
            yield Wait("writing pages", lambda: writing.over)
            if writing.failed:
                raise SnapshotError(
                    f"{count(writing.failed, 'page')} could not be written: see the engine's log, "
                    "and check the folder's free space."
                )
            sealing = self._files.seal(draft, captured, job.key.name, exact, self._wall())
            manifest = yield from file_work("writing the manifest", sealing)
        self._counters.add("snapshots_taken")
        return SnapshotMade(
            engine=self._facts.replica,
            name=to,
            job=job.key.name,
            tokens=len(manifest.token_ids),
            kv_tokens=manifest.kv_tokens,
            pages=len(manifest.pages),
            stored_bytes=manifest.stored_bytes,
            shared_bytes=manifest.shared_bytes,
            exact=exact,
            capture_ms=round(1e3 * pause_s, 3),
            durable_ms=round(1e3 * (self._clock() - started), 3),
        )

    def _restore(self, name: str, job: str | None, salt: str | None) -> Steps:
        started = self._clock()
        opening = self._files.open(name, salt)
        opened = yield from file_work("opening the snapshot", opening)
        manifest, named = opened.manifest, opened.named
        key = JobKey(job_scope(opened.salt), job or manifest.job)
        before = self._turns_of(key)
        pages = context_pages(named, self._facts)
        theirs = {(page.group, page.block) for page in manifest.pages}
        if theirs != {(page.group, page.block) for page in pages}:
            raise SnapshotError(f"The pages of {name} do not match the length of its context.")
        if len(pages) > self._index.num_slots:
            raise SnapshotError(
                f"{name} has {count(len(pages), 'page')}, but CPU memory holds only "
                f"{self._index.num_slots:,}: raise TIERED_KV_CPU_GIB."
            )
        keys = [page.key for page in pages]
        with self._captures.hold_nothing() as held:
            if salt is not None:
                held.make_private(keys)
            yield from self._read(opened, pages, held)
            if self._turns_of(key) != before:
                raise SnapshotError(
                    "A turn of this job arrived while its snapshot was read: choose another name "
                    "with --job, or restore the snapshot after the job has finished."
                )
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
                parents=parents[-MOST_PARENTS:],
                sampling=manifest.sampling,
            )
            self._adopt(key, context, named, keys)
            held.publish()
        self._counters.add("snapshots_restored")
        return JobRestored(
            engine=self._facts.replica,
            job=key.name,
            tokens=len(manifest.token_ids),
            kv_tokens=manifest.kv_tokens,
            pages=len(pages),
            cache_salt=opened.salt,
            ms=round(1e3 * (self._clock() - started), 3),
        )

    def _turns_of(self, key: JobKey) -> tuple[int, int] | None:
        """Return the number of a job that is between turns, and its number of turns; None if no job
        has that key.

        Raises:
            SnapshotError: the job is running.
        """
        job = self._manager.jobs.get(key)
        if job is not None and job.running:
            raise SnapshotError("A job with this name is running: choose another name with --job.")
        return (job.number, job.turns) if job is not None else None

    def _read(
        self, opened: Opened, pages: Sequence[ContextPage], held: HeldPages
    ) -> Generator[Wait, None, None]:
        """Hold a snapshot's pages in CPU memory. Pages that CPU memory lacks are read from the
        snapshot's files.

        Pages that a save is moving are awaited. If the save fails, these pages are read from the
        files too. Each round of reads must get further than the previous one. Raises SnapshotError
        if pages cannot be read, do not fit or do not stay in CPU memory.
        """
        by_key, least = {page.key: page for page in pages}, len(pages) + 1
        while missing := held.hold(by_key):
            absent = [by_key[key] for key in missing if not self._index.state(key).moving]
            if not absent:
                yield Wait("copying pages to CPU memory", held.arrival(missing))
                continue
            if len(missing) >= least:
                raise SnapshotError(
                    "Pages that were just read have been evicted from CPU memory: try again."
                )
            least = len(missing)
            reading = self.orders.read(str(opened.path), absent)
            if reading is None:
                raise SnapshotError("All of CPU memory is in use: try again later.")
            yield _all_read(reading, held.arrival([page.key for page in absent]))
            if reading.failed:
                raise SnapshotError(
                    f"Nothing was restored: {count(reading.failed, 'page')} of {opened.path.name} "
                    "could not be read, or did not match the manifest."
                )

    def _fork(self, job: Job, children: Sequence[str], exact: bool) -> Steps:
        with self._captures.hold_nothing() as held:
            captured = yield from self._captures.of(job, held, exact=exact)
            salt, pages = captured.salt, captured.keys
            keys = [JobKey(job_scope(salt), child) for child in children]
            for key in keys:
                if self._manager.jobs.get(key) is not None:
                    raise SnapshotError(
                        f"A job named {key.name!r} already exists: choose another name."
                    )
            if held.hold(pages):
                raise SnapshotError("A page of this context has just been evicted: try again.")
            remember_tail(captured.named, self._facts, self._tails)
            parents = (*captured.context.parents, job.key.name)[-MOST_PARENTS:]
            context = replace(captured.context, salt=salt, parents=parents)
            for key in keys:
                self._adopt(key, context, captured.named, pages)
            held.publish()
        self._counters.add("jobs_forked", len(keys))
        return JobForked(
            engine=self._facts.replica,
            jobs=tuple(children),
            tokens=len(context.token_ids),
            kv_tokens=context.kv_tokens,
            cache_salt=salt,
            extra_pages=captured.saved,
        )

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

    # -- engine events --------------------------------------------------------------------

    def on_ended(self, turn: Turn) -> None:
        """Store the context of a finished turn if its job continues and token ids identify its
        pages; otherwise delete the job's stored context."""
        job = turn.job
        if job is None:
            return
        goes_on = turn.source.admitted and not turn.hints.is_last_step
        goes_on = goes_on and self._manager.jobs.get(job.key) is job
        if not (goes_on and is_named_by_tokens(turn)):
            self.contexts.forget(job.key)
            return
        self.contexts.remember(
            job.key, Context.of(turn.request, turn.number, self._captures.parents(job.key))
        )

    def advance(self) -> None:
        """Advance the running operations, between two steps."""
        self.operations.advance()

    def on_reports(self) -> None:
        """Hold the pages that have arrived, before they can be evicted."""
        self.operations.poll()

    def release_vram(self) -> None:
        """Release every VRAM block that captures hold. A capture that still needs such a block
        fails."""
        self._captures.release_vram()

    @property
    def under_way(self) -> bool:
        """True if a step would advance an operation."""
        return self.operations.under_way

    def parents(self, job: JobKey) -> tuple[str, ...]:
        """Return the names of the jobs from which a job was forked or restored, oldest first."""
        return self._captures.parents(job)

    def outcome(self, number: int) -> dict[str, Any]:
        """Return the state of an operation, as JSON."""
        return self.operations.outcome(number)

    def on_reset(self) -> None:
        """Fail every operation and forget all contexts, because existing KV has become invalid."""
        self.operations.end_all("The cache was reset during the operation: try again.")
        self.contexts.clear()

    def drain(self) -> None:
        """Wait until submitted file work is done. Used by tests."""
        self._files.thread.submit(int).result()

    def close(self) -> None:
        """Fail every operation, and stop the thread. Idempotent."""
        self.operations.end_all("The engine stopped.")
        self._files.close()


def _all_read(reading: SnapshotFlight, arrived: Callable[[], bool]) -> Wait:
    return Wait("reading pages", lambda: arrived() and reading.over)


def build_snapshots(
    deps: Dependencies, engine: EngineState, pages: Pages, gaps: GapGroup
) -> Snapshots | NoSnapshots:
    """Create the snapshots component. Returns a stand-in that refuses every request if there is no
    snapshot folder, or in observe mode."""
    root = deps.config.snapshot_path
    if root is None or deps.config.observes:
        return NoSnapshots(observes=deps.config.observes)
    facts, fingerprints = deps.facts, deps.fingerprints
    names = ContextNames(facts, pages.names, deps.make_request)
    files = SnapshotFiles(root, facts, fingerprints, names)
    captures = Captures(engine, pages, fingerprints.group_of, names, files.thread)
    return Snapshots(engine, pages, gaps.manager, captures, files, deps.wall)
