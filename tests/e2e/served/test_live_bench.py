"""``tiered-kv bench`` measures a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.e2e.slow_proxy import slow_proxy
from tiered_kv.bench.live.__main__ import app
from tiered_kv.bench.servers.vllm_server import VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def call(*words: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_jobs_are_played_and_their_contexts_found_again(
    server: VllmServer, tmp_path: Path, api: str
) -> None:
    said = call("--url", server.url, "--api", api, "--sessions", "2", "--duration", "0.1",
                "--turns", "3", "--scale", "0.3", "--rounds", "2", "--out", tmp_path)  # fmt: skip
    (row,) = said["servers"]
    assert row["unfinished"] == 0, row["first_error"]
    assert row["num_jobs"] >= 4
    first, second, third = row["by_turn"]
    assert 200 < first["prompt_tokens"] < 300, "750 tokens, scaled by 0.3"
    grows = second["prompt_tokens"] - first["prompt_tokens"]
    assert 70 < grows < 140, "the answer, and 250 tokens scaled"
    assert third["prompt_tokens"] > second["prompt_tokens"]
    found = row["hits_by_counter"]
    assert 0.3 < found["vram"] + found["connector"] < 0.7, "no run found another run's pages"


def test_a_pin_is_verified_on_a_server_that_runs(server: VllmServer, client: httpx.Client) -> None:
    client.post("/reset_prefix_cache").raise_for_status()  # jobs of other tests may still be pinned
    said = call("verify-pin", "--url", server.url)
    assert said["holds"], said["faults"]
    assert said["handed_over"] >= 4
    before, *later = said["held_blocks"][:-1]
    assert before > 0
    assert later == sorted(set(later)), "more after every turn"


@pytest.mark.nightly
def test_a_server_equals_itself_and_differs_from_itself_behind_a_slower_proxy(
    server: VllmServer, tmp_path: Path
) -> None:
    """The interval of the difference contains zero if a server is compared with itself, and is at
    most ten percentage points wide. If every answer takes 10% longer, the interval does not contain
    zero."""
    load = ("--sessions", "2", "--scale", "0.3", "--duration", "20", "--seed", "1")
    said = call("--url", server.url, "--url", server.url, *load, "--out", tmp_path / "same")
    same = said["pairs"][0]["paired_difference"]
    assert same["low"] <= 0 <= same["high"]
    assert (same["high"] - same["low"]) / 2 <= 5
    with slow_proxy(server.url, 1.1) as url:
        said = call("--url", server.url, "--url", url, *load, "--out", tmp_path / "slower")
    slower = said["pairs"][0]["paired_difference"]
    assert slower["low"] > 0
    assert 3 < slower["percent"] < 20, "gaps are no part of an answer"
