"""Inference of a request's job from its prompt, for requests without a job id.

An agent's next prompt repeats its last prompt and extends it. So a request that extends the last
prompt of a job is that job's next turn. Answers need not match, because the answers that clients
send back are tokenised again, and often truncated. They are only compared to choose between jobs
whose last prompts both fit.

vLLM chains block hashes: a block's hash covers all tokens up to its end. So a turn is found by the
hash of one block of its prompt: the last block that ends at least ``TOLERANCE`` tokens before the
prompt does. The few tokens after that block are compared one by one. A common system prompt alone
does not join jobs, because the tokens of two questions after it differ. Only the last tokens of the
prompt, which a chat template adds, may differ.

Only the last turn of a job can be continued. A prompt that extends an earlier turn, or a turn that
is still running, is a fork and starts a new job. A prompt that was trimmed or summarised, and a
prompt that repeats another without extending it, start a new job too. A prompt that is repeated
after an abort is a retry.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from tiered_kv.policies.base import JobKey

from .identity import INFERRED_PREFIX

TOLERANCE = 4
"""Number of tokens at the end of a prompt that the next prompt may lack. Chat templates end a
prompt with the start of a thought, or an empty thought, which they omit from the history (four
tokens for Qwen3 without thinking). The last token of plain text may merge with the text after it.
"""
ANSWER_TOKENS = 64
"""Number of tokens kept of each answer, to distinguish several answers to one prompt."""
MAX_JOBS = 16_384
"""Maximum number of jobs kept, about 2 KiB each. The least recently active job is dropped first."""
MAX_NEIGHBOURS = 256
"""Maximum number of jobs kept per block hash. Jobs with short questions after one system prompt
share a hash."""
MAX_TWINS = 8
"""Maximum number of answers to one prompt that are compared with the next prompt."""
MAX_PLACES = 16
"""Maximum number of blocks of a prompt at which the prompt is compared with earlier turns. No agent
needs more."""

_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Inferred:
    """The inferred job of a request.

    Attributes:
        turn: number of the request's turn in the job, from 1. A retry has the number of the turn
            that it repeats.
    """

    job: JobKey
    turn: int


class _State(Enum):
    RUNNING = "running"
    ENDED = "ended"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class _Turn:
    """A job's last turn.

    Attributes:
        prompt_tokens: length of its prompt.
        block: hash of the block by which the turn is found.
        start: position in the prompt where that block ends, tokens.
        rest: the prompt's tokens from ``start`` on, packed.
        answer: the first tokens of the answer, packed.
        ended_at: number of requests that had arrived when the turn ended.
    """

    job: JobKey
    number: int
    prompt_tokens: int
    block: bytes
    start: int
    rest: bytes
    answer: bytes = b""
    state: _State = _State.RUNNING
    ended_at: int = 0

    def precedes(self, behind: bytes, prompt_tokens: int) -> bool:
        """Return True if a prompt continues or retries this turn.

        Args:
            behind: the prompt's first tokens after ``block``, packed.
            prompt_tokens: length of the prompt.
        """
        if self.state is _State.RUNNING:
            return False
        if prompt_tokens > self.prompt_tokens:
            return behind.startswith(self.rest[: -TOLERANCE * _TOKEN_BYTES])
        return self.state is _State.ABORTED and behind == self.rest


class Lineage:
    """Jobs inferred from one engine's requests. Not thread-safe.

    Args:
        block_size: number of tokens per hash passed to ``arrived``.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._reach = block_size + TOLERANCE + ANSWER_TOKENS
        self._jobs: OrderedDict[JobKey, _Turn] = OrderedDict()
        self._places: dict[str, dict[bytes, list[_Turn]]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def places(self) -> int:
        """Number of blocks by which turns can be found, over all salts."""
        return sum(map(len, self._places.values()))

    def arrived(self, salt: str, hashes: Sequence[bytes], prompt: Sequence[int]) -> Inferred | None:
        """Infer the job of a request without a job id. The request's turn counts as running until
        ``ended`` is called.

        Visits each hash of a new job's prompt once, but only the new hashes of a next turn.

        Args:
            salt: the request's ``cache_salt``; jobs with another salt are never considered.
            hashes: chained hashes of the prompt's full blocks, from the first on.
            prompt: token ids.

        Returns:
            The job and the turn; None if the prompt is too short to be recognised again, because
                the tokens before its last ``TOLERANCE`` tokens do not fill a block.
        """
        blocks = (len(prompt) - TOLERANCE) // self._block_size
        if not 1 <= blocks <= len(hashes):
            return None
        self._arrivals += 1
        last = self._continued(salt, hashes, prompt)
        if last is None:
            job, number = JobKey(salt, f"{INFERRED_PREFIX}{self._arrivals}"), 1
        else:
            job, number = last.job, last.number + (len(prompt) > last.prompt_tokens)
            self.forget(job)
        start = blocks * self._block_size
        rest = _packed(prompt[start:])
        self._remember(_Turn(job, number, len(prompt), hashes[blocks - 1], start, rest))
        return Inferred(job, number)

    def ended(self, job: JobKey, answer: Sequence[int], *, aborted: bool) -> None:
        """End the running turn of an inferred job. Unknown jobs are ignored.

        Args:
            answer: token ids.
            aborted: True if the client disconnected or cancelled.
        """
        turn = self._jobs.get(job)
        if turn is None:
            return
        self._jobs.move_to_end(job)
        turn.state = _State.ABORTED if aborted else _State.ENDED
        turn.answer = _packed(answer[:ANSWER_TOKENS])
        turn.ended_at = self._arrivals

    def adopt(
        self,
        job: JobKey,
        turn: int,
        hashes: Sequence[bytes],
        prompt: Sequence[int],
        answer: Sequence[int],
    ) -> None:
        """Register a job whose last turn ran on another engine, or belonged to another job. Does
        nothing if the prompt is too short to be recognised (see ``arrived``).

        Args:
            turn: number of that last turn.
            hashes, prompt: as for ``arrived``.
            answer: as for ``ended``.
        """
        blocks = (len(prompt) - TOLERANCE) // self._block_size
        if not 1 <= blocks <= len(hashes):
            return
        self.forget(job)
        start = blocks * self._block_size
        rest = _packed(prompt[start:])
        self._remember(_Turn(job, turn, len(prompt), hashes[blocks - 1], start, rest))
        self.ended(job, answer, aborted=False)

    def dump(self, job: JobKey) -> dict[str, object] | None:
        """Return the last turn of a job as JSON, for ``load``; None if the job is unknown or has a
        salt, or if the turn still runs."""
        turn = self._jobs.get(job)
        if turn is None or job.salt or turn.state is _State.RUNNING:
            return None
        return {
            "name": job.name,
            "turn": turn.number,
            "prompt_tokens": turn.prompt_tokens,
            "block": turn.block.hex(),
            "start": turn.start,
            "rest": memoryview(turn.rest).cast("q").tolist(),
            "answer": memoryview(turn.answer).cast("q").tolist(),
            "aborted": turn.state is _State.ABORTED,
        }

    def load(self, said: object) -> JobKey:
        """Register a job whose last turn ``dump`` returned in another process, and return its
        identity. Call before any request arrives.

        Raises:
            ValueError: ``said`` is malformed.
        """
        match said:
            case {
                "name": str(name),
                "turn": int(number),
                "prompt_tokens": int(prompt_tokens),
                "block": str(block),
                "start": int(start),
                "rest": list(rest),
                "answer": list(answer),
                "aborted": bool(aborted),
            } if name.startswith(INFERRED_PREFIX):
                pass
            case _:
                raise ValueError("its record does not describe an inferred job")
        try:
            named = int(name.removeprefix(INFERRED_PREFIX))
            packed, said_packed = _packed(rest), _packed(answer)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"its tokens are invalid: {error}") from None
        state = _State.ABORTED if aborted else _State.ENDED
        job = JobKey("", name)
        self.forget(job)
        self._arrivals = max(self._arrivals, named)  # the next job gets another name
        self._remember(
            _Turn(
                job,
                number,
                prompt_tokens,
                bytes.fromhex(block),
                start,
                packed,
                said_packed,
                state,
                self._arrivals,
            )
        )
        return job

    def forget(self, job: JobKey) -> None:
        """Forget a job that has no further turn. Unknown jobs are ignored."""
        turn = self._jobs.pop(job, None)
        if turn is None:
            return
        places = self._places[job.salt]
        neighbours = places[turn.block]
        neighbours.remove(turn)
        if not neighbours:
            del places[turn.block]
        if not places:
            del self._places[job.salt]

    def _remember(self, turn: _Turn) -> None:
        neighbours = self._places.get(turn.job.salt, {}).get(turn.block, [])
        if len(neighbours) >= MAX_NEIGHBOURS:
            self.forget(neighbours[0].job)
        if len(self._jobs) >= MAX_JOBS:
            self.forget(next(iter(self._jobs)))
        self._jobs[turn.job] = turn
        self._places.setdefault(turn.job.salt, {}).setdefault(turn.block, []).append(turn)

    def _continued(self, salt: str, hashes: Sequence[bytes], prompt: Sequence[int]) -> _Turn | None:
        """Return the turn that this prompt continues or retries; None if there is none. If there
        are several, the likeliest of the turns that share the longest prefix with the prompt is
        returned."""
        places = self._places.get(salt, {})
        known = filter(places.__contains__, reversed(hashes))
        for block in islice(known, MAX_PLACES):
            start = places[block][0].start
            behind = _packed(prompt[start : start + self._reach])
            found = [turn for turn in places[block] if turn.precedes(behind, len(prompt))]
            if len(found) > 1:
                return self._likeliest(found[-MAX_TWINS:], behind)
            if found:
                return found[0]
        return None

    def _likeliest(self, twins: Sequence[_Turn], behind: bytes) -> _Turn:
        """Choose one of several turns that a prompt continues: the turn with the longest part of
        its answer repeated in the prompt.

        If several turns remain, jobs that have waited much longer than the others are excluded,
        because they are less likely to return at all. Of the other jobs, the job that has waited
        longest is chosen.
        """
        common = [_common_tokens(turn.rest + turn.answer, behind) for turn in twins]
        alike = [turn for turn, n in zip(twins, common, strict=True) if n == max(common)]
        youngest = max(turn.ended_at for turn in alike)
        longest_wait = 2 * (self._arrivals - youngest)
        queue = [turn for turn in alike if self._arrivals - turn.ended_at <= longest_wait]
        return min(queue, key=lambda turn: turn.ended_at)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _common_tokens(one: bytes, other: bytes) -> int:
    pairs = list(zip(memoryview(one).cast("q"), memoryview(other).cast("q"), strict=False))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
