"""Handling of arriving turns outside the engine, as described by other systems.

``Ordering`` sets the priorities of requests: by job, or by Autellix's PLAS, which prefers the job
that has received the least service so far. PLAS has levels whose bounds double, and a job returns
to the first level once it has waited ``STARVED`` times as long as it was served.

``Gate`` pauses and resumes whole programs (jobs with their sub-agents) by the size of their
contexts, as ThunderAgent does. An admitted program keeps its place in VRAM while its tools run, as
far as vLLM's prefix cache allows. Every five seconds the contexts of the admitted programs are
summed. While the sum exceeds the pool, the program admitted last is paused, and its next turns are
held back. While there is space, programs that are held back are admitted: first the paused
programs, then new programs in order of arrival. A single program is never held back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

FIRST_QUANTUM_S = 1.0
"""Service bound of the first level, seconds. Each level doubles the bound of the previous one."""
STARVED = 8.0
"""β: a job is served first once its waiting time reaches this multiple of its service time."""
CHECK_EVERY_S = 0.5
GATE_EVERY_S = 5.0


class Order(Enum):
    """Orders in which requests are served: by the arrival of the request, by the arrival of its
    job, or by the service that its job has attained so far (PLAS)."""

    ARRIVAL = "arrival"
    JOB = "job"
    ATTAINED = "attained"


class Ordering:
    """Priorities of requests. Requests with a lower value run first; vLLM serves requests with
    equal values in order of arrival.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._rank: dict[str, int] = {}
        self._served_s: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}
        self._waiting: dict[str, tuple[str, float]] = {}  # request -> job, waiting since
        self._checked_at = -math.inf

    def began(self, job: str, parent: str | None) -> None:
        """Register a starting job. A sub-agent has the rank of its parent.

        Args:
            parent: job that started this sub-agent; None for other jobs.
        """
        rank = self._rank[parent] if parent is not None else len(self._rank)
        self._rank[job] = rank

    def asked(self, job: str, request_id: str, now: float) -> int:
        """Record that a turn's request has arrived, and return its priority."""
        self._waiting[request_id] = (job, now)
        if self._order is Order.JOB:
            return self._rank[job]
        return self._level(job) if self._order is Order.ATTAINED else 0

    def answered(self, job: str, request_id: str, waited_s: float, served_s: float) -> None:
        """Record the waiting and service times of a finished turn."""
        self._waiting.pop(request_id, None)
        self._served_s[job] = self._served_s.get(job, 0.0) + served_s
        self._waited_s[job] = self._waited_s.get(job, 0.0) + waited_s

    def _level(self, job: str) -> int:
        served = self._served_s.get(job, 0.0)
        if served > 0 and self._waited_s.get(job, 0.0) >= STARVED * served:
            self._served_s[job] = self._waited_s[job] = 0.0
            return 0
        return max(0, math.ceil(math.log2(served / FIRST_QUANTUM_S))) if served > 0 else 0

    def put_starved_first(self, scheduler: Any, now: float) -> None:
        """Move the requests of jobs that have waited too long (see ``STARVED``) to the front of
        vLLM's queue, at most every ``CHECK_EVERY_S`` seconds. With other orders than
        ``Order.ATTAINED``, does nothing.
        """
        if self._order is not Order.ATTAINED or now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        for request in list(scheduler.waiting):
            job, since = self._waiting[request.request_id]
            served = max(self._served_s.get(job, 0.0), FIRST_QUANTUM_S)
            waited = self._waited_s.get(job, 0.0) + now - since
            if request.priority > 0 and waited >= STARVED * served:
                scheduler.waiting.remove_request(request)
                request.priority = 0
                scheduler.waiting.add_request(request)


class Gate:
    """Admission control for the programs of one server.

    Args:
        pool_tokens: limit on the contexts of all admitted programs; infinite to admit all.
    """

    def __init__(self, pool_tokens: float) -> None:
        self._pool = pool_tokens
        self._active: dict[str, int] = {}  # program -> tokens, in order of admission
        self._paused: dict[str, int] = {}
        self._held: dict[str, list[Callable[[], None]]] = {}

    def ask(self, program: str, tokens: int, send: Callable[[], None]) -> None:
        """Call ``send`` for a program's turn, now or once the program is admitted."""
        if program in self._active:
            self._active[program] = tokens
            send()
            return
        known = program in self._paused or program in self._held
        self._held.setdefault(program, []).append(send)
        if known or self._paused or not self._fits(tokens):
            self._paused[program] = tokens
        else:
            self._admit(program, tokens)

    def _fits(self, tokens: int) -> bool:
        return not self._active or sum(self._active.values()) + tokens <= self._pool

    def _admit(self, program: str, tokens: int) -> None:
        self._active[program] = tokens
        for send in self._held.pop(program, ()):
            send()

    def grew(self, program: str, tokens: int) -> None:
        """Record the size of a program's context at the end of a turn."""
        if program in self._active:
            self._active[program] = tokens

    def over(self, program: str) -> None:
        """Forget a finished program."""
        self._active.pop(program, None)
        self._paused.pop(program, None)

    def tick(self) -> None:
        """Pause programs while the admitted ones exceed the pool, and admit programs that fit. Call
        every ``GATE_EVERY_S`` seconds.
        """
        while len(self._active) > 1 and sum(self._active.values()) > self._pool:
            last = next(reversed(self._active))
            self._paused = {last: self._active.pop(last), **self._paused}
        for program, tokens in list(self._paused.items()):
            if not self._fits(tokens):
                return
            del self._paused[program]
            self._admit(program, tokens)
