"""The lineage benchmark's figures are what they say."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tiered_kv.bench.agents.recorded_rows import RecordingError
from tiered_kv.bench.agents.sessions import Recorded, read_sessions, recording
from tiered_kv.bench.lineage import (
    Asked,
    Message,
    all_at_once,
    as_chat,
    block_hashes,
    measure,
    one_by_one,
    replayed,
    shuffled,
)

BLOCK = 4


def session(name: str, turns: int, *, task: str | None = None) -> list[Recorded]:
    """An agent's recording: every prompt is the one before and what a tool said."""
    texts = [f"the task of {task or name} at length\n"]
    texts += [f"{name}'s tool says {n}\n" for n in range(1, turns)]
    prompts = itertools.accumulate(texts)
    return [Recorded(name, n * 10, text, f"{name} {n}") for n, text in enumerate(prompts)]


def tokenise(text: str) -> list[int]:
    return list(text.encode())


def render(chat: Sequence[Message]) -> str:
    return "".join(f"<{one['role']}>{one['content']}" for one in chat) + "<assistant>"


def asked(recorded: Sequence[Recorded]) -> list[Asked]:
    return [Asked(t.session, t.at, tokenise(t.prompt), tokenise(t.answer)) for t in recorded]


def test_sessions_are_read_in_the_order_of_their_turns(tmp_path: Path) -> None:
    rows = [
        {"session_id": name, "timestamp": at, "input": f"{at}", "output": "", "more": None}
        for name, at in (("a", 3), ("b", 1), ("a", 2))
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    (tmp_path / "plain.jsonl").write_bytes(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    found = read_sessions(recording(tmp_path, "plain"))
    assert [[turn.at for turn in one] for one in found] == [[1], [2, 3]]
    assert read_sessions(recording(tmp_path, "packed")) == found


def test_the_file_that_is_named_is_read_and_not_one_beside_it(tmp_path: Path) -> None:
    plain, packed = tmp_path / "both.jsonl", tmp_path / "both.jsonl.gz"
    for path, name in ((plain, "a"), (packed, "b")):
        row = {"session_id": name, "timestamp": 0, "input": "", "output": ""}
        data = json.dumps(row).encode()
        path.write_bytes(gzip.compress(data) if path is packed else data)
    assert [one[0].session for one in read_sessions(plain)] == ["a"]
    assert [one[0].session for one in read_sessions(packed)] == ["b"]
    assert recording(tmp_path, "both") == packed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"session_id": "a"}',
        b"no json",
        gzip.compress(b"{}", mtime=0)[:-9],
        gzip.compress(b"", mtime=0)[:10] + b"\xff",
    ],
    ids=["nothing", "no session", "half a turn", "no json", "cut off", "no gzip behind its head"],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_bytes(content)
    with pytest.raises(RecordingError):
        read_sessions(odd)
    with pytest.raises(RecordingError):
        read_sessions(recording(tmp_path, "missing"))


def test_hashes_are_chained_and_salted() -> None:
    short, long = block_hashes(range(9), BLOCK, ""), block_hashes(range(13), BLOCK, "")
    assert (len(short), len(long)) == (2, 3)
    assert long[:2] == short
    assert not set(block_hashes([9, *range(1, 13)], BLOCK, "")) & set(long)
    assert not set(block_hashes(range(13), BLOCK, "salt")) & set(long)


def test_every_order_has_every_turn_once_and_in_its_session_order() -> None:
    sessions = [asked(session(name, turns)) for name, turns in (("a", 3), ("b", 5), ("c", 1))]
    for rounds in (one_by_one(sessions), all_at_once(sessions), shuffled(sessions, 3)):
        turns = [turn for one in rounds for turn in one]
        for one in sessions:
            assert [turn for turn in turns if turn.session == one[0].session] == one
        assert len(turns) == 9
    assert [len(one) for one in all_at_once(sessions)] == [3, 2, 2, 1, 1]
    assert all(len({turn.session for turn in one}) == len(one) for one in shuffled(sessions, 3))


def test_answers_stand_between_the_messages_of_a_chat() -> None:
    chat = as_chat(
        [Recorded("a", 0, "do", "x"), Recorded("a", 1, "do it", "y"), Recorded("a", 2, "new", "z")],
        render,
    )
    assert [turn.prompt for turn in chat] == [
        "<user>do<assistant>",
        "<user>do<assistant>x<user> it<assistant>",
        "<user>new<assistant>",
    ]


def test_a_turn_is_right_in_its_sessions_job_missed_in_a_new_one_wrong_in_anothers() -> None:
    a, b = asked(session("a", 3)), asked(session("b", 1))
    stolen = Asked("b", 0, [*a[1].prompt, *b"b goes on"], [])
    cut = Asked("a", 0, a[2].prompt[5:], [])
    short = Asked("a", 0, [1, 2], [])
    score = replayed([[a[0]], [b[0]], [a[1]], [stolen], [cut], [short]], BLOCK)
    assert score.turns == {"right": 3, "wrong": 1, "missed": 2, "crossed": 0}
    assert score.share("missed") == 2 / 6
    assert len(score.seconds) == 6


def test_sessions_of_one_task_are_right_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.bench.lineage.LONG_TOKENS", 100)
    sessions = [session(name, 6, task="both") for name in "ab"] + [session("c", 4)]
    result = measure(sessions, tokenise, render, BLOCK)
    for order in ("", "recorded_", "chat_", "chat_shuffled_", "salts_"):
        assert result[f"{order}right"] == 1.0, order
    assert result["crossed"] == result["wrong_turns"] == result["missed_turns"] == 0
    assert (result["sessions"], result["turns"], result["right_turns"]) == (3, 16, 16)
    for order in ("", "shuffled_"):
        shares = [result[f"{order}{outcome}"] for outcome in ("right", "wrong", "missed")]
        assert sum(shares) == pytest.approx(1)
    assert 0 < result["call_us"] <= result["call_p99_us"]
