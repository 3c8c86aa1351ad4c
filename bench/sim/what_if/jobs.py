"""Jobs of a recording, converted for the simulator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.trace.turn_record import StoryEnd, TurnRecord

SHELL = "bash"
"""First part of the name of a shell command in a record (``policies.tools``)."""
NO_TOOL = "(no tool)"
EXAMPLES = {
    "<path>::<name>": "a/b.py::c",
    "<path>": "a/b.py",
    "<text>": "'a b'",
    "<url>": "https://a",
    "<n>": "1",
}
"""Words that replace the masks in a recorded command. A trace contains masks in place of paths,
texts and numbers. Masking a word yields the same mask again."""
SAYS_LAST = (StoryEnd.OVER, StoryEnd.NO_GAP)


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job of a recording.

    Attributes:
        name: the client's name for the job; empty for turns without a job.
        turns: turns in order. Each ended before the next one arrived.
    """

    name: str
    turns: tuple[TurnRecord, ...]

    @property
    def took_s(self) -> float:
        """Time from the arrival of the first turn to the end of the last turn, seconds."""
        return self.turns[-1].ended - self.turns[0].arrived

    @property
    def longest(self) -> int:
        """Length of the longest context, tokens."""
        return max(one.tokens.prompt + one.tokens.output for one in self.turns)


LEFT = {
    "empty": "Turns without an answer are left out: {:,}.",
    "too_long": "Jobs whose contexts fill the whole pool are left out: {:,}.",
    "beside": (
        "Turns that overlapped with another turn of their job count as separate jobs that share no "
        "prefix with it: {:,}."
    ),
    "begun": (
        "Jobs that started before the trace compute their first recorded turn completely: {:,}."
    ),
    "open": ("Jobs still expected back when the trace ended end with their last turn: {:,}."),
    "shared": (
        "Jobs that found part of their first prompt cached are assumed to share that part with "
        "other jobs of their client: {:,}."
    ),
}
"""Sentences about recorded features that cannot be simulated, by the name of their count."""


@dataclass(frozen=True, slots=True)
class RecordedJobs:
    """Jobs of a recording and the corresponding jobs of the simulator, in the same order.

    Attributes:
        left: counts of recorded features that cannot be simulated, by the names in ``LEFT``.
    """

    jobs: tuple[RecordedJob, ...]
    workload: Workload
    left: Counter[str]


def recorded_jobs(turns: Iterable[TurnRecord], block: int, longest: int) -> RecordedJobs:
    """Create the simulator's jobs from a recording's turns.

    Args:
        block: tokens per block.
        longest: length of the longest context that the machine can hold, tokens.
    """
    left = Counter[str]()
    every = list(_jobs(turns, left))
    jobs = [job for job in every if job.longest <= longest]
    jobs.sort(key=lambda job: (job.turns[0].arrived, job.name, job.turns[0].request))
    began = jobs[0].turns[0].arrived if jobs else 0.0
    made = [
        _sim_job(f"{number:06}", job, job.turns[0].arrived - began, tokens)
        for number, (job, tokens) in enumerate(zip(jobs, _shared_tokens(jobs, block), strict=True))
    ]
    left["too_long"] = len(every) - len(jobs)
    left["open"] = sum(job.turns[-1].gap.end is StoryEnd.CLOSED for job in jobs)
    left["shared"] = sum(_found(job.turns[0]) > 0 for job in jobs)
    return RecordedJobs(tuple(jobs), Workload("recorded", tuple(made), Hints.RIGHT, block), left)


def _jobs(turns: Iterable[TurnRecord], left: Counter[str]) -> Iterable[RecordedJob]:
    by_name: dict[tuple[str, str], list[TurnRecord]] = defaultdict(list)
    for one in turns:
        if one.tokens.output < 1 or one.tokens.prompt < 1 or one.times.end_s < 0:
            left["empty"] += 1
        elif one.job is None:
            yield RecordedJob("", (one,))
        else:
            by_name[one.job, one.client].append(one)
    for (name, _), found in by_name.items():
        found.sort(key=lambda one: (one.arrived, one.turn))
        left["begun"] += found[0].turn > 1
        job: list[TurnRecord] = []
        for one in found:
            if job and one.arrived < job[-1].ended:
                left["beside"] += 1
                yield RecordedJob(name, (one,))
                continue
            if job and one.turn <= job[-1].turn:  # a turn number that restarts means another job
                yield RecordedJob(name, tuple(job))
                job = []
            job.append(one)
        yield RecordedJob(name, tuple(job))


def _found(turn: TurnRecord) -> int:
    """Return the number of prompt tokens that were found in any tier."""
    return max(0, turn.tokens.vram + turn.tokens.cpu + turn.tokens.ssd)


def _shared_tokens(jobs: Sequence[RecordedJob], block: int) -> Iterator[int]:
    """Yield the number of tokens of each job's first prompt that it shares with other jobs of its
    client, as far as known.

    A job shares the tokens that its first turn found. A job that found no tokens may have been the
    first, its shared prefix may have been evicted, or it may share nothing. If at least half of a
    client's jobs found tokens, such a job is assumed to share the smallest number found. Tokens
    found by a job that started before the trace may be its own, so they do not count.
    """
    by_client: dict[str, list[int]] = defaultdict(list)
    found = [_found(job.turns[0]) if job.turns[0].turn == 1 else 0 for job in jobs]
    for job, tokens in zip(jobs, found, strict=True):
        by_client[job.turns[0].client].append(tokens)
    for job, tokens in zip(jobs, found, strict=True):
        every = by_client[job.turns[0].client]
        hits = [one for one in every if one]
        if not tokens and hits and 2 * len(hits) >= len(every):
            tokens = min(hits)
        yield min(tokens, job.turns[0].tokens.prompt - 1) // block * block


def _sim_job(name: str, job: RecordedJob, arrives_s: float, shared: int) -> SimJob:
    gaps = [max(0.0, later.arrived - one.ended) for one, later in pairwise(job.turns)]
    before = (None, *job.turns)
    turns = tuple(map(_sim_turn, before, job.turns, (*gaps, 0.0)))
    return SimJob(
        name,
        arrives_s,
        turns,
        prefix=f"client {job.turns[0].client}" if shared else "",
        prefix_tokens=shared,
        says_last=job.turns[-1].gap.end in SAYS_LAST,
    )


def _sim_turn(before: TurnRecord | None, one: TurnRecord, gap_s: float) -> SimTurn:
    tokens, kept = one.tokens, 0
    if before is not None:
        # Tokens of the previous context that were neither found nor lost have changed.
        known = min(before.tokens.prompt + before.tokens.output, _found(one) + tokens.lost)
        kept = max(0, min(known, tokens.prompt - 1))
    command, name = "", one.tool[0] if one.tool and one.tool[0] != NO_TOOL else ""
    if name == SHELL and len(one.tool) > 1:
        command = unmasked(one.tool[-1])
    return SimTurn(kept, tokens.prompt - kept, tokens.output, gap_s, tool=command, tool_name=name)


def unmasked(command: str) -> str:
    """Return a command with each mask replaced by a word."""
    for mask, word in EXAMPLES.items():
        command = command.replace(mask, word)
    return command
