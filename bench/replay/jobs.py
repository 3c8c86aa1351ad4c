"""The jobs that are replayed: token ids and gaps, fixed before the first run.

A job's prompt grows turn by turn: the prompt and the answer of the turn before, and behind them
what the agent's tool said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import DECODE_TOKENS_PER_S
from tiered_kv.bench.agents.sessions import Recorded, read_recording

LEAST_GAP_S = 0.05

# The synthetic workload of Continuum (arXiv 2511.02230): seven gaps, one of them long, contexts of
# 2,900 tokens at the end. How they grow is chosen here: a quarter is there at once.
SHORT_GAPS, SHORT_S, LONG_S = 6, (0.05, 0.3), (2.0, 5.0)
FIRST_TOKENS, ADDED_TOKENS, ANSWER_TOKENS = 750, 250, 50


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and the pause behind it.

    Attributes:
        added: token ids that the prompt gains, behind the previous prompt and its answer.
        answer: token ids of the recorded answer; never empty.
        gap_s: seconds from the answer to the next turn; 0 after the last.
    """

    added: tuple[int, ...]
    answer: tuple[int, ...]
    gap_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """An agent's work.

    Attributes:
        name: unique in a workload.
        salt: jobs share cached prefixes only under the same; empty is none.
    """

    name: str
    salt: str
    turns: tuple[Turn, ...]

    @property
    def context(self) -> int:
        """Tokens behind its last answer."""
        return sum(len(turn.added) + len(turn.answer) for turn in self.turns)

    def prompt(self, turn_index: int) -> list[int]:
        """The prompt of a turn, the first being 0, if all answers are the recorded ones."""
        before = self.turns[:turn_index]
        ids = [token for turn in before for token in (*turn.added, *turn.answer)]
        return [*ids, *self.turns[turn_index].added]


@dataclass(frozen=True, slots=True)
class RecordedJobs:
    """Jobs of a recording.

    Attributes:
        left_out: by the reason: ``nulls`` in the record, ``too_short`` (or prompts that do not go
            on from one another) and ``too_long``.
    """

    jobs: list[Job]
    left_out: Mapping[str, LeftOut]


class Tokenizer(Protocol):
    """The used part of a tokenizer of transformers."""

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
    """``count`` jobs of the first ``turns`` turns of recorded sessions, in an order of chance.

    Sessions that are shorter, whose prompts do not go on from one another for so long, or whose
    contexts get too long are left out and counted. When there are fewer than ``count``, they come
    again: every copy under a name and a salt of its own, so that it shares nothing with any other
    job.

    Of the record only the requests have times: a gap is the time between two requests less the
    answer at 60 tokens/s, and at least 50 ms.

    Args:
        path: JSON lines with ``session_id``, ``timestamp`` in µs, ``input`` and ``output``, plain
            or gzipped. ``input`` may lack the answers, as that of mini-swe-agent does.
        longest: most tokens of a context; None: any.

    Raises:
        bench.agents.recorded_rows.RecordingError: the file cannot be read or is no such recording.
        ValueError: no session is left; the message says why.
    """
    record = read_recording(path)
    long_enough, short = [], []
    for session in record.sessions:
        first = session[:turns]
        if len(first) == turns and _goes_on(first):
            long_enough.append(first)
        else:
            short.append(len(session))
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
            f"no session of {path.name} can be played: {len(short)} have no {turns} turns that go "
            f"on from one another, {too_long} grow to more than {longest} tokens, and "
            f"{record.nulls.sessions} have nulls"
        )
    jobs = []
    for number in range(count):
        copy, which = divmod(number, len(recorded))
        job = recorded[which]
        name = f"{job.name}-copy{copy}"
        jobs.append(replace(job, name=name, salt=name) if copy else job)
    return RecordedJobs(jobs, left_out)


def synthetic_jobs(*, count: int, seed: int, vocabulary: int) -> list[Job]:
    """``count`` jobs of eight turns that grow to 2,900 tokens, the last answer included.

    Six gaps take 50 to 300 ms, one, drawn with an even chance, 2 to 5 s. All tokens are random ids
    below ``vocabulary``, so that no two jobs share a prefix.
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


def arrivals(count: int, jobs_per_s: float, seed: int) -> list[float]:
    """Start of each job, seconds since the run began: a Poisson process from 0 on."""
    between = np.random.default_rng(seed).exponential(1 / jobs_per_s, size=count)
    times: list[float] = (np.cumsum(between) - between[:1]).tolist()
    return times


def _goes_on(session: Sequence[Recorded]) -> bool:
    follows = all(later.prompt.startswith(turn.prompt) for turn, later in pairwise(session))
    return follows and all(turn.answer for turn in session)


def _recorded_job(session: Sequence[Recorded], tokenizer: Tokenizer) -> Job:
    turns = []
    known, last_answer = "", ""
    for at, turn in enumerate(session):
        added = turn.prompt.removeprefix(known).removeprefix(last_answer)
        answer = tokenizer.encode(turn.answer, add_special_tokens=False)
        gap_s = 0.0
        if at + 1 < len(session):
            apart_s = (session[at + 1].at - turn.at) / 1e6
            gap_s = max(LEAST_GAP_S, apart_s - len(answer) / DECODE_TOKENS_PER_S)
        ids = tokenizer.encode(added, add_special_tokens=at == 0)
        turns.append(Turn(tuple(ids), tuple(answer), gap_s))
        known, last_answer = turn.prompt, turn.answer
    return Job(session[0].session, "", tuple(turns))
