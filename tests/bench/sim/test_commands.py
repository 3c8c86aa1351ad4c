"""The simulator's command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from bench.common.model import ModelError
from bench.common.server import ServerError
from bench.common.sessions import RecordingError
from bench.replay.ledger import LedgerError
from bench.replay.measure import MeasureError
from bench.sim.__main__ import main


@pytest.mark.parametrize(
    "failure", [RecordingError, ModelError, ServerError, MeasureError, LedgerError]
)
def test_what_ends_a_replay_with_a_message_ends_validate_so(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: argparse.Namespace) -> dict[str, Any]:
        raise failure("it cannot be had")

    monkeypatch.setattr("bench.sim.__main__._validate", fail)
    assert main(["validate"]) == 1
    assert capsys.readouterr().err == "error: it cannot be had\n"


@pytest.mark.parametrize(("worst", "code"), [(0.15, 0), (0.16, 1)])
def test_the_worst_error_of_a_mean_decides_whether_the_simulator_is_believed(
    worst: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"mean_error": worst, "order_equal": True, "conserved": True}
    monkeypatch.setattr("bench.sim.__main__._validate", lambda _args: found)
    assert main(["validate", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == found
