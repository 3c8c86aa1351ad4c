"""One run: the jobs of a workload, with their turns and gaps, on one engine until all finish."""

from __future__ import annotations

import heapq
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from tiered_kv.bench.sim.servers.arrivals import GATE_EVERY_S, Gate, Ordering
from tiered_kv.bench.sim.servers.foresight import KnownGaps, KnownJobs
from tiered_kv.bench.sim.servers.servers import CLAIRVOYANT, Server
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, Workload
from tiered_kv.pages.cpu_index import PromotedPages
from tiered_kv.policies.base import TurnPolicy

from .machines import Machine
from .metrics import JobRecord, Outcome, TurnRecord
from .virtual_clock_engine import BEGIN_S, Answer, Ask, Engine

POLL_S = 0.01
"""Seconds between steps while the engine waits for nothing that has a known time."""
STALLED_S = 600.0
"""Seconds without progress after which a run has failed."""
DRAIN_S = 120.0
"""Seconds for copies under way after the last job."""
TOKENS_APART = 1_000
"""Token ids for each job: one for every turn."""


class Stalled(AssertionError):
    """Requests wait, and no event is left that could admit them."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes of the tiers below VRAM, for servers that have them."""

    cpu: float = 64 * 2**30
    ssd: float = 512 * 2**30


@dataclass(slots=True)
class _Running:
    """A job under way."""

    job: SimJob
    program: str  # its own name, or the name of the job that started it
    began_s: float
    parent: _Running | None
    record: JobRecord
    turn: int = 0
    asked_s: float = 0.0
    children: int = 0
    ended_s: float = 0.0  # of its last turn so far
    chain: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def simulate(
    machine: Machine,
    server: Server,
    workload: Workload,
    tiers: Tiers,
    trace: Path | None = None,
) -> Outcome:
    """Run the workload's jobs on a server until all have finished.

    Args:
        trace: file of the connector's trace, if the server has a connector; None writes none.

    Raises:
        ValueError: a job does not fit into the machine.
        Stalled: a request waits forever.
        AssertionError: blocks, orders or turns were not released at the end.
    """
    with tempfile.TemporaryDirectory(prefix="sim-") as folder:
        return _Run(machine, server, workload, tiers, Path(folder), trace).run()


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
        self._machine = machine
        block = machine.block or workload.block
        self._workload = workload = replace(workload, block=block)
        self._beside = machine.beside(block)
        everyone = [one for job in workload.jobs for one in job.everyone()]
        pool = held = machine.pool_tokens // block
        if server.infinite:
            pool = sum(-(-one.longest // block) + 2 for one in everyone) + machine.max_seqs
            turns = sum(len(one.turns) for one in everyone) + machine.max_seqs
            pool += turns * self._beside // block
        held = min(held, pool) if server.within_reach else pool
        policy: TurnPolicy | None = None
        if server.policy == CLAIRVOYANT:
            policy = KnownGaps(
                {
                    (one.name, number): turn.gap_s
                    for one in everyone
                    for number, turn in enumerate(one.turns, 1)
                }
            )
        longest = max((one.longest for one in everyone), default=1)
        if longest >= min(held * block - self._beside, machine.max_len):
            raise ValueError(
                f"a job of {workload.name} grows to {longest} tokens, which {machine.name} cannot "
                "hold: leave such jobs out with Workload.that_fit"
            )
        self._job_forecast: KnownJobs | None = None
        if server.knowing:
            contexts = {
                one.name: [turn.prompt + turn.output for turn in one.turns] for one in everyone
            }
            self._job_forecast = KnownJobs(contexts, block)
        self.engine = Engine(
            machine,
            server,
            folder,
            pool_blocks=pool,
            held_blocks=held,
            block=block,
            max_len=min(machine.max_len, -(-(longest + 1) // block) * block),
            cpu_bytes=tiers.cpu,
            ssd_bytes=tiers.ssd,
            policy=policy,
            job_forecast=self._job_forecast,
            trace=trace,
        )
        self._gate = Gate(machine.pool_tokens) if server.gated else None
        # With long blocks, contexts that differ may have no full one. Their tokens tell them apart.
        distinct = everyone if machine.groups else []
        self._first_token = {one.name: n * TOKENS_APART for n, one in enumerate(distinct)}
        self._ordering = Ordering(server.order)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = 0
        self._asked: dict[str, _Running] = {}
        self._records: list[JobRecord] = []
        self._left = len(everyone)
        self._name = server.name

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._tie += 1
        heapq.heappush(self._events, (when, self._tie, act))

    def run(self) -> Outcome:
        engine = self.engine
        for job in self._workload.jobs:
            self._at(BEGIN_S + job.arrives_s, lambda job=job: self._begin(job, None))  # type: ignore[misc]
        if self._gate is not None:
            self._tick(self._gate)
        progress = engine.now
        try:
            while self._left:
                while self._events and self._events[0][0] <= engine.now:
                    heapq.heappop(self._events)[2]()
                self._ordering.put_starved_first(engine.scheduler, engine.now)
                before = engine.now
                if engine.busy:
                    for answer in engine.step(self._next_arrival()):
                        self._ended(answer)
                if engine.now > before:
                    progress = engine.now
                    continue
                self._wait()
                if engine.now - progress > STALLED_S and engine.scheduler.has_requests():
                    raise Stalled(self._state())
                if not engine.scheduler.has_requests():
                    progress = engine.now
            outcome = self._outcome()
            self._drain()
            engine.check_clean()
        finally:
            engine.close()
        return outcome

    def _next_arrival(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _wait(self) -> None:
        """Advance to the next event, as nothing could be computed."""
        engine = self.engine
        when = min(self._next_arrival(), engine.next_event)
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
            f"{self._name}, {self._workload.name}: nothing happens at {self.engine.now:.1f} s: "
            f"{running} running, {waiting} waiting, {self._left} jobs left, "
            f"{self.engine.pool.get_num_free_blocks()} blocks free"
        )

    def _tick(self, gate: Gate) -> None:
        gate.tick()
        if self._left:
            self._at(self.engine.now + GATE_EVERY_S, lambda: self._tick(gate))

    # -- jobs -----------------------------------------------------------------------

    def _begin(self, job: SimJob, parent: _Running | None) -> None:
        record = JobRecord(job.name, self.engine.now, parent is not None)
        program = parent.program if parent is not None else job.name
        running = _Running(job, program, self.engine.now, parent, record)
        self._ordering.began(job.name, parent.job.name if parent is not None else None)
        if job.prefix:
            head = blake2b(job.prefix.encode(), digest_size=16).digest()
            blocks = job.prefix_tokens // self._workload.block
            running.chain = [head + bytes(8) + i.to_bytes(8, "big") for i in range(blocks)]
        self._turn(running)

    def _turn(self, running: _Running) -> None:
        """Start the job's next turn, through the gate if there is one."""
        running.asked_s = self.engine.now
        if self._gate is None or running.parent is not None:
            self._ask(running)
            return
        turn = running.job.turns[running.turn]
        tokens = turn.prompt + turn.output + self._beside
        self._gate.ask(running.program, tokens, lambda: self._ask(running))

    def _ask(self, running: _Running) -> None:
        job, number = running.job, running.turn
        turn = job.turns[number]
        request_id = f"{job.name}#{number}"
        if number:
            running.chain = running.chain[: turn.shared // self._workload.block]
        head = blake2b(job.name.encode(), digest_size=16).digest() + number.to_bytes(8, "big")
        blocks = (turn.prompt + turn.output) // self._workload.block
        running.chain += [head + i.to_bytes(8, "big") for i in range(len(running.chain), blocks)]
        del running.tokens[turn.shared :]  # the request that used the list has finished
        running.tokens += [self._first_token.get(job.name, 0) + number + 1] * turn.added
        priority = self._ordering.asked(job.name, request_id, self.engine.now)
        self._asked[request_id] = running
        if self._job_forecast is not None:
            self._job_forecast.asked(job.name, number + 1)
        self.engine.add(
            Ask(
                request_id,
                running.chain,
                running.tokens,
                turn.output,
                self._params(running),
                priority,
            )
        )

    def _params(self, running: _Running) -> dict[str, object] | None:
        hints = self._workload.hints
        if hints is Hints.NONE:
            return None
        job, turn = running.job, running.job.turns[running.turn]
        last = running.turn + 1 == len(job.turns) and job.says_last
        said: dict[str, object] = {
            "job_id": job.name,
            "is_last_step": last or hints is Hints.WRONG,
        }
        if turn.tool:
            said["tool_command"] = turn.tool
        if turn.tool_name:
            said["tool_name"] = turn.tool_name
        return said

    def _ended(self, answer: Answer) -> None:
        engine = self.engine
        running = self._asked.pop(answer.request_id)
        job, turn = running.job, running.job.turns[running.turn]
        over = engine.now + self._machine.overhead_s
        running.ended_s = over
        running.tokens += [0] * turn.output
        running.record.turns.append(
            TurnRecord(
                asked_s=running.asked_s,
                first_s=answer.first_s,
                ended_s=over,
                prompt=turn.prompt,
                output=turn.output,
                vram=answer.vram,
                cpu=answer.cpu,
                ssd=answer.ssd,
                preempted=answer.preempted,
            )
        )
        self._ordering.answered(
            job.name,
            answer.request_id,
            answer.admitted_s - running.asked_s,
            engine.now - answer.admitted_s,
        )
        if self._gate is not None and running.parent is None:
            self._gate.grew(running.program, turn.prompt + turn.output + self._beside)
        running.turn += 1
        if running.turn == len(job.turns):
            self._job_over(running)
            return
        running.children = len(turn.agents)
        for agent in turn.agents:
            self._at(
                over + agent.arrives_s,
                lambda agent=agent: self._begin(agent, running),  # type: ignore[misc]
            )
        if not turn.agents:
            self._at(over + turn.gap_s, lambda: self._turn(running))

    def _job_over(self, running: _Running) -> None:
        running.record.ended_s = running.ended_s
        self._records.append(running.record)
        self._left -= 1
        parent = running.parent
        if parent is None:
            if self._gate is not None:
                self._gate.over(running.program)
            return
        parent.children -= 1
        if not parent.children:
            gap_s = parent.job.turns[parent.turn - 1].gap_s
            self._at(running.ended_s + gap_s, lambda: self._turn(parent))

    def _outcome(self) -> Outcome:
        engine, worker = self.engine, self.engine.worker
        promoted = engine.half.pages.index.promoted if worker else PromotedPages()
        return Outcome(
            server=self._name,
            jobs=tuple(sorted(self._records, key=lambda job: job.name)),
            steps=engine.steps,
            seconds=engine.now - BEGIN_S,
            moved={
                "up": worker.up.carried if worker else 0,
                "down": worker.down.carried if worker else 0,
                "ssd_read": worker.ssd_read.carried if worker else 0,
                "ssd_write": worker.ssd_write.carried if worker else 0,
            },
            promoted_used=promoted.used,
            promoted_wasted=promoted.wasted,
        )
