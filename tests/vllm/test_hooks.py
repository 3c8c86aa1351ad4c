"""Hooks of the connector: invalid requests and internal errors do not stop the engine."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.vllm.requests import vllm_request
from tiered_kv.errors import ConfigError
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.transfer.base import Direction

BAD_HINTS: list[Any] = [
    {"job_id": 12.5},
    {"job_id": ["a"]},
    {"job_id": ""},
    {"job_id": "x" * 10_000_000},
    {"job_id": "j", "is_last_step": "yes"},
    {"job_id": "j", "ttl": -5},
    {"is_last_step": None, "nonsense": {"deep": [1, 2, {"er": None}]}},
    {"job_id": True},
]


def test_bad_hints_are_counted_and_ignored(make_rig: MakeRig) -> None:
    rig = make_rig()
    for i, hints in enumerate(BAD_HINTS):
        prompt = text(50, seed=i)
        assert rig.ask(f"r{i}", prompt, params=hints) == expected(prompt, 4)

    assert rig.count("hints_ignored") == len(BAD_HINTS)  # one invalid hint in each
    rig.now += 10
    rig.ask("tick", text(1, seed=99))
    rig.check_clean()


FROM_THE_CLIENT = {"client": {"session": "S"}}


@pytest.mark.parametrize(
    ("plugins", "ids", "said"),
    [
        (None, {}, True),
        ("other", {}, True),
        ("tiered_kv", {}, False),
        ("other,tiered_kv", {}, False),
        (None, FROM_THE_CLIENT, False),
        (None, {"job_id": "j"}, False),
    ],
)
def test_the_log_reports_once_that_ids_in_headers_are_not_read(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plugins: str | None,
    ids: dict[str, Any],
    said: bool,
) -> None:
    """The engine does not see headers. It only sees that no request has IDs from the middleware,
    and logs this once, after several such requests."""
    monkeypatch.setattr(vllm_request, "UNNAMED", 3)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    rig = make_rig()
    # Engines of earlier tests may have attached vLLM's handler to the package's logger.
    monkeypatch.setattr(vllm_request.logger, "propagate", False)
    monkeypatch.setattr(vllm_request.logger, "handlers", [caplog.handler])
    with caplog.at_level("INFO", vllm_request.__name__):
        for number in range(8):
            rig.ask(f"r{number}", text(40, seed=number), params=ids)
    found = [one for one in caplog.messages if "middleware" in one]
    assert len(found) == said
    assert not said or found[0].startswith("3 requests named no job")


@pytest.mark.parametrize(
    "hook",
    [
        "on_arrived",
        "match",
        "build_orders",
        "on_reports",
        "on_finished",
        "release_for_running",
        "stats.take",
    ],
)
def test_an_exception_in_a_hook_only_increments_a_counter(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    rig = make_rig(blocks=24, max_model_len=256)

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    owner, _, name = f"half.{hook}".rpartition(".")
    monkeypatch.setattr(attrgetter(owner)(rig), name, broken)
    prompts = {f"r{i}": text(120, seed=i) for i in range(3)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, max_tokens=60)
    for _ in range(400):
        if len(rig.finished) == 3:
            break
        rig.step()

    for name, prompt in prompts.items():
        assert rig.outputs[name] == expected(prompt, 60)
    assert rig.count("hook_errors") > 0


def test_a_restore_that_cannot_be_ordered_is_recomputed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM already counts the restored tokens as computed. If the connector did not report a
    failure, vLLM would use garbage."""
    rig = make_rig()
    prompt = text(300, seed=1)
    rig.ask("first", prompt)
    rig.fill()

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.pages.restores, "order", broken)
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("hook_errors") == 1


def test_the_answer_reports_where_its_prompt_came_from(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(200, seed=1)
    rig.ask("t1", prompt, params={"job_id": "j"})
    rig.now += 5
    rig.fill()
    rig.ask("t2", prompt, params={"job_id": "j", "is_last_step": True})

    told = rig.finished["t2"].kv_transfer_params["tiered_kv"]
    assert told == {
        "prompt_tokens": 200,
        "vram_tokens": 0,
        "cpu_tokens": 199,
        "recomputed_tokens": 1,
        "ssd_tokens": 0,
        "remote_tokens": 0,
    }


def test_every_turn_has_a_line_in_the_trace(make_rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rig = make_rig(extra={"cpu_gib": 0.001, "trace": str(path)})
    rig.ask("t1", text(100, seed=1), params={"job_id": "j"})
    rig.ask("t2", text(150, seed=2), params={"job_id": "j", "is_last_step": True})
    rig.close()

    reader = TraceReader(path)
    found = list(reader)
    assert [(one.job, one.turn, one.decision.tier) for one in found] == [
        ("j", 1, "pin"),
        ("j", 2, "drop"),
    ]
    for one in found:
        tokens = one.tokens
        parts = tokens.vram + tokens.cpu + tokens.ssd + tokens.recomputed
        assert parts == tokens.prompt
    (header,) = reader.headers
    assert header.model == str(tmp_path / "model")
    assert header.block_size == 16
    assert header.tiers_bytes == {"cpu": int(0.001 * 2**30)}


def test_a_trace_that_cannot_be_written_stops_the_startup(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"TIERED_KV_TRACE=.*cannot be written"):
        make_rig(extra={"trace": str(tmp_path / "no such folder" / "trace.jsonl")})


def test_cpu_memory_for_less_than_a_page_stops_the_startup(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="TIERED_KV_CPU_GIB=1e-09 is too small for a single page"):
        make_rig(extra={"cpu_gib": 1e-9})


@pytest.mark.parametrize("hidden", [False, True])
def test_a_request_that_waits_for_a_restore_can_be_left_out_of_vllms_waiting_requests(
    make_rig: MakeRig, hidden: bool
) -> None:
    rig = make_rig(
        in_job_order=True, extra={"cpu_gib": 0.001, "hide_restores": hidden}, max_num_seqs=2
    )
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    copies = rig.inject(FaultyTransfer)
    returning = text(300, seed=1)
    rig.ask("earlier", returning)
    rig.fill()

    rig.add("running", text(20, seed=2), max_tokens=40)
    copies.hold(Direction.LOAD)
    rig.add("returning", returning)
    rig.step()
    rig.step()
    assert copies.held
    waiting = rig.last_stats.num_waiting_reqs + rig.last_stats.num_skipped_waiting_reqs
    assert waiting == (0 if hidden else 1)

    for number in (3, 4):  # as many as may run
        rig.add(f"queued-{number}", text(20, seed=number), max_tokens=40)
    rig.step()
    waiting = rig.last_stats.num_waiting_reqs + rig.last_stats.num_skipped_waiting_reqs
    assert waiting == (1 if hidden else 2), "a request that lacks a seat counts"

    copies.let_go()
    rig.run()
    assert rig.outputs["returning"] == expected(returning, 4)
    rig.check_clean()


def test_counters_reach_vllms_stats(make_rig: MakeRig) -> None:
    rig = make_rig()
    kind = type(rig.connector)
    rig.add("t1", text(100, seed=1))
    seen = kind.build_kv_connector_stats()
    while rig.scheduler.has_requests():
        rig.step()
        if (stats := rig.last_stats) is not None and stats.kv_connector_stats:
            seen.aggregate(kind.build_kv_connector_stats(stats.kv_connector_stats))

    told = seen.reduce()
    assert told["turns"] == 1
    assert told["pages_saved"] == 7
    assert told["prompt_tokens_recomputed"] == 100
    assert told["cpu_bytes_most"] == rig.index.num_slots * rig.half.facts.slot_bytes
