"""A snapshot of a job outlives its server: the next server continues the job from its KV,
bit-exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.e2e.asking import PATIENCE_S, ask, job
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer
from tiered_kv.bench.snapshot.exactness import cut_and_go_on
from tiered_kv.cli.app import app

pytestmark = pytest.mark.e2e

TOKENS = 600


def command(*words: str) -> dict[str, Any]:
    """Run a command, and return its JSON output."""
    ran = CliRunner().invoke(app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


def test_a_job_outlives_its_server(small_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "snapshots"
    options = ServerOptions(
        model=small_model,
        kv_blocks=80,
        max_model_len=1024,
        kv_transfer_config=CONNECTOR,
        env={
            "VLLM_PLUGINS": "tiered_kv",
            "TIERED_KV_CPU_GIB": "0.5",
            "TIERED_KV_SNAPSHOT_PATH": str(root),
        },
    )
    server = VllmServer(options, tmp_path / "server.log", start_timeout_s=PATIENCE_S)
    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        prompt, other = texts(client, 2, TOKENS)
        answer = ask(client, prompt, max_tokens=16, **job("agent"))["choices"][0]["token_ids"]
        turn_2 = [*prompt, *answer, *range(500, 520)]
        taken = command("snapshot", server.url, "--job", "agent", "--out", "night")
        right = ask(client, turn_2, max_tokens=8, **job("agent"))["choices"][0]["token_ids"]
    assert taken["kv_tokens"] == TOKENS + 15
    assert command("inspect", str(root / "night"), "--verify")["kv_tokens"] == TOKENS + 15

    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert command("restore", server.url, "night")["job"] == "agent"
        said = ask(client, turn_2, max_tokens=8, **job("agent"))
        source = said["kv_transfer_params"]["tiered_kv"]
        assert source["cpu_tokens"] == TOKENS + 15
        assert said["choices"][0]["token_ids"] == right

        for number in range(3):
            assert cut_and_go_on(client, client, root, other[: 300 + number], number).equal
