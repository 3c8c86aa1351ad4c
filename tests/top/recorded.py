"""Recorded answers of the routes, from schedulers of real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.between_turns.waiting import CONTEXT, FAST, LONG, reader, waiting_rig
from tests.runtime.conftest import MakeRig
from tests.top.route_server import Answer, Answers
from tests.vllm.routes.test_core_method import call, core_of
from tests.vllm.routes.test_endpoints import serve
from tiered_kv.connectors.vllm import plugin
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.top.route_client import PAGE

HOSTILE = "\x1b[31mred\x1b[2J\r\n[bold]x[/] \u202e \u05e9 🎉 " + "y" * 300
"""Job name with escape sequences, markup and wide characters."""


class Engines:
    """A stub of vLLM's engine client, which passes calls on to the cores of test rigs."""

    def __init__(self, *rigs: Rig) -> None:
        plugin.register()
        self._cores = [core_of(rig) for rig in rigs]

    async def call_utility_all_async(self, method: str, question: dict[str, Any]) -> list[str]:
        return [json.dumps(call(core, question)) for core in self._cores]


def record(monkeypatch: pytest.MonkeyPatch, *rigs: Rig) -> Answers:
    """Record the current status and all pages of the job list."""
    _, ask = serve(monkeypatch, Engines(*rigs))
    found, after = dict[str, Answer](), "0.0"
    paths = ["/tiered_kv/status"]
    while paths:
        path = paths.pop()
        got = ask(path)
        assert got.status_code == 200, got.text
        found[path] = Answer(got.text)
        after = got.json().get("next", "0.0")
        if after is not None:
            paths.append(f"/tiered_kv/jobs?limit={PAGE}&after={after}")
    return found


def busy_rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """Create an engine with a pinned job, a job whose KV is being demoted to SSD, a running job,
    and a job with a hostile name."""
    rig = waiting_rig(make_rig, tmp_path)
    for name, tool in (("pinned", FAST), ("away", LONG)):
        rig.ask(f"{name} 1", CONTEXT, params={"job_id": name})
        reader(rig).says(f"{name} 1", tool)
        rig.step()
    rig.ask("hostile 1", text(40, seed=3), params={"job_id": HOSTILE})
    rig.add("running 1", text(60, seed=4), max_tokens=30, params={"job_id": "running"})
    for _ in range(4):
        rig.step()
    return rig
