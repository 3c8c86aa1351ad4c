"""Which job a request without a job id belongs to, inferred from its prompt.

An agent's next prompt repeats its last one and goes on, so a request that extends the last
prompt of a job is that job's next turn. Answers are not matched: they come back tokenised anew,
and often cut.

vLLM chains block hashes: a block's hash stands for all tokens up to its end. So a turn is found
by the hash of one block of its prompt, the last one that ends ``TOLERANCE`` tokens or more
before the prompt does, and the few tokens behind that block are compared one by one. A common
system prompt alone joins nothing: questions behind it that differ anywhere but in those last
tokens, where a chat template's own stand, are told apart.

Only the last turn of a job can be continued. What extends an earlier one, or one that is still
running, is a fork: a job of its own, as is a prompt that was trimmed or summarised, and one that
repeats another without going on. A prompt repeated after it was aborted is a retry.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from tiered_kv.policies.base import JobKey

from .hints import INFERRED_PREFIX

TOLERANCE = 4
"""Tokens at the end of a prompt that the next may lack: chat templates end a prompt with an
empty or opened thought that they leave out of the history (four tokens for Qwen3 without
thinking), and the last token of plain text may merge with what follows."""
ANSWER_TOKENS = 64
"""Tokens kept of an answer, to tell samples of one prompt apart."""
MAX_JOBS = 16_384
"""Jobs remembered, about 2 KiB each. The one longest unheard of is forgotten first."""
MAX_NEIGHBOURS = 256
"""Jobs remembered that are found by one block: short questions behind one system prompt."""
MAX_TWINS = 8
"""Samples of one prompt whose answers are compared with what the next prompt repeats."""
MAX_PLACES = 16
"""Blocks of a prompt at which turns are compared; more are a client's doing, not an agent's."""

_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Inferred:
    """The job of a request; ``turn`` is 1 for its first, and the same again for a retry."""

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
        block: hash of the block it is found by.
        start: where in the prompt that block ends.
        rest: the prompt's tokens from ``start`` on, packed.
        answer: the first tokens of the answer, packed.
        ended_at: how many requests had arrived when it ended.
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
        """Whether a prompt that shares the block, with ``behind`` after it, comes next."""
        if self.state is _State.RUNNING:
            return False
        if prompt_tokens > self.prompt_tokens:
            return behind.startswith(self.rest[: -TOLERANCE * _TOKEN_BYTES])
        return self.state is _State.ABORTED and behind == self.rest


class Lineage:
    """Jobs inferred for one engine's requests. One thread; no clock.

    Args:
        block_size: tokens that a hash of ``arrived`` adds to the one before it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._reach = block_size + TOLERANCE + ANSWER_TOKENS
        self._jobs: OrderedDict[JobKey, _Turn] = OrderedDict()
        self._places: dict[str, dict[bytes, list[_Turn]]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def arrived(self, salt: str, hashes: Sequence[bytes], prompt: Sequence[int]) -> Inferred | None:
        """A request without a job id arrived. Its turn runs until ``ended``.

        A new job walks over all of its prompt's hashes once, a next turn over those of what is
        new in it.

        Args:
            salt: the request's ``cache_salt``; jobs of other salts are never considered.
            hashes: of the prompt's full blocks, chained, from the first on.
            prompt: token ids.

        Returns:
            None if the prompt is too short to be recognised again: without its last
            ``TOLERANCE`` tokens it fills no block.
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
        """The running turn of an inferred job ended; ignored if the job is not known.

        Args:
            answer: token ids.
            aborted: the client went away, or cancelled.
        """
        turn = self._jobs.get(job)
        if turn is None:
            return
        self._jobs.move_to_end(job)
        turn.state = _State.ABORTED if aborted else _State.ENDED
        turn.answer = _packed(answer[:ANSWER_TOKENS])
        turn.ended_at = self._arrivals

    def forget(self, job: JobKey) -> None:
        """No turn of this job follows; ignored if it is not known."""
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
        """The turn with the longest prompt that this one extends."""
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
        """Of turns that a prompt all extends, the one whose answer it repeats furthest.

        If that leaves several: the longer a job has waited, the less likely it is to return at
        all, but while their waits are alike they are a queue, first come, first served.
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
