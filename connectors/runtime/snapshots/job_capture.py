"""Capture of a job: of its turn, if one runs, or of the context that it waits with.

An exact one has names of its own, by a cache salt that nobody else has.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator

from tiered_kv.connectors.runtime.job_table import Job
from tiered_kv.connectors.runtime.pages.saves import kept_tokens
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.pages.held_pages import HeldPages
from tiered_kv.policies.base import JobKey
from tiered_kv.snapshot.manifest import SnapshotError

from .capture import Captured, Captures
from .job_contexts import Contexts
from .operations import Wait

LONGEST_TURN_S = 3600.0
"""Longest wait for the end of a turn, seconds."""


def fresh_salt() -> str:
    """A cache salt that nobody else has."""
    return f"tiered-kv-exact-{secrets.token_hex(16)}"


def is_named_by_tokens(turn: Turn) -> bool:
    """True if a turn's tokens and cache salt alone tell its pages from others."""
    return turn.request.text_only and turn.request.adapter is None


class JobCaptures:
    """Captures jobs. One thread, the scheduler's.

    Args:
        pages: captures contexts.

    Attributes:
        contexts: contexts of the jobs that wait.
    """

    def __init__(self, pages: Captures, turns: LiveTurns) -> None:
        self.contexts = Contexts()
        self._pages = pages
        self._turns = turns

    def turn_over(self, job: Job, *, stop: bool) -> Generator[Wait, None, None]:
        """Wait for the end of a job's turns; with ``stop`` they end with their next token."""
        for request_id in job.running if stop else ():
            turn = self._turns.by_id.get(request_id)
            if turn is not None:
                turn.request.end_after_next_token()
        yield Wait("the turn runs to its end", lambda: not job.running, LONGEST_TURN_S)

    def hold_nothing(self) -> HeldPages:
        """Return a holder without pages, for a capture to fill."""
        return self._pages.hold_nothing()

    def release_vram(self) -> None:
        """Release every block of VRAM that captures hold. A capture that still needs one fails."""
        self._pages.release_vram()

    def of(self, job: Job, held: HeldPages, *, exact: bool) -> Generator[Wait, None, Captured]:
        """Capture a job, whatever it does.

        Args:
            held: holds the pages; with ``exact`` it forgets them at the end unless published.

        Raises:
            SnapshotError: it cannot be captured; the sentence says what to do.
        """
        while (turn := self._running(job)) is not None and not self._has_boundary(turn):
            yield self._boundary(turn)  # another turn may run once this one has ended
        if turn is None:
            context = self.contexts.get(job.key)
            if context is None:
                raise SnapshotError(
                    "What this job's last turn said is not remembered any more: take it while a "
                    "turn runs."
                )
            if exact:
                raise SnapshotError(
                    "Pages of a job that waits may be of another computation of the same text: "
                    "exact needs a turn that runs."
                )
            return (yield from self._pages.waiting(context, held))
        if not is_named_by_tokens(turn):
            raise SnapshotError(
                "Only contexts of text, of the base model, can be taken: this turn has images, "
                "embeddings or an adapter."
            )
        salt = turn.request.cache_salt
        if exact:
            self._check_exact(turn)
            salt = fresh_salt()
        return (yield from self._pages.running(turn, salt, self.parents(job.key), held))

    def _running(self, job: Job) -> Turn | None:
        turns = [self._turns.by_id[one] for one in job.running if one in self._turns.by_id]
        if len(turns) > 1:
            raise SnapshotError(
                "Several turns of this job run at once: wait for one of them (--wait-turn)."
            )
        return turns[0] if turns else None

    def _boundary(self, turn: Turn) -> Wait:
        live = self._turns.by_id
        return Wait(
            "the turn gets its first token",
            lambda: live.get(turn.request_id) is not turn or self._has_boundary(turn),
            LONGEST_TURN_S,
        )

    def _has_boundary(self, turn: Turn) -> bool:
        request = turn.request
        return (
            not turn.loading
            and request.num_output_tokens > 0
            and kept_tokens(request) >= request.num_prompt_tokens
        )

    def _check_exact(self, turn: Turn) -> None:
        if (reason := turn.request.sampling.inexact) is not None:
            raise SnapshotError(f"Exact is not possible: {reason}")
        if self._turns.running > 1:
            raise SnapshotError(
                "Exact needs a turn that is alone in its steps, since kernels sum in another order "
                "for others: wait until nothing else runs, or leave --exact out."
            )

    def parents(self, job: JobKey) -> tuple[str, ...]:
        """Names of the jobs that it was forked or restored from, oldest first."""
        context = self.contexts.get(job)
        return context.parents if context is not None else ()
