from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.replay.kinds import (
    BLOCK,
    REACH_SCHEDULER,
    SCHEDULER,
    Kind,
    longest_context,
    make_kinds,
    size_for,
)
from tiered_kv.bench.servers.peers import BehindRouter, WithCacheServer

SIZING = size_for([3000, 2000], 6400)


def made(**given: object) -> dict[str, Kind]:
    return {kind.name: kind for kind in make_kinds("model", SIZING, **given)}  # type: ignore[arg-type]


def flag(kind: Kind, name: str) -> str | None:
    command = kind.options.command(1, on_cpu=True)
    return command[command.index(name) + 1] if name in command else None


@given(st.lists(st.integers(1, 8000), min_size=1, max_size=40))
def test_the_pool_holds_one_request_and_the_bound_all(contexts: list[int]) -> None:
    sizing = size_for(contexts, 8512)
    assert max(contexts) < sizing.max_model_len < sizing.pool_tokens <= sizing.bound_tokens
    blocks = sum(-(-context // BLOCK) for context in contexts)
    assert sizing.bound_tokens // BLOCK > blocks


def test_a_pool_that_cannot_hold_the_longest_job_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 1000 tokens"):
        size_for([3000], 1000)
    with pytest.raises(ValueError, match="no jobs"):
        size_for([], 1000)


@given(st.integers(1_000, 50_000))
def test_the_longest_context_that_fits_is_known_beforehand(pool_tokens: int) -> None:
    longest = longest_context(pool_tokens)
    size_for([longest], pool_tokens)
    with pytest.raises(ValueError, match=f"a pool of {pool_tokens} tokens"):
        size_for([longest + 1], pool_tokens)


def test_servers_differ_in_nothing_but_what_is_compared() -> None:
    kinds = made(policies=["lru"], ssd=True)
    for name in ("--model", "--max-model-len", "--block-size", "--logits-processors"):
        assert len({flag(kind, name) for kind in kinds.values()}) == 1
    pools = {name: flag(kind, "--num-gpu-blocks-override") for name, kind in kinds.items()}
    unlimited = str(-(-SIZING.bound_tokens // BLOCK))
    assert pools.pop("bound") == pools.pop("reach") == unlimited
    assert set(pools.values()) == {"200"}
    assert all(flag(kind, "--logprobs-mode") == "raw_logprobs" for kind in kinds.values())
    assert json.loads(flag(kinds["reach"], "--additional-config") or "") == {"reach_blocks": 200}
    assert flag(made(forced=False)["stock"], "--logits-processors") is None


def test_ours_run_our_scheduler_unless_the_connector_is_wanted_alone() -> None:
    module, _, name = REACH_SCHEDULER.rpartition(".")
    assert getattr(import_module(module), name).__name__ == name
    for name, kind in made(policies=["lru"], ssd=True).items():
        ours = SCHEDULER if name in ("tiered", "tiered-ssd") else None
        assert flag(kind, "--scheduler-cls") == (REACH_SCHEDULER if name == "reach" else ours)
    alone = {flag(kind, "--scheduler-cls") for kind in made(own_scheduler=True).values()}
    assert alone == {None, REACH_SCHEDULER}


def test_a_policy_and_an_ssd_make_kinds_of_their_own(tmp_path: Path) -> None:
    kinds = made(policies=["lru", "continuum", "lru"], ssd=True)
    ours = [name for name in kinds if name.startswith("tiered")]
    assert ours == ["tiered", "tiered-lru", "tiered-continuum", "tiered-ssd"]
    assert kinds["tiered-lru"].options.env["TIERED_KV_POLICY"] == "lru"
    assert "TIERED_KV_POLICY" not in kinds["tiered"].options.env
    started = kinds["tiered-ssd"].started_in(tmp_path).env
    assert Path(started["TIERED_KV_SSD_PATH"]).parent == tmp_path
    assert "TIERED_KV_SSD_PATH" not in kinds["tiered"].started_in(tmp_path).env


def test_every_start_of_ours_has_a_trace_of_its_own(tmp_path: Path) -> None:
    for name, kind in made().items():
        one, other = (kind.started_in(tmp_path / start).env for start in "ab")
        assert (one != other) == (name == "tiered")


def test_offloading_of_vllm_is_optional_and_gets_as_much_memory_as_ours() -> None:
    kinds = made()
    optional = [kind for kind in kinds.values() if kind.optional]
    assert [kind.name for kind in optional] == ["vllm-offloading", "vllm-simple"]
    config = kinds["vllm-simple"].options.kv_transfer_config
    assert config is not None
    assert config["kv_connector_extra_config"] == {"cpu_bytes_to_use": 4 << 30}


def test_peers_run_with_stock_and_the_router_also_with_ours() -> None:
    kinds = made(peers=True)
    assert [name for name in kinds if name not in made()] == [
        "lmcache",
        "vllm-router",
        "tiered-behind-router",
    ]
    assert kinds["vllm-router"].options == kinds["lmcache"].options == kinds["stock"].options
    assert kinds["tiered-behind-router"].options == kinds["tiered"].options
    assert kinds["lmcache"].deploy == WithCacheServer(4.0)
    assert kinds["vllm-router"].deploy == BehindRouter(SIZING.pool_tokens, 1)
    for name, kind in kinds.items():
        assert kind.session_header == kind.needs_costs == name.endswith("router")
