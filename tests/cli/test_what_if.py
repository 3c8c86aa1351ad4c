"""``tiered-kv trace analyze --what-if``, called as a user does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.bench.sim.what_if.recordings import jobs, served
from tests.trace.records import HEADER, record
from tiered_kv.cli.app import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", "analyze", *map(str, arguments)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    served("lru", jobs(10), trace)
    return trace


def test_tables_for_people_say_how_far_they_can_be_believed(path: Path) -> None:
    result = run(path, "--what-if", "stock")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert f"{path}: 10 jobs, 80 turns" in lines[0].replace("  ", "")
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "lru, recorded",
        "lru, simulated",
        "stock, simulated",
    ]
    assert any(line.startswith("lru: simulated over recorded") for line in lines)
    assert any(line.startswith("stock over lru, both simulated") for line in lines)
    told = lines[lines.index("Limits of this simulation:") + 1 :]
    assert len(told) >= 4
    assert all(line.startswith("- ") for line in told)


def test_one_json_object_has_every_job(path: Path) -> None:
    result = run(path, "--what-if", "occupancy", "--job-order", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["recorded_policy"], found["policy"]) == ("lru", "occupancy")
    assert found["job_order"] == [False, True]
    assert len(found["by_job"]) == 10
    mean_s = sum(one["what_if_s"] for one in found["by_job"]) / 10
    assert found["what_if"]["mean_s"] == pytest.approx(mean_s)


def test_invalid_lines_are_named_and_set_the_exit_code(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(path.read_text() + "nothing\n")
    result = run(bad, "--what-if", "stock")
    assert result.exit_code == 1
    assert "the line is not JSON" in result.stderr


def test_mistakes_are_reported_in_one_sentence(path: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(f"{HEADER.to_line()}\n{record().to_line()}\n")
    for arguments, said in (
        ([path, "--what-if", "nobody"], "nobody"),
        ([path, "--what-if", "nowhere:Policy"], "nowhere"),
        ([path, path, "--what-if", "lru"], "takes a single trace"),
        ([path, "--job", "j", "--what-if", "lru"], "takes a single trace"),
        ([path, "--job-order"], "need --what-if"),
        ([path, "--recorded", "lru"], "need --what-if"),
        ([few, "--what-if", "lru"], "record more turns"),
        ([tmp_path / "no", "--what-if", "lru"], "there is no trace"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
