"""``tiered-kv top --once`` prints one frame and exits, or exits with 2 and a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.runtime.conftest import MakeRig, make_rig
from tests.top.recorded import busy_rig, record
from tests.top.route_server import RouteServer
from tiered_kv.cli.app import app
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.top.route_client import NO_ROUTES

__all__ = ["make_rig"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments])


def test_a_frame_is_printed_and_the_command_ends(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = record(monkeypatch, busy_rig(make_rig, tmp_path))
    monkeypatch.setenv(ADMIN_TOKEN, "of the environment")
    with RouteServer(answers).running() as server:
        for arguments in (["--once"], ["--once", "--token", "given"], []):
            result = invoke(server.url, *arguments)
            assert result.exit_code == 0, result.output
            lines = result.output.splitlines()
            assert lines[0].startswith(f"{server.url}  tiered-kv ")
            assert [line for line in lines if line.startswith("pinned ")]
            assert "\x1b" not in result.output
    assert set(server.tokens) == {"Bearer of the environment", "Bearer given"}


def test_a_server_without_the_routes_is_reported_in_a_sentence() -> None:
    with RouteServer({}).running() as server:
        result = invoke(server.url, "--once")
    assert result.exit_code == 2
    assert result.stderr == f"tiered-kv: {NO_ROUTES}\n"
    assert not result.stdout
    result = invoke(server.url)
    assert result.exit_code == 2
    assert "check that the server runs" in result.stderr


def test_an_invalid_address_is_reported() -> None:
    result = invoke("file:///etc/passwd", "--once")
    assert result.exit_code == 2
    assert "http://HOST:8000" in result.stderr
