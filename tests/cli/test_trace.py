"""``tiered-kv trace``, called as a user does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.trace.records import HEADER, record
from tiered_kv.cli.app import app
from tiered_kv.trace.rotation import steps_of
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.trace_file import TraceFile
from tiered_kv.trace.turn_record import GapStory, StoryEnd, TurnRecord, TurnTimes


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", "analyze", *map(str, arguments)])


def turns(took_s: float) -> list[TurnRecord]:
    """Return the records of three jobs with two turns each."""
    return [
        record(
            job=f"j{job}",
            turn=number,
            request=f"j{job}.{number}",
            arrived=1e9 + job + 10 * number,
            times=TurnTimes(admitted_s=0.5, end_s=took_s),
            gap=GapStory(StoryEnd.RETURNED, 4.0) if number == 1 else GapStory(StoryEnd.OVER),
        )
        for job in range(3)
        for number in (1, 2)
    ]


def write(path: Path, took_s: float = 2.0) -> Path:
    file = TraceFile(path, HEADER.to_line(), 700)
    for one in turns(took_s):
        file.append([one.to_line()])
    file.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl")


def test_figures_of_all_files_of_a_trace(path: Path) -> None:
    assert path.with_name("trace.jsonl.1").exists()
    result = run(path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["turns"], found["jobs"]["jobs"], found["bad_lines"]) == (6, 3, 0)
    assert found["jobs"]["completion_s"]["mean"] == 12.0
    assert found["waits"]["queue_s"]["p95"] == 0.5
    assert found["decisions"]["gaps"] == 3


def test_tables_for_people(path: Path) -> None:
    result = run(path)
    assert result.exit_code == 0, result.output
    assert "3, 0 started before the trace, 0 open" in result.stdout
    (line,) = [one for one in result.stdout.splitlines() if one.startswith("job completion")]
    assert line.split()[2:] == ["12.000"] * 5
    assert "decisions by tool" in result.stdout


def write_steps(path: Path) -> None:
    """Write ten step records, a second apart: five with eight requests, five with none."""
    file = TraceFile(steps_of(path), HEADER.to_line(), 700)
    for n in range(10):
        one = StepRecord(step=n + 1, at=1e9 + n, running=8 * (n < 5), nbytes={"cpu": 3 << 20})
        file.append([one.to_line()])
    file.close()


def test_steps_are_summed_up_where_there_are_some(path: Path) -> None:
    assert json.loads(run(path, "--json").stdout)["steps"] is None
    write_steps(path)
    found = json.loads(run(path, "--json").stdout)["steps"]
    assert (found["steps"], found["span_s"]) == (10, 9.0)
    assert found["levels"]["running"] == {"mean": 8 * 5 / 9, "peak": 8}
    (line,) = [one for one in run(path).stdout.splitlines() if one.startswith("running")]
    assert line.split()[1:] == ["4.44", "8"]
    (line,) = [one for one in run(path).stdout.splitlines() if one.startswith("nbytes.cpu")]
    assert line.split()[1:] == ["3.0", "MiB", "3.0", "MiB"]


def test_an_invalid_line_among_the_steps_is_named(path: Path) -> None:
    write_steps(path)
    with steps_of(path).open("a") as file:
        file.write('{"step": "first"}\n')
    result = run(path)
    assert result.exit_code == 1
    assert "step: 'first' is not a whole number" in result.stderr


def test_perfetto_gets_tracks_of_steps_next_to_tracks_of_jobs(path: Path) -> None:
    write_steps(path)
    result = CliRunner().invoke(app, ["trace", "export", str(path), "--perfetto"])
    assert result.exit_code == 0, result.output
    events = json.loads(result.stdout)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"jobs", "tiers", "steps of replica 0"}


def test_two_traces_are_compared_by_job(path: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", took_s=1.0)
    found = json.loads(run(path, other, "--json").stdout)
    assert [one["turns"] for one in found["traces"]] == [6, 6]
    assert found["jobs"] == 3
    assert found["differences"]["completion_s"] == {
        "first": 12.0,
        "second": 11.0,
        "difference": -1.0,
        "low": -1.0,
        "high": -1.0,
    }
    text = run(path, other).stdout
    assert "3 jobs in both" in text
    assert "-1 to -1" in text


def test_one_jobs_story_in_sentences(path: Path) -> None:
    result = run(path, "--job", "j1")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith("Turn 1 (j1.1) arrived at 2001-09-09 ")
    assert first.endswith("The next turn arrived after 4 s.")
    assert second.endswith("The client reported that no turn follows.")
    told = json.loads(run(path, "--job", "j1", "--json").stdout)
    assert [" ".join(one) for one in told["turns"]] == [first, second]


def test_invalid_lines_are_named_and_set_the_exit_code(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"event": "turn", "t": 1.5}\n{"cut')
    result = run(path)
    assert result.exit_code == 1
    assert "missing fields: turn, request, arrived" in result.stderr
    assert result.stderr.count("not a record") == 1, "a last line that was cut off is none"
    found = json.loads(run(path, "--json").stdout)
    assert (found["turns"], found["bad_lines"]) == (6, 1)
    assert found["bad"][0].startswith(str(path))


def test_mistakes_are_reported_in_one_sentence(path: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ([tmp_path / "nowhere"], "there is no trace"),
        ([path, "--job", "nobody"], "has no finished turn of job 'nobody'"),
        ([path, path, "--job", "j1"], "takes a single trace"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", "export", *map(str, arguments)])


def test_a_trace_is_exported_to_a_private_file_or_to_standard_output(
    path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = export(path, "--perfetto", "-o", out)
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event["name"].startswith("turn ") for event in events) == 6
    assert out.stat().st_mode & 0o777 == 0o600
    assert json.loads(export(path, "--perfetto").stdout)["traceEvents"] == events
    jobs = json.loads(export(path, "--continuum").stdout)
    assert {job: len(events) for job, events in jobs.items()} == {"j0": 6, "j1": 6, "j2": 6}


def test_an_empty_trace_is_exported_as_one(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    found = json.loads(export(tmp_path / "empty", "--perfetto").stdout)
    assert [event["ph"] for event in found["traceEvents"]] == ["M", "M"]
    assert json.loads(export(tmp_path / "empty", "--continuum").stdout) == {}


def test_an_export_is_for_one_program_and_of_a_trace(path: Path, tmp_path: Path) -> None:
    for arguments in ([path], [path, "--perfetto", "--continuum"]):
        assert "choose a format" in export(*arguments).stderr
    result = export(tmp_path / "nowhere", "--perfetto", "-o", tmp_path / "out")
    assert (result.exit_code, "there is no trace" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
