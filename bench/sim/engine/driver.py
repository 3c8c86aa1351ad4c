"""The driver of a run: plays a workload's jobs on one engine, with their turns and gaps."""

from __future__ import annotations

import heapq
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path

from tiered_kv.bench.sim.servers.arrivals import GATE_EVERY_S, Gate, Ordering
from tiered_kv.bench.sim.servers.foresight import KnownGaps, KnownJobs
from tiered_kv.bench.sim.servers.servers import CLAIRVOYANT, Server
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.pages.cpu_index import PromotedPages

from .machines import Machine, Tiers
from .metrics import JobRecord, Outcome, TurnRecord
from .virtual_clock_engine import BEGIN_S, Engine

POLL_S = 0.01
"""Time between steps while the engine waits for an event whose time is unknown, seconds."""
STALLED_S = 600.0
"""Seconds without progress after which a run counts as failed."""
DRAIN_S = 120.0
"""Maximum time for pending copies after the last job, seconds."""
TOKENS_APART = 1_000
"""Token ids reserved for each job, one per turn."""


class Stalled(AssertionError):
    """Requests are waiting, and no remaining event could admit them, or nothing was computed for
    ``STALLED_S`` seconds."""


@dataclass(slots=True)
class _Running:
    """A running job.

    Attributes:
        program: name of the job or, for a sub-agent, of the top-level job that started it.
        parent: the job that started this sub-agent; None for other jobs.
        children: number of running sub-agents that the next turn waits for.
        chain, tokens: block hashes and token ids of the context.
    """

    job: SimJob
    program: str
    parent: _Running | None
    record: JobRecord
    children: int = 0
    chain: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def turn(self) -> SimTurn:
        """The job's latest turn."""
        return self.job.turns[len(self.record.turns) - 1]

    @property
    def is_last_turn(self) -> bool:
        return len(self.record.turns) == len(self.job.turns)


def simulate(
    machine: Machine,
    server: Server,
    workload: Workload,
    tiers: Tiers,
    trace: Path | None = None,
) -> Outcome:
    """Run the workload's jobs on a server until all have finished.

    Args:
        tiers: sizes of the tiers below VRAM.
        trace: file for the connector's trace, if the server has a connector; None writes no trace.

    Raises:
        ValueError: a job does not fit on the machine.
        Stalled: a request waits forever.
        AssertionError: blocks, orders or turns were not released at the end.
    """
    with tempfile.TemporaryDirectory(prefix="sim-") as folder:
        run = _Run(machine, server, workload, tiers, Path(folder), trace)
        try:
            return run.until_all_finish()
        finally:
            run.engine.close()


class _Run:
    def __init__(
        self,
        machine: Machine,
        server: Server,
        workload: Workload,
        tiers: Tiers,
        folder: Path,
        trace: Path | None,
    ) -> None:
        self._machine, self._server, self._workload = machine, server, workload
        self._block = block = machine.block or workload.block
        self._beside = machine.beside(block)
        everyone = [one for job in workload.jobs for one in job.everyone()]
        pool = held = machine.pool_tokens // block
        if server.infinite:
            pool = sum(-(-one.longest // block) + 2 for one in everyone) + machine.max_seqs
            turns = sum(len(one.turns) for one in everyone) + machine.max_seqs
            pool += turns * self._beside // block
            held = min(held, pool) if server.within_reach else pool
        longest = max((one.longest for one in everyone), default=1)
        if longest >= min(held * block - self._beside, machine.max_len):
            raise ValueError(
                f"a job of {workload.name} grows to {longest} tokens, which {machine.name} cannot "
                "hold: leave such jobs out with Workload.that_fit"
            )
        self._job_forecast = KnownJobs(everyone, block) if server.knowing else None
        self.engine = Engine(
            machine,
            server,
            folder,
            pool_blocks=pool,
            held_blocks=held,
            block=block,
            max_len=min(machine.max_len, -(-(longest + 1) // block) * block),
            tiers=tiers,
            policy=KnownGaps(everyone) if server.policy == CLAIRVOYANT else None,
            job_forecast=self._job_forecast,
            trace=trace,
        )
        self._gate = Gate(machine.pool_tokens if server.gated else math.inf)
        # Short contexts may have no full block, so only their tokens distinguish them.
        distinct = everyone if machine.groups else []
        self._first_token = {one.name: n * TOKENS_APART for n, one in enumerate(distinct)}
        self._ordering = Ordering(server.order)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = count()
        self._asked: dict[str, _Running] = {}
        self._records: list[JobRecord] = []
        self._left = len(everyone)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._tie), act))

    def until_all_finish(self) -> Outcome:
        """Run until all jobs have finished, then check that the engine released all their blocks,
        orders and turns. Returns the outcome.

        Raises:
            Stalled: a request waits forever.
            AssertionError: blocks, orders or turns were not released.
        """
        engine = self.engine
        for job in self._workload.jobs:
            self._at(BEGIN_S + job.arrives_s, partial(self._begin, job, None))
        if self._server.gated:
            self._tick()
        progress = engine.now
        while self._left:
            while self._next_arrival <= engine.now:
                heapq.heappop(self._events)[2]()
            self._ordering.put_starved_first(engine.scheduler, engine.now)
            before = engine.now
            if engine.busy:
                for request_id in engine.step(self._next_arrival):
                    self._ended(request_id)
            computed = engine.now > before
            if not computed:
                self._wait()
            if computed or not engine.scheduler.has_requests():
                progress = engine.now
            elif engine.now - progress > STALLED_S:
                raise Stalled(self._state())
        outcome = self._outcome()
        self._drain()
        engine.check_clean()
        return outcome

    @property
    def _next_arrival(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _wait(self) -> None:
        """Advance the clock to the next event, because nothing can be computed before it.

        Raises:
            Stalled: there is no further event.
        """
        engine = self.engine
        when = min(self._next_arrival, engine.next_event)
        if engine.scheduler.has_requests():
            when = min(when, engine.now + POLL_S)
        if when == math.inf:
            raise Stalled(self._state())
        engine.now = max(engine.now, when)

    def _drain(self) -> None:
        engine, until = self.engine, self.engine.now + DRAIN_S
        while engine.busy and engine.now < until:
            engine.step(math.inf)
            soon = engine.now + POLL_S
            engine.now = max(soon, engine.next_event) if engine.next_event < math.inf else soon

    def _state(self) -> str:
        running, waiting = self.engine.scheduler.get_request_counts()
        return (
            f"{self._server.name}, {self._workload.name}: no progress at "
            f"{self.engine.now:.1f} s: {running} running, {waiting} waiting, {self._left} jobs "
            f"left, {self.engine.pool.get_num_free_blocks()} blocks free"
        )

    def _tick(self) -> None:
        self._gate.tick()
        if self._left:
            self._at(self.engine.now + GATE_EVERY_S, self._tick)

    # -- jobs -----------------------------------------------------------------------

    def _begin(self, job: SimJob, parent: _Running | None) -> None:
        record = JobRecord(job.name, self.engine.now, parent is not None)
        running = _Running(job, parent.program if parent else job.name, parent, record)
        self._ordering.began(job.name, parent.job.name if parent is not None else None)
        if job.prefix:
            blocks = range(job.prefix_tokens // self._block)
            running.chain = _hashes(job.prefix, 0, blocks)
        self._turn(running)

    def _turn(self, running: _Running) -> None:
        """Start the job's next turn. The gate may hold it back unless the job is a sub-agent."""
        number = len(running.record.turns)
        turn = running.job.turns[number]
        after_agents = number > 0 and bool(running.job.turns[number - 1].agents)
        record = TurnRecord(self.engine.now, turn.prompt, turn.output, turn.shared, after_agents)
        running.record.turns.append(record)
        if running.parent is not None:
            self._ask(running, number)
        else:
            tokens = turn.prompt + turn.output + self._beside
            self._gate.ask(running.program, tokens, partial(self._ask, running, number))

    def _ask(self, running: _Running, number: int) -> None:
        job, turn = running.job, running.turn
        request_id = f"{job.name}#{number}"
        if number:
            running.chain = running.chain[: turn.shared // self._block]
        blocks = range(len(running.chain), (turn.prompt + turn.output) // self._block)
        running.chain += _hashes(job.name, number, blocks)
        del running.tokens[turn.shared :]  # no request uses the list any more
        running.tokens += [self._first_token.get(job.name, 0) + number + 1] * turn.added
        priority = self._ordering.asked(job.name, request_id, self.engine.now)
        self._asked[request_id] = running
        if self._job_forecast is not None:
            self._job_forecast.asked(job.name, number + 1)
        self.engine.add(
            request_id,
            running.record.turns[-1],
            running.chain,
            running.tokens,
            self._params(running),
            priority,
        )

    def _params(self, running: _Running) -> dict[str, object] | None:
        hints, job, turn = self._workload.hints, running.job, running.turn
        if hints is Hints.NONE:
            return None
        last = running.is_last_turn and job.says_last
        parent = running.parent if not self._server.orphans else None
        said = {
            "job_id": job.name,
            "parent_job_id": parent.job.name if parent is not None else "",
            "is_last_step": last or hints is Hints.WRONG,
            "tool_command": turn.tool,
            "tool_name": turn.tool_name,
        }
        return {name: value for name, value in said.items() if value != ""}

    def _ended(self, request_id: str) -> None:
        engine = self.engine
        running = self._asked.pop(request_id)
        job, turn, record = running.job, running.turn, running.record.turns[-1]
        over = record.ended_s = engine.now + self._machine.overhead_s
        running.tokens += [0] * turn.output
        waited_s, served_s = record.admitted_s - record.asked_s, engine.now - record.admitted_s
        self._ordering.answered(job.name, request_id, waited_s, served_s)
        if running.parent is None:
            self._gate.grew(running.program, turn.prompt + turn.output + self._beside)
        if running.is_last_turn:
            self._job_over(running)
            return
        running.children = len(turn.agents)
        for agent in turn.agents:
            self._at(over + agent.arrives_s, partial(self._begin, agent, running))
        if not turn.agents:
            self._at(over + turn.gap_s, partial(self._turn, running))

    def _job_over(self, running: _Running) -> None:
        self._records.append(running.record)
        self._left -= 1
        parent = running.parent
        if parent is None:
            self._gate.over(running.program)
            return
        parent.children -= 1
        if not parent.children:
            self._at(running.record.ended_s + parent.turn.gap_s, partial(self._turn, parent))

    def _outcome(self) -> Outcome:
        engine, worker = self.engine, self.engine.worker
        promoted = engine.half.pages.index.promoted if worker else PromotedPages()
        return Outcome(
            server=self._server.name,
            jobs=tuple(sorted(self._records, key=lambda job: job.name)),
            steps=engine.steps,
            seconds=engine.now - BEGIN_S,
            moved={name: line.carried for name, line in worker.lines.items()} if worker else {},
            promoted_used=promoted.used,
            promoted_wasted=promoted.wasted,
        )


def _hashes(name: str, turn: int, blocks: range) -> list[bytes]:
    """Return the hashes of the blocks that a job's turn, or a shared prefix, has written."""
    head = blake2b(name.encode(), digest_size=16).digest() + turn.to_bytes(8, "big")
    return [head + block.to_bytes(8, "big") for block in blocks]
