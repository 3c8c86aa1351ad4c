"""Jobs that are loaded from recordings in third-party formats, and adapted to a server's limits."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.live.live_jobs import LiveJobs, Unit, copies, fitting, load_jobs
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn


def load(source: str | Path, count: int = 5) -> LiveJobs:
    return load_jobs(str(source), count=count, seed=0)


def fit(jobs: LiveJobs, **limits: Any) -> LiveJobs:
    return fitting(jobs, **{"tokens_per_unit": 1.0, "most_tokens": None, "turns": None, **limits})


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def request(t: float, tokens: int, out: int, hashes: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": list(hashes), **more}


TRACE = {
    "id": "trace",
    "block_size": 64,
    "requests": [
        request(0.0, 200, 10, [1, 2, 3], type="s", api_time=1.0),
        request(1.5, 200, 10, [1, 2, 3], api_time=2.0),
        {
            "t": 4.0,
            "type": "subagent",
            "agent_id": "helper",
            "duration_ms": 3_000,
            "requests": [request(4.0, 100, 5, [7], api_time=1.0)],
        },
        request(9.5, 300, 20, [1, 2, 3, 4], api_time=1.0),
        request(12.0, 100, 20, [1, 9], think_time=0.25),
    ],
}


@pytest.mark.parametrize("form", ["folder", "file", "lines", "indented"])
def test_traces_of_kv_cache_tester_keep_gaps_shared_tokens_and_sub_agents(
    form: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(TRACE, indent=1 if form == "indented" else None))
    if form == "lines":
        other = {**TRACE, "id": "other"}
        path.write_text(f"{json.dumps(TRACE)}\n{json.dumps(other)}\n")
    found = load(tmp_path if form == "folder" else path)
    job = found.jobs[0]
    assert [(turn.prompt, turn.output) for turn in job.turns] == [(200, 10), (300, 20), (100, 20)]
    assert [turn.shared for turn in job.turns] == [0, 210, 64], "the last was compacted"
    # The second request ends at 3.5 s, and the next turn starts at 9.5 s. The sub-agent takes three
    # of these six seconds.
    assert [turn.gap_s for turn in job.turns] == [3.0, 0.25, 0.0]
    (agent,) = job.turns[0].agents
    assert [(turn.prompt, turn.output) for turn in agent.turns] == [(100, 5)]
    assert len(found.jobs) == (2 if form == "lines" else 1)


def test_mooncakes_requests_are_joined_to_jobs_by_their_prompts_blocks(tmp_path: Path) -> None:
    def row(ms: int, tokens: int, out: int, hashes: Sequence[int]) -> dict[str, Any]:
        said = {"timestamp": ms, "input_length": tokens, "output_length": out}
        return {**said, "hash_ids": list(hashes)}

    path = lines(
        tmp_path / "mooncake.jsonl",
        [
            row(0, 1_100, 60, [1, 2, 3]),
            row(1_000, 1_030, 50, [1, 5, 6]),  # starts like the first job, but is another one
            row(4_000, 1_700, 60, [1, 2, 7, 8]),  # continues the first job
            row(5_000, 1_110, 60, [1, 2, 9]),  # shares the first job's blocks, but not its answer
        ],
    )
    jobs = load(path).jobs
    assert [[turn.prompt for turn in job.turns] for job in jobs] == [
        [1_100, 1_700],
        [1_030],
        [1_110],
    ]
    first = jobs[0]
    assert first.turns[1].shared == 1_160, "the prompt and the answer before"
    assert first.turns[0].gap_s == pytest.approx(4.0 - 60 / 60)
    assert {job.prefix for job in jobs} == {"1"}
    assert [job.prefix_tokens for job in jobs] == [1_024, 512, 1_024]


def test_texts_of_agents_are_kept_and_a_prompt_that_does_not_continue_is_sent_whole(
    tmp_path: Path,
) -> None:
    def row(us: int, prompt: str, answer: str) -> dict[str, Any]:
        return {"session_id": "s", "timestamp": us, "input": prompt, "output": answer}

    rows = [
        row(0, "system task", "look"),
        row(5_000_000, "system task look result", "done"),
        row(6_000_000, "another agent", "yes"),
    ]
    packed = tmp_path / "texts.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    found = load(packed)
    assert found.unit is Unit.CHARACTERS
    assert found.texts["s"] == ("system task", " look result", "another agent")
    (job,) = found.jobs
    assert [turn.shared for turn in job.turns] == [0, len("system tasklook"), 0]
    assert job.turns[0].gap_s == pytest.approx(5 - len("look") / 4 / 60)


def hashed(ms: float, tokens: int, hashes: int, **more: Any) -> dict[str, Any]:
    """Return a request in Mooncake's format with this number of hashes."""
    said = {"timestamp": ms, "input_length": tokens, "output_length": 32}
    return {**said, "hash_ids": list(range(hashes)), **more}


def bailian(chats: int = 40, turns: int = 3) -> list[dict[str, Any]]:
    """Return the requests of several chats, in Bailian's format. The turns of a chat are 30 s
    apart, and each prompt contains the previous prompt and its answer."""
    rows = []
    for chat in range(chats):
        for turn in range(turns):
            tokens = 320 + 352 * turn
            more = {
                "chat_id": 10 * chat + turn,
                "parent_chat_id": 10 * chat + turn - 1 if turn else -1,
                "hash_ids": [f"{chat}.{n}" for n in range(tokens // 16)],
            }
            rows.append(hashed(chat + 30.0 * turn, tokens, 0, **more))
    return sorted(rows, key=lambda row: float(row["timestamp"]))


def test_bailians_requests_are_joined_to_jobs_as_they_name_each_other(tmp_path: Path) -> None:
    path = lines(tmp_path / "bailian.jsonl", bailian())
    jobs = load(path).jobs
    assert len(jobs) == 40
    for job in jobs:
        assert [turn.prompt for turn in job.turns] == [320, 672, 1_024]
        assert [turn.shared for turn in job.turns] == [0, 352, 704], "the prompt and its answer"
        assert [turn.gap_s for turn in job.turns] == pytest.approx([30 - 32 / 60] * 2 + [0.0])


def test_a_prompt_that_was_cut_keeps_what_its_hashes_say(tmp_path: Path) -> None:
    first, second, third = bailian(1)
    second["hash_ids"][5:] = [f"new {n}" for n in range(len(second["hash_ids"]) - 5)]
    fork = {**third, "chat_id": 77, "timestamp": third["timestamp"] + 1}
    lost = {**first, "chat_id": 78, "parent_chat_id": 4_711, "timestamp": 100.0}
    rows = [first, second, third, fork, lost]
    jobs = load(lines(tmp_path / "bailian.jsonl", rows)).jobs
    assert [[turn.shared for turn in job.turns] for job in jobs] == [[0, 80, 80], [0], [0]]


@pytest.mark.parametrize("rows", [[hashed(1e3 * n, 320, 20) for n in range(9)], bailian(2)])
def test_a_wrong_number_of_hashes_per_prompt_is_refused(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    for row in rows:
        if row.pop("chat_id", None) is not None:
            row["hash_ids"] = row["hash_ids"][:3]
    path = lines(tmp_path / "other.jsonl", rows)
    with pytest.raises(ValueError, match=r"does not have the format of .* has (20|3) hashes"):
        load(path)


def test_a_few_odd_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    # Half of the requests lack the hash of their last block.
    rows = [hashed(1e4 * n, 600, 1 + n % 2) for n in range(200)]
    rows[7]["hash_ids"] = []
    found = load(lines(tmp_path / "mooncake.jsonl", rows))
    assert found.left_out["odd_hashes"] == LeftOut(1, 1)
    assert sum(len(job.turns) for job in found.jobs) == 199


def test_times_in_another_unit_leave_no_gaps_and_are_reported(tmp_path: Path) -> None:
    grown = [hashed(n, 600 * n, -(-600 * n // 512)) for n in range(1, 6)]
    with pytest.raises(ValueError, match=r"no gaps between turns.* the times to milliseconds"):
        load(lines(tmp_path / "seconds.jsonl", grown))
    for row in grown:
        row["timestamp"] *= 1_000
    assert len(load(lines(tmp_path / "right.jsonl", grown)).jobs) == 1
    texts = [
        {"session_id": "s", "timestamp": 10 * n, "input": "x" * n, "output": "yes" * 20}
        for n in range(1, 6)
    ]
    with pytest.raises(ValueError, match=r"no gaps between turns.* the times to microseconds"):
        load(lines(tmp_path / "texts.jsonl", texts))


TEXTS = [
    {"session_id": "s", "timestamp": 9e6 * n, "input": "x" * (n + 1), "output": "y"}
    for n in range(3)
]
CODING = [{"id": "s", "reqs": [{"in": 9, "out": 1, "lcp": 0, "gap": 1.0}] * 3}]
OF_EACH_FORM: dict[str, list[dict[str, Any]]] = {
    "mooncake": [hashed(1e4 * n, 600 * (n + 1), (600 * n + 600) // 512) for n in range(3)],
    "bailian": bailian(2),
    "kv-cache-tester": [TRACE],
    "agent texts": TEXTS,
    "coding agents": CODING,
}


@pytest.mark.parametrize("form", OF_EACH_FORM)
def test_each_form_may_be_gzipped_whatever_its_file_is_called(form: str, tmp_path: Path) -> None:
    plain, packed = (tmp_path / name / "recording.jsonl" for name in ("plain", "packed"))
    for path in (plain, packed):
        path.parent.mkdir()
    data = lines(plain, OF_EACH_FORM[form]).read_bytes()
    packed.write_bytes(gzip.compress(data))
    assert load(packed).jobs == load(plain).jobs
    assert load(plain).jobs
    packed.write_bytes(gzip.compress(data)[:-12])
    with pytest.raises(ValueError, match="the gzip data is damaged or truncated"):
        load(packed)


def test_traces_in_a_folder_may_be_gzipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(TRACE))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps({**TRACE, "id": "b"}).encode()))
    (tmp_path / "README.md").write_text("what they are")
    assert len(load(tmp_path).jobs) == 2
    with pytest.raises(ValueError, match=r"contains no \*.json"):
        load(tmp_path.parent)


TRACELAB = """session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
b,1,520,60,40,0
b,0,500,20,0,1500.5
7,0,0,300,50,2000
7,1,350,100,50,250
7,2,64,36,20,9000
"""


def test_tracelab_s_rounds_are_the_turns_of_their_sessions(tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text(TRACELAB)
    b, seven = load(path).jobs
    assert (b.name, seven.name) == ("b", "7")
    assert [(turn.shared, turn.added, turn.output) for turn in b.turns] == [
        (0, 520, 1),  # no earlier round has sent its prefix
        (520, 60, 40),
    ]
    assert [turn.gap_s for turn in b.turns] == [1.5005, 0.0]
    assert [(turn.shared, turn.added) for turn in seven.turns] == [(0, 300), (350, 100), (64, 36)]
    assert [turn.gap_s for turn in seven.turns] == [2.0, 0.25, 0.0], "nothing follows the last"
    path.write_bytes(gzip.compress(TRACELAB.encode()))
    assert load(path).jobs == (b, seven)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("7,3,-1,36,20,9000", "line 7: prefix_len: -1.0 is below 0"),
        ("7,3,1.5,36,20,9000", "line 7: prefix_len: 1.5 is not a whole number"),
        ("7,3,nan,36,20,9000", "line 7: prefix_len: nan is above"),
        ("7,3,long,36,20,9000", "line 7: prefix_len: 'long' is not a number"),
        ("7,3,64,36", "line 7: it lacks output_len, tool_wait_after_ms"),
        ("7,2,64,36,20,9000", "session 7 has two rows with the same round_idx"),
        ('7,3,"64', "line 7: unexpected end of data"),
    ],
)
def test_a_round_that_cannot_be_read_is_refused(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text(f"{TRACELAB}{row}\n")
    with pytest.raises(ValueError, match=said):
        load(path)


ODD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-184", "true", '"7"', "[]", "1" + "0" * 30)


@pytest.mark.parametrize("odd", ODD_NUMBERS)
@pytest.mark.parametrize("form", OF_EACH_FORM)
def test_an_invalid_number_is_refused_with_its_line(form: str, odd: str, tmp_path: Path) -> None:
    """Each numeric field of a request is replaced by an invalid number, including the fields of
    nested requests. Loading the recording raises a ValueError of one line that names the file and
    the line or session."""
    fields = {
        "mooncake": ("timestamp", "input_length", "output_length"),
        "bailian": ("timestamp", "input_length", "output_length"),
        "kv-cache-tester": ("in", "out", "api_time", "duration_ms", "think_time"),
        "agent texts": ("timestamp",),
        "coding agents": ("in", "out", "lcp", "gap"),
    }
    plain = "\n".join(map(json.dumps, OF_EACH_FORM[form]))
    path = tmp_path / "recording.jsonl"
    for field in fields[form]:
        path.write_text(re.sub(rf'"{field}": [-\d.e+]+', f'"{field}": {odd}', plain))
        with pytest.raises(ValueError, match=r"recording.jsonl, (line|session) 1: .+") as caught:
            load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", r"has an unknown format\. Rename its fields \(no field\)"),
        ("nothing", "line 1: it is not JSON"),
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("[{}]", "line 1: it is not a JSON object"),
        ('{"a": 1', "line 1: it is not JSON"),
        ("[" * 100_000, "line 1: the JSON is nested too deeply"),
        ('{"prompt": 1, "\\ud800": 2}', "Rename its fields .prompt, .ud800. to those"),
        ('{"hash_ids": [1], "ts": 0}', "line 1: it lacks timestamp, and has hash_ids, ts"),
        ('{"hash_ids": 3, "timestamp": 0}', "it lacks input_length"),
        (json.dumps(hashed(0, 600, 1, hash_ids="1")), "hash_ids: .* is not a list"),
        (json.dumps(hashed(0, 600, 1, hash_ids=[[1]])), "hash_ids: .1. is neither"),
        (
            json.dumps({**hashed(0, 600, 1), "parent_chat_id": [1]}),
            "parent_chat_id: .1. is neither",
        ),
        ('{"requests": 3}', "requests: 3 is not a list"),
        ('{"requests": [3]}', "it is not a JSON object"),
        ('{"id": "s", "requests": [{"t": 1}]}', "it lacks type, and has t"),
        ('{"id": "s", "requests": []}', "0 turns of 0 sessions are in shorter jobs"),
        (json.dumps({**TRACE, "block_size": 1024}), "set the right block_size"),
        ('{"id": "s", "reqs": [[]]}', "it is not a JSON object"),
        (json.dumps({**TEXTS[0], "input": []}), "input: .* is not a string"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        load(path)
    str(caught.value).encode()  # the message can be printed


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="line 1: it is"):
        load(path)
    path.write_bytes(b'{"session_id": "\xff"}\n')
    with pytest.raises(ValueError, match="neither text in UTF-8 nor gzipped"):
        load(path)
    with pytest.raises(ValueError, match="no workload"):
        load(tmp_path / "missing")


def test_sessions_of_aiperf_are_refused_with_what_they_lack(tmp_path: Path) -> None:
    rows = [hashed(0, 600, 2), hashed(0, 1_200, 3, delay=500)]
    del rows[1]["timestamp"]
    with pytest.raises(ValueError, match="line 2: it has a delay instead of a timestamp"):
        load(lines(tmp_path / "sessions.jsonl", rows))


def job(*turns: SimTurn, name: str = "job") -> LiveJobs:
    return LiveJobs("made", (SimJob(name, 0.0, turns),))


def test_a_job_ends_before_the_turn_that_the_server_could_not_take() -> None:
    long = job(SimTurn(0, 100, 10, 1.0), SimTurn(110, 50, 10, 1.0), SimTurn(170, 500, 10, 0.0))
    found = fit(long, most_tokens=200)
    assert [turn.prompt for turn in found.jobs[0].turns] == [100, 160]
    assert found.jobs[0].turns[-1].gap_s == 0.0, "nothing follows"
    assert found.left_out["cut"] == LeftOut(1, 1)


def test_turns_that_are_not_wanted_are_left_out_of_sub_agents_too() -> None:
    agent = SimJob("agent", 0.0, (SimTurn(0, 5, 5, 1.0), SimTurn(10, 5, 5, 0.0)))
    found = fit(job(SimTurn(0, 10, 10, 1.0, agents=(agent,)), SimTurn(20, 10, 10, 1.0)), turns=1)
    assert found.jobs[0].turns == (SimTurn(0, 10, 10, 0.0),), "no agent begins behind the end"
    two = fit(job(SimTurn(0, 10, 10, 1.0, agents=(agent,)), SimTurn(20, 10, 10, 1.0)), turns=2)
    assert len(two.jobs[0].turns[0].agents[0].turns) == 2


def test_scaled_sizes_still_form_a_conversation() -> None:
    found = fit(job(SimTurn(0, 100, 10, 1.0), SimTurn(110, 50, 10, 1.0)), tokens_per_unit=0.5)
    first, second = found.jobs[0].turns
    assert (first.prompt, first.output) == (50, 5)
    assert (second.shared, second.prompt, second.output) == (55, 80, 5)
    assert second.gap_s == 0.0


def test_if_no_job_fits_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="--scale below 1"):
        fit(job(SimTurn(0, 100, 10, 0.0)), most_tokens=50)


def test_jobs_are_repeated_under_new_names() -> None:
    two = (SimJob("a", 0.0, ()), SimJob("b", 0.0, ()))
    assert [one.name for one in islice(copies(two), 5)] == [
        "a",
        "b",
        "a-copy1",
        "b-copy1",
        "a-copy2",
    ]
