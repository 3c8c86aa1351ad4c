"""Jobs to play on running servers: generated jobs, and recordings in third-party formats.

Sizes are in tokens, or in characters if a recording contains the texts. The number of tokens per
character is measured on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import RecordingError, first_row, names
from tiered_kv.bench.agents.sessions import FIELDS
from tiered_kv.bench.live.recordings.agent_texts import agent_texts
from tiered_kv.bench.live.recordings.cache_tester import BLOCK, tester_traces
from tiered_kv.bench.live.recordings.mooncake import hashed_requests
from tiered_kv.bench.live.recordings.tracelab import COLUMNS, is_tracelab, tracelab_rounds
from tiered_kv.bench.sim.workloads.generate import GENERATED, generate
from tiered_kv.bench.sim.workloads.recorded import coding_agents
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn, Workload

CUT = "cut"
COPY = "-copy"


class Unit(Enum):
    """Unit of a workload's sizes."""

    TOKENS = "tokens"
    CHARACTERS = "characters"


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """Jobs to play.

    Attributes:
        texts: by job name, the text that each turn adds. The texts of all other jobs are generated.
        unit: unit of the jobs' sizes.
        left_out: sessions and turns of a recording that are not played, by reason. ``cut``:
            sessions truncated at the server's context limit or the requested number of turns.
    """

    name: str
    jobs: tuple[SimJob, ...]
    unit: Unit = Unit.TOKENS
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)


def load_jobs(source: str, *, count: int, seed: int) -> LiveJobs:
    """Load the jobs of a workload.

    Args:
        source: name of a generated workload, or path of a recording: a file of LMCache's agent
            traces, a trace of Mooncake's or Bailian's format, TraceLab's replay CSV, or a trace of
            kv-cache-tester, or a folder of such traces. Each file may be gzipped.
        count: number of generated jobs; ignored for recordings.
        seed: seed of generated jobs; ignored for recordings.

    Raises:
        ValueError: the workload does not exist, or cannot be read.
    """
    if source in GENERATED:
        return _of(generate(source, count, seed))
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"no workload {source!r}: use one of {', '.join(GENERATED)}, or the path of a recording"
        )
    if path.is_dir():
        return _of(tester_traces(path), whole=True)
    if is_tracelab(path):
        return _of(tracelab_rounds(path))
    first = first_row(path)
    if first.keys() >= FIELDS:
        read = agent_texts(path)
        return LiveJobs(path.name, read.jobs, Unit.CHARACTERS, read.texts, read.left_out)
    for key, reader in _READERS.items():
        if key in first:
            return _of(reader(path), whole=True)
    raise RecordingError(
        f"{path} has an unknown format. Rename its fields ({names(first)}) to those of LMCache's "
        f"agent traces ({', '.join(sorted(FIELDS))}), of Mooncake's or Bailian's traces (hash_ids, "
        "timestamp, input_length, output_length), of kv-cache-tester's traces (id, requests), or "
        f"of TraceLab's CSV files ({', '.join(COLUMNS)})"
    )


def fitting(
    jobs: LiveJobs, *, tokens_per_unit: float, most_tokens: int | None, turns: int | None
) -> LiveJobs:
    """Convert the jobs' sizes to tokens. Each job is cut before its first turn that exceeds a
    limit.

    Args:
        tokens_per_unit: factor for all sizes.
        most_tokens: maximum length of a context with its answer; None means no limit.
        turns: maximum number of turns per job; None means all.

    Raises:
        ValueError: no job has any turn left.
    """
    made, cut = list[SimJob](), LeftOut()
    for job in jobs.jobs:
        short = _cut(_scaled(job, tokens_per_unit), most_tokens, turns)
        before, after = _turns(job), _turns(short) if short else 0
        if after < before:
            cut += LeftOut(1, before - after)
        if short:
            made.append(short)
    if not made and most_tokens is None:
        raise ValueError(f"no job of {jobs.name} has a turn")
    if not made:
        raise ValueError(
            f"no job of {jobs.name} fits: the first turns need more than {most_tokens} tokens; "
            "set --scale below 1, or serve a longer context"
        )
    left_out = {**jobs.left_out, **({CUT: cut} if cut.sessions else {})}
    return replace(jobs, jobs=tuple(made), unit=Unit.TOKENS, left_out=left_out)


_READERS: Mapping[str, Callable[[Path], Workload]] = {
    "hash_ids": hashed_requests,
    "requests": tester_traces,
    "reqs": coding_agents,
}


def _of(workload: Workload, *, whole: bool = False) -> LiveJobs:
    """Convert a workload to jobs.

    Args:
        whole: True if prompts keep the previous answers; see ``_whole``.
    """
    jobs = tuple(map(_whole, workload.jobs)) if whole else workload.jobs
    return LiveJobs(workload.name, jobs, left_out=workload.left_out)


def _scaled(job: SimJob, factor: float) -> SimJob:
    if factor == 1:
        return job

    def tokens(units: int) -> int:
        return max(1, round(units * factor)) if units else 0

    turns: list[SimTurn] = []
    context = 0
    for turn in job.turns:
        shared = min(tokens(turn.shared), context)
        prompt = max(shared + 1, tokens(turn.prompt))
        agents = tuple(_scaled(agent, factor) for agent in turn.agents)
        output = tokens(turn.output)
        turns.append(
            replace(turn, shared=shared, added=prompt - shared, output=output, agents=agents)
        )
        context = prompt + output
    prefix = min(tokens(job.prefix_tokens), turns[0].added)
    return replace(job, turns=tuple(turns), prefix_tokens=prefix)


def _cut(job: SimJob, most_tokens: int | None, most_turns: int | None) -> SimJob | None:
    """Return the job with its turns before the first turn that exceeds a limit; None if no turn is
    left.
    """

    kept: list[SimTurn] = []
    for turn in job.turns[:most_turns]:
        if most_tokens is not None and turn.prompt + turn.output > most_tokens:
            break
        short = (_cut(agent, most_tokens, most_turns) for agent in turn.agents)
        kept.append(replace(turn, agents=tuple(agent for agent in short if agent)))
    if not kept:
        return None
    kept[-1] = replace(kept[-1], gap_s=0.0, agents=())
    return replace(job, turns=tuple(kept))


def _turns(job: SimJob) -> int:
    return sum(len(one.turns) for one in job.everyone())


def _whole(job: SimJob) -> SimJob:
    """Return a recorded job in which prompts keep the previous answers.

    The recording has the number of tokens that two prompts share, but only the second prompt
    contains the answer. If the second prompt starts with all whole blocks of the first, and is long
    enough to contain the answer, it is assumed to contain the whole previous context.
    """
    turns: list[SimTurn] = []
    for turn in job.turns:
        made = replace(turn, agents=tuple(map(_whole, turn.agents)))
        if turns:
            before = turns[-1]
            context = before.prompt + before.output
            if turn.shared > before.prompt - BLOCK and turn.prompt > context:
                made = replace(made, shared=context, added=turn.prompt - context)
        turns.append(made)
    return replace(job, turns=tuple(turns))


def copies(jobs: tuple[SimJob, ...]) -> Iterator[SimJob]:
    """Yield the jobs endlessly. From the second pass on, each job is a copy with its own name."""
    number = 0
    while True:
        for job in jobs:
            yield replace(job, name=f"{job.name}{COPY}{number}") if number else job
        number += 1


def copied(name: str) -> str:
    """Return the original name of a job that ``copies`` yielded; empty if the job is not a copy."""
    return name.rpartition(COPY)[0]
