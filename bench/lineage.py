"""Quality of inferred jobs, for clients that name none: recorded agent sessions, replayed.

    python -m bench.lineage --json

Every turn of every session is tokenised with the small model's tokenizer, hashed in blocks as
vLLM does, and handed to ``Lineage`` without its session. ``right``, ``wrong`` and ``missed`` are
shares of all turns. A session's first turn is right if it becomes a new job, a later one if it
is given to a job that one of the session's turns began. ``wrong`` is a turn given to a job that
another session began, ``missed`` one that became a new job, or none, though it went on.

The same is measured several times:

- without a prefix: all sessions at once, the n-th turns of all of them running together, under
  one salt.
- ``recorded_``: one turn after the other, at the times of the recording.
- ``shuffled_``: ten times, with some of the sessions, drawn at random, in every round. Sessions
  of the same task that begin with the same prompts can then only be guessed apart.
- ``chat_`` and ``chat_shuffled_``: as chats. A recorded prompt is what the agent's environment
  said, without the model's answers; here they stand where a chat template puts them.
- ``salts_``: all at once, and every session once more under another salt.

``crossed`` counts turns given to a job of another salt, in all of these.

``call_us`` and ``call_p99_us`` are what a call takes in the first replay. ``long_new_us`` is the
worst case: a prompt of 100,000 tokens that nobody knows, beside 1,000 jobs.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from tiered_kv.bench.agents.recorded_rows import RecordingError
from tiered_kv.bench.agents.sessions import Recorded, read_sessions, recording
from tiered_kv.bench.output import AsJson, run_benchmark, show
from tiered_kv.bench.paths import TRACES
from tiered_kv.bench.servers.model import ModelError, small_model
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.lineage import Lineage

SHUFFLES = 10
LONG_TOKENS, OTHER_JOBS, LONG_CALLS = 100_000, 1_000, 21

Message = Mapping[str, str]
Tokenise = Callable[[str], list[int]]
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn as it is replayed: token ids."""

    session: str
    at: int
    prompt: Sequence[int]
    answer: Sequence[int]
    salt: str = ""


@dataclass(slots=True)
class Score:
    """Turns by what became of them, and the seconds of every call."""

    turns: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def share(self, outcome: str) -> float:
        """Share of all turns."""
        return self.turns[outcome] / len(self.seconds)

    def __add__(self, other: Score) -> Score:
        return Score(self.turns + other.turns, self.seconds + other.seconds)


def as_chat(session: Sequence[Recorded], render: Render) -> list[Recorded]:
    """The session with its answers in the prompts, as a chat template renders them.

    What a prompt adds to the one before it is a message of the user's; a prompt that does not
    go on from the one before begins a new chat.
    """
    chat: list[Message] = []
    last = ""
    rendered = []
    for turn in session:
        if not last or not turn.prompt.startswith(last):
            chat, last = [], ""
        chat = [*chat, {"role": "user", "content": turn.prompt[len(last) :]}]
        rendered.append(replace(turn, prompt=render(chat)))
        chat = [*chat, {"role": "assistant", "content": turn.answer}]
        last = turn.prompt
    return rendered


def tokenised(session: Sequence[Recorded], tokenise: Tokenise) -> list[Asked]:
    """The session in token ids."""
    return [Asked(t.session, t.at, tokenise(t.prompt), tokenise(t.answer)) for t in session]


def one_by_one(sessions: Iterable[Sequence[Asked]]) -> list[list[Asked]]:
    """Rounds of one turn each, at the times of the recording."""
    return [[turn] for turn in sorted((t for s in sessions for t in s), key=lambda turn: turn.at)]


def all_at_once(sessions: Iterable[Sequence[Asked]]) -> list[list[Asked]]:
    """Rounds of the n-th turns of all sessions."""
    return [[t for t in turns if t is not None] for turns in zip_longest(*sessions)]


def shuffled(sessions: Sequence[Sequence[Asked]], seed: int) -> list[list[Asked]]:
    """Rounds of the next turns of some of the sessions, each drawn with an even chance."""
    chance = random.Random(seed)
    left = [iter(session) for session in sessions]
    rounds = []
    while left:
        drawn = [session for session in left if chance.random() < 0.5]
        chance.shuffle(drawn)
        turns = [(session, next(session, None)) for session in drawn]
        over = [session for session, turn in turns if turn is None]
        left = [session for session in left if session not in over]
        rounds.append([turn for _, turn in turns if turn is not None])
    return rounds


def block_hashes(prompt: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """Hashes of the full blocks, each with the one before it, the first with the salt."""
    packed = memoryview(array("q", prompt).tobytes())
    step = 8 * block_size
    hashes, parent = [], salt.encode()
    for end in range(step, len(packed) + 1, step):
        parent = hashlib.sha256(parent + packed[end - step : end]).digest()
        hashes.append(parent)
    return hashes


def replayed(rounds: Iterable[Sequence[Asked]], block_size: int) -> Score:
    """Infer the jobs of all turns; those of a round all arrive before the first of them ends."""
    lineage, score = Lineage(block_size), Score()
    began: dict[JobKey, tuple[str, str]] = {}
    seen: set[tuple[str, str]] = set()
    for turns in rounds:
        running = []
        for turn in turns:
            hashes = block_hashes(turn.prompt, block_size, turn.salt)
            start = time.perf_counter()
            inferred = lineage.arrived(turn.salt, hashes, turn.prompt)
            score.seconds.append(time.perf_counter() - start)
            if inferred is None:
                score.turns["missed"] += 1
                continue
            session = turn.salt, turn.session
            is_new = inferred.job not in began
            if began.setdefault(inferred.job, session) != session:
                score.turns["wrong"] += 1
            else:
                score.turns["missed" if is_new and session in seen else "right"] += 1
            score.turns["crossed"] += inferred.job.salt != turn.salt
            seen.add(session)
            running.append((inferred.job, turn.answer))
        for job, answer in running:
            lineage.ended(job, answer, aborted=False)
    return score


def long_new_s(block_size: int) -> float:
    """Seconds, the median, for a long prompt that shares nothing with any job."""
    noise = random.Random(1)
    lineage, blocks = Lineage(block_size), LONG_TOKENS // block_size
    for _ in range(OTHER_JOBS):
        lineage.arrived("", [noise.randbytes(32) for _ in range(64)], range(64 * block_size + 5))
    seconds = []
    prompt = list(range(LONG_TOKENS))
    for _ in range(LONG_CALLS):
        hashes = [noise.randbytes(32) for _ in range(blocks)]
        began = time.perf_counter()
        lineage.arrived("", hashes, prompt)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure(
    sessions: Sequence[Sequence[Recorded]], tokenise: Tokenise, render: Render, block_size: int
) -> dict[str, float | int]:
    """All figures; see the module."""
    plain = [tokenised(session, tokenise) for session in sessions]
    chats = [tokenised(as_chat(session, render), tokenise) for session in sessions]
    doubled = [
        [replace(turn, salt=salt) for turn in session] for session in plain for salt in ("a", "b")
    ]

    def in_any_order(sessions: Sequence[Sequence[Asked]]) -> Score:
        seeds = range(SHUFFLES)
        return sum((replayed(shuffled(sessions, n), block_size) for n in seeds), Score())

    scores = {
        "": replayed(all_at_once(plain), block_size),
        "recorded_": replayed(one_by_one(plain), block_size),
        "shuffled_": in_any_order(plain),
        "chat_": replayed(all_at_once(chats), block_size),
        "chat_shuffled_": in_any_order(chats),
        "salts_": replayed(all_at_once(doubled), block_size),
    }
    result: dict[str, float | int] = {
        prefix + outcome: score.share(outcome)
        for prefix, score in scores.items()
        for outcome in ("right", "wrong", "missed")
    }
    first = scores[""]
    return {
        **result,
        "crossed": sum(score.turns["crossed"] for score in scores.values()),
        "sessions": len(sessions),
        "turns": len(first.seconds),
        "right_turns": first.turns["right"],
        "wrong_turns": first.turns["wrong"],
        "missed_turns": first.turns["missed"],
        "block_size": block_size,
        "call_us": median(first.seconds) * 1e6,
        "call_p99_us": float(np.percentile(first.seconds, 99)) * 1e6,
        "long_new_us": long_new_s(block_size) * 1e6,
    }


def main(
    traces: Annotated[Path, typer.Option(help="Folder of recordings.")] = TRACES,
    source: Annotated[
        str, typer.Option(help="Name of a recording, without .jsonl or .jsonl.gz.")
    ] = "miniswe",
    block_size: Annotated[int, typer.Option(help="Size of a block, tokens.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Infer the jobs of recorded turns."""
    try:
        sessions, model = read_sessions(recording(traces, source)), small_model()
    except (RecordingError, ModelError) as error:
        sys.exit(str(error))
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenise(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    def render(chat: Sequence[Message]) -> str:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return text

    result = measure(sessions, tokenise, render, block_size)
    show(f"Jobs inferred in {source}", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
