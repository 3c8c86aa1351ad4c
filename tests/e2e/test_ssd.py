"""A restarted server gives the same answers from pages on SSD, also after kill -9."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import EVENT_S, PATIENCE_S, ask, count, tick
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.vllm_server import CONNECTOR, ServerOptions, VllmServer, machine_dtype

pytestmark = pytest.mark.e2e

CONTEXTS, TOKENS = 6, 18 * 32 + 1
"""Full blocks and one token. A hit in VRAM and a restore from SSD both compute only that token, so
both give the same answer if the bits of the full blocks are the same. In batches of different
shapes, bf16 could decide between two equally likely tokens differently."""
LONG_TOKENS = 100 * 32 + 1


def gib(tokens: int) -> float:
    """Return the size of a context in GiB: keys and values of 30 layers with 3 heads of 64
    numbers."""
    number = 4 if machine_dtype().name == "float32" else 2
    return tokens * 30 * 2 * 3 * 64 * number / 2**30


def answers(client: httpx.Client, prompts: list[list[int]]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids: list[int] = ask(client, prompt, max_tokens=16)["choices"][0]["token_ids"]
        found.append(ids)
    return found


def settle(client: httpx.Client) -> None:
    """Wait until all of the connector's orders are finished."""
    by = time.monotonic() + EVENT_S
    tick(client)
    while count(client, "orders_in_flight") and time.monotonic() < by:
        tick(client)


def kill_outright(server: VllmServer) -> None:
    """Kill the server and all of its child processes with SIGKILL."""
    assert server.pid is not None
    group = server.pid
    os.killpg(group, signal.SIGKILL)
    server.stop()
    assert not group_members(group)


def test_a_restarted_server_answers_the_same_from_ssd(small_model: Path, tmp_path: Path) -> None:
    options = ServerOptions(
        model=small_model,
        kv_blocks=60,
        max_model_len=1024,
        kv_transfer_config=CONNECTOR,
        extra_args=("--shutdown-timeout", "10"),
        env={
            "TIERED_KV_CPU_GIB": f"{2.4 * gib(TOKENS):.3f}",  # two of the six contexts
            "TIERED_KV_POLICY": "lru",  # this policy pins nothing in VRAM
            "TIERED_KV_SSD_PATH": str(tmp_path / "ssd"),
            "TIERED_KV_SSD_GIB": "1",
        },
    )
    server = VllmServer(options, tmp_path / "server.log", start_timeout_s=PATIENCE_S)
    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        *prompts, late = texts(client, CONTEXTS + 1, TOKENS)
        right = []
        for prompt in prompts:
            right.append(answers(client, [prompt, prompt])[1])
            # A slow disk or codec may be behind, and pages that are not written yet would be lost
            # by eviction.
            settle(client)
        assert count(client, "prompt_tokens_vram") == CONTEXTS * (TOKENS - 1)
        assert count(client, "prompt_tokens_ssd") == 0
        assert answers(client, prompts) == right
        assert count(client, "prompt_tokens_ssd") > 0.8 * CONTEXTS * TOKENS
        assert count(client, "ssd_bytes") > 0
        prompts.append(late)
        right.append(answers(client, [late, late])[1])
    # The last context is on SSD now: flushed as the server stopped, if not demoted before.

    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        told_by = time.monotonic() + EVENT_S
        while not count(client, "ssd_pages") and time.monotonic() < told_by:
            time.sleep(0.05)
        assert count(client, "ssd_pages") >= (CONTEXTS + 1) * (TOKENS // 32)
        assert count(client, "ssd_bytes") > 0
        assert answers(client, prompts) == right
        late_or_dear = {
            name: count(client, name) for name in ("promotions_overdue", "promotions_refused")
        }
        wanted = (CONTEXTS + 1) * (TOKENS - 1)
        assert count(client, "prompt_tokens_ssd") == wanted, late_or_dear
        kill_outright(server)

    with server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert answers(client, prompts) == right
        assert count(client, "prompt_tokens_ssd") > 0.8 * CONTEXTS * TOKENS
        for name in ("hook_errors", "ssd_pages_bad", "ssd_errors", "promotion_failures"):
            assert count(client, name) == 0, name


def test_a_context_twice_as_large_as_cpu_memory_comes_back_from_ssd(
    small_model: Path, tmp_path: Path
) -> None:
    """An earlier server with more CPU memory wrote the context to SSD. The second server restores
    it in pieces."""

    def options(cpu_gib: float) -> ServerOptions:
        return ServerOptions(
            model=small_model,
            kv_blocks=140,
            max_model_len=4096,
            kv_transfer_config=CONNECTOR,
            extra_args=("--shutdown-timeout", "10"),
            env={
                "TIERED_KV_CPU_GIB": f"{cpu_gib:.4f}",
                "TIERED_KV_POLICY": "lru",
                "TIERED_KV_SSD_PATH": str(tmp_path / "ssd"),
                "TIERED_KV_SSD_GIB": "2",
            },
        )

    roomy = VllmServer(
        options(2 * gib(LONG_TOKENS)), tmp_path / "roomy.log", start_timeout_s=PATIENCE_S
    )
    with roomy, httpx.Client(base_url=roomy.url, timeout=PATIENCE_S) as client:
        prompt = texts(client, 1, LONG_TOKENS)[0]
        right = answers(client, [prompt, prompt])[1]
        settle(client)
    small = VllmServer(
        options(gib(LONG_TOKENS) / 2), tmp_path / "small.log", start_timeout_s=PATIENCE_S
    )
    with small, httpx.Client(base_url=small.url, timeout=PATIENCE_S) as client:
        assert answers(client, [prompt]) == [right]
        assert count(client, "restores_in_pieces") == 1
        assert count(client, "prompt_tokens_ssd") == LONG_TOKENS - 1
        for name in ("hook_errors", "restore_failures", "promotions_overdue"):
            assert count(client, name) == 0, name
