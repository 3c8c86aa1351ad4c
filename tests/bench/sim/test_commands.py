"""The simulator's command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.agents.recorded_rows import RecordingError
from tiered_kv.bench.agents.run_files import RunFileError
from tiered_kv.bench.replay.measure import MeasureError
from tiered_kv.bench.servers.model import ModelError
from tiered_kv.bench.servers.service import ServerError
from tiered_kv.bench.sim.__main__ import app


@pytest.mark.parametrize(
    "failure", [RecordingError, ModelError, ServerError, MeasureError, RunFileError]
)
def test_what_ends_a_replay_with_a_message_ends_validate_so(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Path, resume: bool) -> dict[str, Any]:
        raise failure("it cannot be had")

    monkeypatch.setattr("tiered_kv.bench.sim.validate.validate", fail)
    with pytest.raises(SystemExit) as ended:
        app(["validate"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: it cannot be had\n"


@pytest.mark.parametrize(("worst", "code"), [(0.15, 0), (0.16, 1)])
def test_the_worst_error_of_a_mean_decides_whether_the_simulator_is_believed(
    worst: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"mean_error": worst, "order_equal": True, "conserved": True}
    monkeypatch.setattr("tiered_kv.bench.sim.validate.validate", lambda *_, resume: found)
    with pytest.raises(SystemExit) as ended:
        app(["validate", "--json"])
    assert ended.value.code == code
    assert json.loads(capsys.readouterr().out) == found


def test_an_unknown_machine_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["run", "--gpu", "abacus"])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "abacus is none of l4-24, " in said
    assert " rtx4090-24, " in said
