"""A job that continues on another server finds its context in a shared folder."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import EVENT_S, PATIENCE_S, ask, count, job, tick
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer

pytestmark = pytest.mark.e2e

JOBS, BLOCKS = 4, 18
TOKENS = BLOCKS * 32 + 1
"""Full blocks and one token: a server that has the blocks computes only that token."""


def answer(client: httpx.Client, name: str, prompt: list[int]) -> list[int]:
    ids: list[int] = ask(client, prompt, 16, **job(name))["choices"][0]["token_ids"]
    return ids


def test_a_jobs_next_turn_on_another_server_is_answered_the_same(
    small_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    options = ServerOptions(
        model=small_model,
        kv_blocks=200,
        max_model_len=1024,
        kv_transfer_config=CONNECTOR,
        env={"TIERED_KV_CPU_GIB": "0.5", "TIERED_KV_REMOTE": f"{folder.as_uri()}?gib=1"},
    )
    server = VllmServer(options, tmp_path / "server.log", start_timeout_s=PATIENCE_S)
    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        prompts = texts(client, JOBS, TOKENS)
        for at, prompt in enumerate(prompts):
            answer(client, f"job {at}", prompt)
        right = [answer(client, f"job {at}", prompt) for at, prompt in enumerate(prompts)]
        assert count(client, "prompt_tokens_vram") >= JOBS * (TOKENS - 1)
        by = time.monotonic() + EVENT_S
        while count(client, "pages_shared") < JOBS * BLOCKS and time.monotonic() < by:
            tick(client)
        assert count(client, "pages_shared") >= JOBS * BLOCKS

    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        found = [answer(client, f"job {at}", prompt) for at, prompt in enumerate(prompts)]
        assert found == right
        # On a busy machine a reply may come too late to be worth waiting for.
        late = count(client, "lookups_overdue") + count(client, "promotions_overdue")
        assert late < JOBS
        assert count(client, "prompt_tokens_remote") >= (JOBS - late) * (TOKENS - 1)
        for name in ("hook_errors", "remote_pages_bad", "remote_errors", "fetch_failures"):
            assert count(client, name) == 0, name
