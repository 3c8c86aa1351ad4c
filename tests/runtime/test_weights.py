"""Weights that change while the engine runs: no KV of other weights is found in any tier, before or
after a restart."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.test_random_weights import UPDATES, Workers
from tiered_kv.connectors.vllm.weights import HARMLESS, OFTEN, watch
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig

PROMPT = text(200, seed=1)


def workers_of(rig: Rig) -> Workers:
    return Workers(rig, itertools.count(1))


def test_no_kv_of_the_old_weights_is_found(make_rig: MakeRig) -> None:
    rig = make_rig()
    workers = workers_of(rig)
    for number, update in enumerate(UPDATES):
        rig.ask(f"before {number}", PROMPT)
        workers.collective_rpc(update)
        found = rig.count("prompt_tokens_cpu")
        rig.ask(f"after {number}", PROMPT)
        assert rig.count("prompt_tokens_cpu") == found
        rig.fill()
        rig.ask(f"again {number}", PROMPT)
        assert rig.count("prompt_tokens_cpu") > found, "what the new weights computed is found"
    assert rig.count("weight_updates") == len(UPDATES)
    rig.check_clean()


def test_harmless_calls_change_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(extra={"cpu_gib": 0.001, "harmless_calls": "report_health, ping"})
    workers = workers_of(rig)
    rig.ask("before", PROMPT)
    adapters = {"add_lora", "remove_lora"}
    for method in {*HARMLESS, "report_health", "ping"} - adapters:
        workers.collective_rpc(method)

    def ping(worker: object) -> None: ...
    def sleep(worker: object) -> None: ...

    ping.__qualname__, sleep.__qualname__ = "ping", "sleep"
    workers.collective_rpc(ping)
    rig.ask("after", PROMPT)
    assert rig.count("prompt_tokens_vram") > 0
    assert rig.count("resets") == rig.count("weight_updates") == 0
    workers.collective_rpc(sleep)
    assert rig.count("weight_updates") == 1, "a function of a trainer's is not vLLM's method"


def test_pins_of_old_kv_are_released(make_rig: MakeRig) -> None:
    rig = make_rig()
    workers = workers_of(rig)
    rig.ask("turn", PROMPT, params={"job_id": "a"})
    assert len(rig.pins)
    workers.collective_rpc("update_weights")
    assert not len(rig.pins)
    assert rig.free_blocks == rig.free_at_start


def test_a_request_that_runs_meanwhile_is_not_saved(make_rig: MakeRig) -> None:
    """The KV of a request that runs during an update is computed partly with the old and partly
    with the new weights. The next turn finds none of it."""
    rig = make_rig()
    workers = workers_of(rig)
    rig.add("mixed", PROMPT, max_tokens=40)
    for _ in range(5):
        rig.step()
    workers.collective_rpc("update_weights")
    rig.run()
    found = rig.count("prompt_tokens_cpu")
    context = PROMPT + rig.outputs["mixed"]
    rig.ask("next", context)
    assert rig.count("prompt_tokens_cpu") == found
    assert rig.count("prompt_tokens_vram") == 0
    rig.check_clean()


@pytest.mark.parametrize("place", ["ssd", "memory"])
def test_after_a_restart_no_kv_of_updated_weights_is_found(
    make_rig: MakeRig, tmp_path: Path, place: str
) -> None:
    """After an update and a restart, the engine has the weights on disk again. KV that the updated
    weights computed is not found, although the prompt's cache salt, the version of the trained
    policy, is the same."""
    folder = tmp_path / place
    extra: dict[str, Any] = {"codec": "raw", "cpu_gib": 0.001, "policy": "lru"}
    if place == "ssd":
        extra |= {"ssd_path": str(folder), "ssd_gib": 1}
    else:
        extra |= {"cpu_path": str(folder), "cpu_keep": True}
    other = text(150, seed=2)
    rig = make_rig(extra=extra)
    workers = workers_of(rig)
    rig.ask("original", other, salt="policy-7")
    workers.collective_rpc("load_from_trainer")
    rig.ask("updated", PROMPT, salt="policy-7")
    rig.wait_for_worker()
    rig.close()
    rig = make_rig(extra=extra)
    workers_of(rig)
    rig.ask("again", PROMPT, salt="policy-7")
    assert rig.count("prompt_tokens_cpu") == rig.count("prompt_tokens_ssd") == 0
    rig.check_clean()


def test_in_observe_mode_an_update_removes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(extra={"cpu_gib": 0.001, "mode": "observe"})
    watch(workers := SimpleNamespace(collective_rpc=lambda *call: None), rig.connector)
    rig.ask("before", PROMPT)
    cached = len(rig.pool.cached_block_hash_to_block)
    workers.collective_rpc("update_weights")
    assert len(rig.pool.cached_block_hash_to_block) == cached > 0
    assert rig.count("weight_updates") == 1


def test_the_log_names_the_method_and_warns_of_one_that_is_called_often(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    workers = workers_of(rig)
    caplog.set_level(logging.INFO, "tiered_kv")
    for _ in range(OFTEN + 5):
        workers.collective_rpc("is_alive")
    # A logger that both handles and propagates a record captures it twice.
    said = {id(one): one for one in caplog.records if "is_alive" in one.getMessage()}
    first, second = said.values()
    assert first.levelno == logging.INFO
    assert second.levelno == logging.WARNING
    assert "TIERED_KV_HARMLESS_CALLS" in second.getMessage()
    rig.now += 100
    workers.collective_rpc("is_alive")
    assert len({id(one) for one in caplog.records if "is_alive" in one.getMessage()}) == 3


def test_every_executor_with_the_connector_is_watched(make_rig: MakeRig) -> None:
    """The test calls the same functions as an engine core at startup, with the connector alone and
    inside a MultiConnector. In both cases, a call that updates weights is counted."""
    from vllm.v1.executor.abstract import Executor

    rig = make_rig()

    class Started(Executor):
        def __init__(self) -> None:
            self.parallel_config = SimpleNamespace(world_size=1)
            self.calls: list[object] = []

        def _init_executor(self) -> None: ...

        def check_health(self) -> None: ...

        def collective_rpc(self, method: object, *args: object, **kwargs: object) -> list[object]:
            self.calls.append(method)
            return []

    for connector in (rig.connector, Several([rig.connector])):
        executor = Started()
        executor.init_kv_output_aggregator(connector)
        before = rig.count("weight_updates")
        executor.collective_rpc("reload_weights")
        executor.reset_mm_cache()
        assert rig.count("weight_updates") == before + 1
        assert executor.calls == ["reload_weights", "reset_mm_cache"]


class Several:
    """The part of vLLM's MultiConnector that the connector reads."""

    def __init__(self, connectors: Sequence[Any]) -> None:
        self._connectors = connectors

    def get_finished_count(self) -> None:
        return None


def test_a_declared_weight_version_counts_as_an_update(make_rig: MakeRig) -> None:
    """A call of vLLM's ``set_weight_version`` counts as an update, regardless of how the weights
    were transferred."""
    from vllm.v1.engine.core import EngineCore

    rig = make_rig()
    workers_of(rig)
    rig.ask("before", PROMPT)
    core: Any = SimpleNamespace(scheduler=rig.scheduler)
    rig.scheduler.get_kv_connector = lambda: rig.connector
    EngineCore.set_weight_version(core, "8")
    assert EngineCore.get_weight_version(core) == "8"
    assert rig.count("weight_updates") == 1


def test_an_adapter_loaded_in_place_starts_a_generation(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    workers = workers_of(rig)
    (tmp_path / "adapter").mkdir()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    adapter = SimpleNamespace(
        lora_int_id=1, lora_name="a", lora_path=str(weights.parent), load_inplace=True
    )
    workers.collective_rpc("add_lora", None, (adapter,))
    assert rig.count("resets") == 0, "nothing was loaded before"
    rig.ask("before", PROMPT)
    workers.collective_rpc("add_lora", None, (adapter,))
    assert rig.count("resets") == 1
    rig.ask("after", PROMPT)
    assert rig.count("prompt_tokens_vram") == rig.count("prompt_tokens_cpu") == 0
    assert rig.count("hook_errors") == 0
