"""``tiered-kv doctor`` reports what is wrong, and what to change."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.doctor.web import metrics, serve, text
from tiered_kv.cli.app import app
from tiered_kv.config import ENV_PREFIX


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove tiered-kv's and LMCache's settings from the environment, and set a small CPU tier."""
    for name in list(os.environ):
        if name.startswith((ENV_PREFIX, "LMCACHE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TIERED_KV_CPU_GIB", "0.01")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def checks(*arguments: str, code: int) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.output)
    assert found["good"] == (code == 0)
    return {one["check"]: one for one in found["checks"]}


def test_a_healthy_machine_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("TIERED_KV_SSD_PATH", str(tmp_path))
    result = invoke()
    assert result.exit_code == 0, result.output
    words = re.sub(r" +", " ", result.output)
    for line in ("plugin ok", "cores ", "SSD folder ok", "SSD speed "):
        assert f"\n{line}" in words
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_setting_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_KV_SSD_PTH", "/nvme")
    found = checks(code=1)
    assert found["TIERED_KV_SSD_PTH"]["verdict"] == "fail"
    assert "did you mean TIERED_KV_SSD_PATH?" in found["TIERED_KV_SSD_PTH"]["advice"]


def test_a_running_server_is_checked_too() -> None:
    pytest.importorskip("vllm")
    page = metrics(turns=4, pages_saved=9, cpu_slots=10, hook_errors=1)
    with serve({"/health": text(""), "/metrics": text(page)}) as url:
        found = checks(url, code=0)
    assert found["server"]["verdict"] == "ok"
    assert found["hook_errors"]["verdict"] == "warn"


def test_a_missing_server_exits_with_1() -> None:
    with serve({}) as url:
        pass
    assert checks(url, code=1)["server"]["verdict"] == "fail"
