"""``tiered-kv bench`` measures running servers, compares them and plots the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.bench.agents.stub_server import StubServer, running
from tiered_kv.bench.live.__main__ import app

QUICK = ("--duration", "0.1", "--turns", "2", "--jobs", "3", "--scale", "0.05")


@pytest.fixture
def server() -> Iterator[StubServer]:
    with running(StubServer()) as made:
        yield made


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def measure(*words: str | Path) -> dict[str, Any]:
    done = call(*words, *QUICK, "--json")
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_two_servers_are_measured_in_pairs(server: StubServer, tmp_path: Path) -> None:
    with running(StubServer(takes_s=0.3)) as slow:
        urls = ("--url", server.url, "--url", slow.url, "--name", "quick", "--name", "slow")
        said = measure(*urls, "--sessions", "2", "--rounds", "3", "--out", tmp_path)
    quick, other = said["servers"]
    assert (quick["server"], other["server"]) == ("quick", "slow")
    assert quick["rounds"] == other["rounds"] == 3
    assert quick["unfinished"] == other["unfinished"] == 0
    (pair,) = said["pairs"]
    assert pair["over"] == "quick"
    assert pair["paired_difference"]["percent"] > 0
    assert pair["rounds"] == 3
    assert other["hits_by_counter"]["vram"] == pytest.approx(other["hit_ratio"], abs=0.02)


def test_a_sweep_is_resumed_and_drawn(server: StubServer, tmp_path: Path) -> None:
    words = ("--url", server.url, "--sessions", "1", "--rounds", "1", "--out", tmp_path)
    measure(*words)
    before = len(server.bodies)
    said = measure(*words, "--sessions", "2", "--resume")
    assert [row["sessions"] for row in said["servers"]] == [1, 2]
    resumed = json.loads((tmp_path / "runs" / "sessions-1-0-{}.json".format(
        server.url.removeprefix("http://"))).read_text())  # fmt: skip
    first = next(row for row in said["servers"] if row["sessions"] == 1)
    assert first["num_jobs"] == len(resumed["run"]["jobs"])
    assert len(server.bodies) > before
    done = call("plot", tmp_path, "--json")
    files = [Path(one) for one in json.loads(done.stdout)["files"]]
    assert [one.name for one in files] == ["sessions.png", "sessions.svg"]
    assert all(one.stat().st_size > 1_000 for one in files)


def test_two_measurements_are_compared_in_pairs(server: StubServer, tmp_path: Path) -> None:
    for name in ("one", "two"):
        measure("--url", server.url, "--sessions", "1", "--rounds", "2", "--out", tmp_path / name)
    done = call("compare", tmp_path / "one", tmp_path / "two", "--json")
    said = json.loads(done.stdout)
    assert [row["server"] for row in said["servers"]] == [
        str(tmp_path / "one"),
        str(tmp_path / "two"),
    ]
    assert said["pairs"][0]["rounds"] == 2
    measure("--url", server.url, "--sessions", "1", "--out", tmp_path / "odd", "--seed", "9")
    same = call("compare", tmp_path / "one", tmp_path / "two" / ".." / "one")
    assert same.exit_code == 1
    assert "are the same folder" in same.output
    odd = call("compare", tmp_path / "one", tmp_path / "odd")
    assert odd.exit_code == 1
    assert "cannot be compared" in odd.output
    assert "seed" in odd.output


def test_without_json_the_result_is_tables(server: StubServer, tmp_path: Path) -> None:
    done = call("--url", server.url, "--url", server.url, "--sessions", "1", "--rounds", "1",
                "--out", tmp_path, *QUICK)  # fmt: skip
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "Jobs on running servers: servers" in text
    assert "Jobs on running servers: difference of job times" in text
    assert f"{server.url.removeprefix('http://')}-2" in text, "the same server under two names"
    assert "--turns allows" in text, "turns were cut"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "at least one server address is required"),
        (("--url", "http://x"), "either --jps or --sessions"),
        (("--url", "http://x", "--jps", "1", "--sessions", "1"), "either --jps or --sessions"),
        (("--url", "http://x", "--jps", "1", "--name", "a", "--name", "b"), "2 names"),
        (("--url", "http://127.0.0.1:9", "--jps", "1"), "does not answer"),
        (("verify-pin", "--url", "http://127.0.0.1:9"), "does not answer correctly"),
        (("--url", "ftp://x", "--jps", "1"), "not an HTTP address"),
        (("--url", "http://x", "--jps", "1", "--workload", "nothing"), "no workload"),
    ],
)
def test_a_measurement_that_cannot_run_is_an_error(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = call(*words, *(() if "verify-pin" in words else ("--out", tmp_path)))
    assert done.exit_code not in (0, 130)
    assert said in " ".join(done.output.replace("│", "").split())


def test_a_server_that_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    class Refusing(StubServer):
        def answer(self, body: Any, headers: Any) -> Any:
            return 400, {"error": {"message": "no ignore_eos here", "code": 400}}

    with running(Refusing()) as server:
        other = call("--url", server.url, "--jps", "1", "--out", tmp_path, "--model", "other")
        assert "serves stub, not other" in other.output
        done = call("--url", server.url, "--jps", "1", "--out", tmp_path, *QUICK)
    assert done.exit_code == 1
    assert "no ignore_eos here" in done.output
    assert "--plain" in done.output
