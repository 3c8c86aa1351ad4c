"""Recorded agents are replayed without job names. Each turn is assigned to the job that its session
started."""

from __future__ import annotations

import hashlib
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import pytest

from tiered_kv.bench.agents.sessions import Recorded, read_sessions, recording
from tiered_kv.bench.paths import TRACES
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.lineage import Lineage

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded sessions here")

BLOCK = 16
Sessions = Sequence[Sequence[Recorded]]
Rounds = Iterable[Sequence[Recorded]]
"""Rounds of turns. The turns of a round run concurrently."""


@pytest.fixture(scope="module")
def sessions() -> Sessions:
    """Sessions of mini-swe-agent. Several have the same task."""
    return read_sessions(recording(TRACES, "miniswe"))


def as_chat(session: Sequence[Recorded]) -> list[Recorded]:
    """Return the session with its answers inserted into the prompts, where a chat template puts
    them. A prompt that does not extend the previous one starts a new chat."""
    shown, last, found = "", "", []
    for turn in session:
        if not last or not turn.prompt.startswith(last):
            shown, last = "", ""
        shown += f"<user>{turn.prompt[len(last) :]}<assistant>"
        found.append(replace(turn, prompt=shown))
        shown, last = shown + turn.answer, turn.prompt
    return found


def together(sessions: Sessions) -> Rounds:
    """Yield rounds: the n-th turns of all sessions run in the n-th round."""
    return ([t for t in turns if t is not None] for turns in zip_longest(*sessions))


def as_recorded(sessions: Sessions) -> Rounds:
    """Yield rounds of one turn each, in the order of the recording."""
    return ([t] for t in sorted((t for s in sessions for t in s), key=lambda turn: turn.at))


def shuffled(sessions: Sessions) -> Iterator[Sequence[Recorded]]:
    """Yield rounds with the next turns of randomly drawn sessions."""
    draws, left = random.Random(0), [list(session) for session in sessions]
    while left := [session for session in left if session]:
        drawn = [session for session in left if draws.random() < 0.5]
        draws.shuffle(drawn)
        yield [session.pop(0) for session in drawn]


class Words:
    """A tokenizer with a token for each word, space and punctuation mark."""

    def __init__(self) -> None:
        self._ids = dict[str, int]()

    def __call__(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\w+|\W", text)]


def block_hashes(prompt: Sequence[int], salt: str) -> list[bytes]:
    """Return the hashes of the full blocks. Each is chained to the previous one, and the first to
    the salt."""
    hashes, parent = [], salt.encode()
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        parent = hashlib.sha256(parent + array("q", prompt[end - BLOCK : end]).tobytes()).digest()
        hashes.append(parent)
    return hashes


def outcomes(rounds: Rounds, salt_of: Callable[[Recorded], str] = lambda _: "") -> Counter[str]:
    """Return the number of turns by outcome.

    ``right``: a session's first turn became a new job, or a later turn was assigned to a job that
    the session started. ``wrong``: a turn was assigned to another session's job. ``missed``: all
    others.
    """
    lineage, tokens, found = Lineage(BLOCK), Words(), Counter[str]()
    owners, seen = dict[JobKey, str](), set[str]()
    for turns in rounds:
        running = []
        for turn in turns:
            prompt, salt = tokens(turn.prompt), salt_of(turn)
            inferred = lineage.arrived(salt, block_hashes(prompt, salt), prompt)
            assert inferred is not None
            assert inferred.job.salt == salt
            is_new = inferred.job not in owners
            is_own = owners.setdefault(inferred.job, turn.session) == turn.session
            missed = is_new and turn.session in seen
            found["missed" if missed else "right" if is_own else "wrong"] += 1
            seen.add(turn.session)
            running.append((inferred.job, tokens(turn.answer)))
        for job, answer in running:
            lineage.ended(job, answer, aborted=False)
    return found


@pytest.mark.parametrize("order", [together, as_recorded])
@pytest.mark.parametrize("chats", [False, True], ids=["prompts", "chats"])
def test_every_turn_is_given_to_its_job(
    sessions: Sessions, order: Callable[[Sessions], Rounds], chats: bool
) -> None:
    played = [as_chat(one) for one in sessions] if chats else sessions
    assert outcomes(order(played)) == {"right": sum(map(len, sessions))}


def test_in_any_order_only_runs_of_one_task_without_their_answers_are_confused(
    sessions: Sessions,
) -> None:
    assert outcomes(shuffled([as_chat(one) for one in sessions])).keys() == {"right"}
    found = outcomes(shuffled(sessions))
    assert found["right"] > 0.85 * found.total()
    assert not found["missed"]


def test_the_same_sessions_under_another_salt_are_other_jobs(sessions: Sessions) -> None:
    twice = [
        [replace(turn, session=f"{salt}{turn.session}") for turn in session]
        for session in sessions
        for salt in "ab"
    ]
    assert outcomes(together(twice), lambda turn: turn.session[0]).keys() == {"right"}
