"""Jobs of a recording, as the simulator takes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.trace.turn_record import StoryEnd, TurnRecord

SHELL = "bash"
"""First name of a shell's commands in a record (``policies.tools``)."""
NO_TOOL = "(no tool)"
EXAMPLES = {
    "<path>::<name>": "a/b.py::c",
    "<path>": "a/b.py",
    "<text>": "'a b'",
    "<url>": "https://a",
    "<n>": "1",
}
"""Words for the masks of a recorded command: they are masked alike."""
SAYS_LAST = (StoryEnd.OVER, StoryEnd.NO_GAP)


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job of a recording.

    Attributes:
        name: as its client calls it; empty if it was of none.
        turns: in their order; each ended before the next one arrived.
    """

    name: str
    turns: tuple[TurnRecord, ...]

    @property
    def took_s(self) -> float:
        """Time from the arrival of its first turn to the end of its last one."""
        return self.turns[-1].ended - self.turns[0].arrived

    @property
    def longest(self) -> int:
        """Tokens of its longest context."""
        return max(one.tokens.prompt + one.tokens.output for one in self.turns)


@dataclass(slots=True)
class Left:
    """Counts of what cannot be simulated as it was.

    Attributes:
        empty: turns without an answer, left out. too_long: jobs left out, as no pool of that size
            holds them beside vLLM's own block.
        beside: turns that ran beside others of their job, taken for jobs of their own.
        begun: jobs whose first turn is not in the trace. open: jobs that are waited for at its end.
        shared: jobs whose first turn found something.
    """

    empty: int = 0
    too_long: int = 0
    beside: int = 0
    begun: int = 0
    open: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class RecordedJobs:
    """Jobs of a recording, and the same for the simulator, in one order."""

    jobs: tuple[RecordedJob, ...]
    workload: Workload
    left: Left = field(default_factory=Left)


def recorded_jobs(turns: Iterable[TurnRecord], block: int, longest: int) -> RecordedJobs:
    """Make the simulator's jobs of a recording's turns.

    Args:
        block: tokens of a block.
        longest: tokens of the longest context that the machine can hold.
    """
    left = Left()
    jobs = [job for job in _jobs(turns, left) if _fits(job, longest, left)]
    jobs.sort(key=lambda job: (job.turns[0].arrived, job.name, job.turns[0].request))
    shared = _shared_tokens(jobs, block)
    began = jobs[0].turns[0].arrived if jobs else 0.0
    made = [
        _sim_job(f"{number:06}", job, job.turns[0].arrived - began, tokens)
        for number, (job, tokens) in enumerate(zip(jobs, shared, strict=True))
    ]
    for job in jobs:
        left.open += job.turns[-1].gap.end is StoryEnd.CLOSED
        left.shared += _found(job.turns[0]) > 0
    return RecordedJobs(tuple(jobs), Workload("recorded", tuple(made), Hints.RIGHT, block), left)


def _jobs(turns: Iterable[TurnRecord], left: Left) -> Iterable[RecordedJob]:
    by_name: dict[tuple[str, str], list[TurnRecord]] = defaultdict(list)
    for one in turns:
        if one.tokens.output < 1 or one.tokens.prompt < 1 or one.times.end_s < 0:
            left.empty += 1
        elif one.job is None:
            yield RecordedJob("", (one,))
        else:
            by_name[one.job, one.client].append(one)
    for (name, _), found in by_name.items():
        found.sort(key=lambda one: (one.arrived, one.turn))
        left.begun += found[0].turn > 1
        job: list[TurnRecord] = []
        for one in found:
            if job and one.arrived < job[-1].ended:
                left.beside += 1
                yield RecordedJob(name, (one,))
                continue
            if job and one.turn <= job[-1].turn:  # a name that begins anew is another job
                yield RecordedJob(name, tuple(job))
                job = []
            job.append(one)
        yield RecordedJob(name, tuple(job))


def _fits(job: RecordedJob, longest: int, left: Left) -> bool:
    fits = job.longest <= longest
    left.too_long += not fits
    return fits


def _found(turn: TurnRecord) -> int:
    """Tokens of its prompt that were found somewhere."""
    return max(0, turn.tokens.vram + turn.tokens.cpu + turn.tokens.ssd)


def _shared_tokens(jobs: Sequence[RecordedJob], block: int) -> list[int]:
    """Tokens of each job's first prompt that other jobs of its client have, as far as it shows.

    A job has what its first turn found. One that found nothing came first, or what it shares was
    gone, or it shares nothing: where most jobs of a client found something, it is taken to have
    the least that one of them found. What a job found that had begun before may be its own.
    """
    found = [_found(job.turns[0]) if job.turns[0].turn == 1 else 0 for job in jobs]
    clients = [job.turns[0].client for job in jobs]
    least: dict[str, int] = {}
    for client, tokens in zip(clients, found, strict=True):
        if tokens:
            least[client] = min(tokens, least.get(client, tokens))
    hits = Counter(client for client, tokens in zip(clients, found, strict=True) if tokens)
    every = Counter(clients)
    shared = []
    for job, client, tokens in zip(jobs, clients, found, strict=True):
        known = tokens
        if not tokens and 2 * hits[client] >= every[client]:
            known = least.get(client, 0)
        most = job.turns[0].tokens.prompt - 1
        shared.append(min(known, most) // block * block)
    return shared


def _sim_job(name: str, job: RecordedJob, arrives_s: float, shared: int) -> SimJob:
    gaps = [max(0.0, later.arrived - one.ended) for one, later in pairwise(job.turns)]
    before, turns = None, []
    for one, gap_s in zip(job.turns, [*gaps, 0.0], strict=True):
        turns.append(_sim_turn(before, one, gap_s))
        before = one
    return SimJob(
        name,
        arrives_s,
        tuple(turns),
        prefix=f"client {job.turns[0].client}" if shared else "",
        prefix_tokens=shared,
        says_last=job.turns[-1].gap.end in SAYS_LAST,
    )


def _sim_turn(before: TurnRecord | None, one: TurnRecord, gap_s: float) -> SimTurn:
    tokens, kept = one.tokens, 0
    if before is not None:
        # What was not found and is not lost is not the same text.
        known = min(before.tokens.prompt + before.tokens.output, _found(one) + tokens.lost)
        kept = max(0, min(known, tokens.prompt - 1))
    command, name = _tool(one.tool)
    return SimTurn(kept, tokens.prompt - kept, tokens.output, gap_s, tool=command, tool_name=name)


def _tool(path: Sequence[str]) -> tuple[str, str]:
    """Command of a shell, or the name of another tool."""
    if not path or path[0] == NO_TOOL:
        return "", ""
    if path[0] != SHELL:
        return "", path[0]
    return unmasked(path[-1], EXAMPLES) if len(path) > 1 else "", SHELL


def unmasked(command: str, examples: Mapping[str, str]) -> str:
    """A command with a word for each mask."""
    for mask, word in examples.items():
        command = command.replace(mask, word)
    return command
