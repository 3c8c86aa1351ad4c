"""Jobs for load generators, recorded or synthetic. They are fixed before the first run.

A job's prompt grows turn by turn: the previous prompt, its answer, and what the agent's tool
returned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np

from .left_out import LeftOut
from .recorded_rows import gap_between
from .sessions import Recorded, read_recording

# Continuum's synthetic workload (arXiv 2511.02230): seven gaps, one of them long, and final
# contexts of 2,900 tokens. The paper does not specify how contexts grow. Here the first turn adds a
# quarter of the final context.
SHORT_GAPS, SHORT_S, LONG_S = 6, (0.05, 0.3), (2.0, 5.0)
FIRST_TOKENS, ADDED_TOKENS, ANSWER_TOKENS = 750, 250, 50
FIRST_WORD = 3
"""Lowest token id in generated prompts; lower ids are special tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and the gap after it.

    Attributes:
        added: token ids that the prompt gains after the previous prompt and its answer.
        answer: token ids of the recorded answer; empty if no answer is recorded.
        gap_s: seconds from the answer, or from the end of the turn's sub-agents, to the next turn;
            0 after the last turn.
        kept: leading fraction of the context that the prompt keeps; below 1 if the agent compacted
            the context. Only for turns that are texts.
        tool, tool_name: command and name of the tool that runs in the gap; may be empty.
        agents: sub-agents that start when the answer ends.
        length: answer length in tokens, if the answer is not recorded.
        text: text that the prompt gains, instead of ``added``.
    """

    added: tuple[int, ...]
    answer: tuple[int, ...]
    gap_s: float
    kept: float = 1.0
    tool: str = ""
    tool_name: str = ""
    agents: tuple[Job, ...] = ()
    length: int = 0
    text: str = ""

    @property
    def output(self) -> int:
        """Answer length, tokens."""
        return len(self.answer) or self.length


@dataclass(frozen=True, slots=True)
class Job:
    """A job of an agent. Its turns are all token ids, or all texts.

    Attributes:
        name: unique in a workload.
        salt: jobs share cached prefixes only under the same salt; may be empty.
        system: system message of a job whose turns are texts; may be empty.
    """

    name: str
    salt: str
    turns: tuple[Turn, ...]
    system: str = ""

    @property
    def is_text(self) -> bool:
        """True if the job's turns are texts."""
        return bool(self.turns[0].text)

    @property
    def context(self) -> int:
        """Context length after the last answer, tokens. Only for jobs of token ids."""
        return sum(len(turn.added) + turn.output for turn in self.turns)

    def prompt(self, turn_index: int) -> list[int]:
        """Return the prompt of turn ``turn_index`` (from 0), assuming that earlier turns got their
        recorded answers.
        """
        context: list[int] = []
        for turn in self.turns[:turn_index]:
            context += [*turn.added, *turn.answer]
        return [*context, *self.turns[turn_index].added]


@dataclass(frozen=True, slots=True)
class RecordedJobs:
    """Jobs of a recording.

    Attributes:
        left_out: sessions and turns that are not played, by reason: ``nulls`` (the recording has a
            null value), ``too_short`` (includes sessions with a prompt that does not continue the
            previous one) and ``too_long``.
    """

    jobs: list[Job]
    left_out: Mapping[str, LeftOut]


class Tokenizer(Protocol):
    """Protocol of tokenizers: the methods of a transformers tokenizer that this module calls."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def mini_swe_jobs(
    path: Path,
    tokenizer: Tokenizer,
    *,
    count: int,
    turns: int,
    seed: int,
    longest: int | None = None,
) -> RecordedJobs:
    """Draw ``count`` jobs from recorded sessions. Each job has the first ``turns`` turns of a
    session.

    A session is left out, and counted, if it has fewer turns, if a prompt does not continue the
    previous one, or if a context gets too long. If fewer than ``count`` sessions remain, they are
    repeated: each copy has its own name and salt, and shares no KV with any other job.

    The recording has request times only, so gaps are estimated by ``gap_between``.

    Args:
        path: JSON lines with ``session_id``, ``timestamp`` in µs, ``input`` and ``output``, plain
            or gzipped. ``input`` may lack the answers, as in mini-swe-agent's recordings.
        longest: maximum context length, tokens; None means no limit.

    Raises:
        RecordingError: the file cannot be read, or has another format.
        ValueError: no session can be played. The message gives the reason.
    """
    record = read_recording(path)
    long_enough = [session[:turns] for session in record.sessions if _goes_on(session, turns)]
    short = [len(session) for session in record.sessions if not _goes_on(session, turns)]
    order = np.random.default_rng(seed).permutation(len(long_enough))
    made = [_recorded_job(long_enough[at], tokenizer) for at in order]
    recorded = [job for job in made if longest is None or job.context <= longest]
    too_long = len(made) - len(recorded)
    left_out = {
        "nulls": record.nulls,
        "too_short": LeftOut(len(short), sum(short)),
        "too_long": LeftOut(too_long, too_long * turns),
    }
    if not recorded:
        raise ValueError(
            f"no session of {path.name} can be played. Sessions with fewer than {turns} "
            f"consecutive answered turns: {len(short)}; with more than {longest} tokens: "
            f"{too_long}; with nulls: {record.nulls.sessions}"
        )
    jobs = recorded[:count]
    for number in range(len(recorded), count):
        copy, which = divmod(number, len(recorded))
        name = f"{recorded[which].name}-copy{copy}"
        jobs.append(replace(recorded[which], name=name, salt=name))
    return RecordedJobs(jobs, left_out)


def synthetic_jobs(*, count: int, seed: int, vocabulary: int) -> list[Job]:
    """Create ``count`` jobs of eight turns. The final context, including the last answer, has 2,900
    tokens.

    Six gaps take 50 to 300 ms and one, at a random position, 2 to 5 s. All tokens are random ids
    below ``vocabulary``, so no two jobs share a prefix.
    """
    rng = np.random.default_rng(seed)

    def noise(tokens: int) -> tuple[int, ...]:
        return tuple(rng.integers(vocabulary, size=tokens).tolist())

    jobs = []
    for number in range(1, count + 1):
        gaps = rng.uniform(*SHORT_S, size=SHORT_GAPS).tolist()
        gaps.insert(int(rng.integers(SHORT_GAPS + 1)), float(rng.uniform(*LONG_S)))
        turns = tuple(
            Turn(noise(ADDED_TOKENS if at else FIRST_TOKENS), noise(ANSWER_TOKENS), gap_s)
            for at, gap_s in enumerate([*gaps, 0.0])
        )
        jobs.append(Job(f"synthetic-{number}", "", turns))
    return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Number and size of random jobs. Lengths in tokens, times in seconds.

    Attributes:
        system: length of the system prompt that all jobs share.
        task: mean number of tokens that a job's first turn adds to the system prompt.
        result: mean length of a tool's result, which each later turn adds.
        answer: length of every answer.
        gap_s: median tool time.
        gap_spread: standard deviation of the logarithm of the tool time, which is lognormal.
        gap_limit_s: maximum tool time. Longer times are shortened to this limit.
        apart_s: mean time between job starts.
    """

    jobs: int
    turns: int
    system: int
    task: int
    result: int
    answer: int
    gap_s: float
    gap_spread: float
    gap_limit_s: float
    apart_s: float


def make_jobs(load: Load, seed: int, vocabulary: int) -> tuple[Job, ...]:
    """Create jobs of random token ids below ``vocabulary`` that share a system prompt.

    Each turn adds 0.5 to 1.5 times the mean length, so turns can end anywhere in a block.
    """
    rng = np.random.default_rng(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(FIRST_WORD, vocabulary, size=count).tolist())

    def about(mean: int) -> int:
        return int(rng.integers(mean // 2, mean + mean // 2 + 1))

    system = words(load.system)
    jobs = []
    for number in range(1, load.jobs + 1):
        drawn = rng.lognormal(np.log(load.gap_s), load.gap_spread, size=load.turns - 1)
        gaps = [*np.minimum(drawn, load.gap_limit_s).tolist(), 0.0]
        added = [system + words(about(load.task)), *(words(about(load.result)) for _ in gaps[1:])]
        turns = (Turn(a, words(load.answer), gap) for a, gap in zip(added, gaps, strict=True))
        jobs.append(Job(f"agent-{number}", "", tuple(turns)))
    return tuple(jobs)


def arrivals(count: int, jobs_per_s: float, seed: int) -> list[float]:
    """Return the start time of each job, seconds since the start of the run. The times are a
    Poisson process, shifted so that the first job starts at 0.
    """
    between = np.random.default_rng(seed).exponential(1 / jobs_per_s, size=count)
    times: list[float] = (np.cumsum(between) - between[:1]).tolist()
    return times


def digest(jobs: Sequence[object]) -> str:
    """Return a digest of a workload. Equal workloads have equal digests."""
    return hashlib.sha256(repr(list(jobs)).encode()).hexdigest()[:16]


def _goes_on(session: Sequence[Recorded], turns: int) -> bool:
    """Return True if the session has at least ``turns`` turns, and if the first ``turns`` of them
    have answers and each of their prompts starts with the previous prompt.
    """
    first = session[:turns]
    follows = all(later.prompt.startswith(turn.prompt) for turn, later in pairwise(first))
    return len(first) == turns and follows and all(turn.answer for turn in first)


def _recorded_job(session: Sequence[Recorded], tokenizer: Tokenizer) -> Job:
    turns = list[Turn]()
    known = last_answer = ""
    for turn, later in zip_longest(session, session[1:]):
        added = turn.prompt.removeprefix(known).removeprefix(last_answer)
        ids = tokenizer.encode(added, add_special_tokens=not turns)
        answer = tokenizer.encode(turn.answer, add_special_tokens=False)
        gap_s = gap_between((later.at - turn.at) / 1e6 if later else None, len(answer))
        turns.append(Turn(tuple(ids), tuple(answer), gap_s))
        known, last_answer = turn.prompt, turn.answer
    return Job(session[0].session, "", tuple(turns))
