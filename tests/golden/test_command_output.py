"""Shape of the JSON that each command prints with ``--json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_snapshot_commands import root as root
from tests.cli.test_snapshot_commands import server as server
from tests.golden.answers import shape
from tests.golden.conftest import Compare, Copy
from tests.sizing.published import GEMMA3_12B, NEMOTRON_9B, write
from tests.sizing.recorded import answer_recorded
from tests.top.route_server import RouteServer
from tiered_kv.cli.app import app, doctor_command
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.doctor.finding import warn


def output(*arguments: object, code: int = 0) -> Any:
    """Run a command with ``--json``, and return the shape of its output."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return shape(json.loads(result.stdout))


def test_output_for_stores(copy: Copy, tmp_path: Path, compare: Compare) -> None:
    path = copy("store")
    found = {verb: output("store", verb, path) for verb in ("ls", "stat", "verify")}
    found["export"] = output("store", "export", path, "--all", tmp_path / "out")
    segment = next(path.rglob("00000002.seg"))
    content = bytearray(segment.read_bytes())
    content[5 * 4096 + 500] ^= 1
    segment.write_bytes(content)
    found["verify, a bad page"] = output("store", "verify", path, code=1)
    found["gc"] = output("store", "gc", path, "--all")
    compare("output_store", found)


def test_output_for_memory_files(copy: Copy, compare: Compare) -> None:
    path = copy("memory")
    found = {"memory ls": output("memory", "ls", path), "memory gc": output("memory", "gc", path)}
    compare("output_memory", found)


def test_output_for_snapshots_on_disk(copy: Copy, compare: Compare) -> None:
    folder = copy("snapshots")
    found = {
        "inspect": output("inspect", folder / "night", "--verify"),
        "inspect --tokens": output("inspect", folder / "night", "--tokens"),
        "diff": output("diff", folder / "night", folder / "packed.zip"),
    }
    compare("output_inspect", found)


def test_output_for_a_servers_snapshots(
    server: RouteServer,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compare: Compare,
) -> None:
    """The snapshot commands print the route's answer. If a snapshot is moved to a path, the path is
    printed too."""
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)
    path = tmp_path / "put.zip"
    found = {
        "snapshot": output("snapshot", server.url, "--job", "j", "--out", "n"),
        "snapshot to a path": output("snapshot", server.url, "--job", "j", "--out", path),
        "restore": output("restore", server.url, "n"),
        "fork": output("fork", server.url, "--job", "j", "--as", "a", "--as", "b c"),
    }
    compare("output_snapshot", found)


def test_output_for_traces(copy: Copy, compare: Compare) -> None:
    path = copy("trace") / "trace.jsonl"
    found = {
        "trace analyze": output("trace", "analyze", path),
        "trace analyze, two traces": output("trace", "analyze", path, path),
        "trace analyze --job": output("trace", "analyze", path, "--job", "agent"),
    }
    compare("output_trace", found)


def test_output_of_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: Compare) -> None:
    monkeypatch.setattr("tiered_kv.sizing.model_shape.ask_vllm", answer_recorded)
    found = {}
    for name, config in (("window", GEMMA3_12B), ("state", NEMOTRON_9B)):
        (tmp_path / name).mkdir()
        model = write(tmp_path / name, config)
        options = ("--gpu", "h100", "--jobs", 30, "--ssd-gib", 100)
        found[f"plan, {name}"] = output("plan", model, *options)
    compare("output_plan", found)


def test_output_of_doctor(monkeypatch: pytest.MonkeyPatch, compare: Compare) -> None:
    """The real checks take seconds, so a fixed finding replaces them."""
    finding = warn("cores", "two", "give it more")
    monkeypatch.setitem(doctor_command.__globals__, "examine", lambda **_: [finding])
    compare("output_doctor", output("doctor"))
