"""Weights that change while the engine runs: no KV of other weights is found, in any tier, before
or after a restart."""

from __future__ import annotations

import itertools
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.random_scripts import play_each
from tests.runtime.conftest import MakeRig
from tests.runtime.test_generations import Generations
from tiered_kv.connectors.vllm.weights import HARMLESS, OFTEN, watch
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig, RigOptions
from tiered_kv.transfer.base import Direction

PROMPT = text(200, seed=1)
UPDATES: Sequence[str | Callable[..., object]] = (
    "update_weights",
    "reload_weights",
    "load_from_trainer",
    lambda worker: None,
)


class Workers:
    """Workers that get other weights with every call that is an update.

    Args:
        versions: numbers of weights; those of the files are 0.
    """

    def __init__(self, rig: Rig, versions: Iterator[int]) -> None:
        self.runner = rig.runner = Generations(rig)
        self._versions = versions
        watch(self, rig.connector)

    def collective_rpc(
        self, method: object, timeout: object = None, args: object = (), kwargs: object = None
    ) -> None:
        """As an executor of vLLM has it."""
        if method in UPDATES:
            self.runner.begin()
            self.runner.generation = next(self._versions)


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
    """Its KV is of both."""
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
    """The policy's number as cache salt is the same in both lives."""
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


def test_an_engine_that_is_observed_keeps_what_stock_keeps(make_rig: MakeRig) -> None:
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
    # A logger that both handles and propagates has a record captured twice.
    said = {id(one): one for one in caplog.records if "is_alive" in one.getMessage()}
    first, second = said.values()
    assert first.levelno == logging.INFO
    assert second.levelno == logging.WARNING
    assert "TIERED_KV_HARMLESS_CALLS" in second.getMessage()
    rig.now += 100
    workers.collective_rpc("is_alive")
    assert len({id(one) for one in caplog.records if "is_alive" in one.getMessage()}) == 3


def test_vllm_has_every_executor_watched_that_is_given_the_connector(make_rig: MakeRig) -> None:
    """By the way that an engine core goes at its start, also inside a MultiConnector."""
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
    """As much of vLLM's MultiConnector as is looked at."""

    def __init__(self, connectors: Sequence[Any]) -> None:
        self._connectors = connectors

    def get_finished_count(self) -> None:
        return None


def test_a_weight_version_that_a_trainer_declares_is_an_update(make_rig: MakeRig) -> None:
    """The call counts as an update however the weights were transferred."""
    from vllm.v1.engine.core import EngineCore

    rig = make_rig()
    workers_of(rig)
    rig.ask("before", PROMPT)
    core: Any = SimpleNamespace(scheduler=rig.scheduler)
    rig.scheduler.get_kv_connector = lambda: rig.connector
    EngineCore.set_weight_version(core, "8")
    assert EngineCore.get_weight_version(core) == "8"
    assert rig.count("weight_updates") == 1


def test_an_adapter_loaded_in_place_begins_a_generation(make_rig: MakeRig, tmp_path: Path) -> None:
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


def play(folder: Path, seed: int) -> None:
    """Engines that follow each other on the same folders, each of which starts with the weights of
    the files. Every update is another model, whose KV is told from all others."""
    rng, versions = random.Random(seed), itertools.cycle(range(1, 255))
    memory = folder / "memory"
    kept: dict[str, dict[str, Any]] = {
        "ssd": {"ssd_path": str(folder / "ssd"), "ssd_gib": 1},
        "memory": {"cpu_keep": True},
        "none": {},
    }
    place = rng.choice(["ssd", "memory", "none"])
    contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(3)]
    salts = [None, "policy-1", "policy-2"]
    for life in range(rng.choice([1, 2, 2, 3])):
        extra: dict[str, Any] = {
            "cpu_gib": rng.choice([12, 300]) * 16 * CELL / 2**30,
            "admission": "off",
            "codec": "raw",
            **kept[place],
        }
        if place == "memory":
            extra["cpu_path"] = str(memory)
        options = RigOptions(
            blocks=rng.choice([30, 60]),
            max_model_len=256,
            max_batched_tokens=rng.choice([64, 256]),
            max_num_seqs=rng.choice([2, 8]),
            in_job_order=rng.random() < 0.5,
            ahead=rng.random() < 0.5,
            extra=extra,
        )
        with Rig(folder / "model", options) as rig:
            workers = Workers(rig, versions)
            rig.pages.restores.policy = AlwaysRestore(rng.choice(list(RestoreMode)))
            faulty = rig.inject(FaultyTransfer)
            for i in range(rng.randrange(15, 35)):
                for _ in range(rng.randrange(6)):
                    rig.step()
                rig.now += rng.choice([0, 0.1, 3])
                what = rng.random()
                live = [name for name in rig.outputs if name not in rig.finished]
                if what < 0.65:
                    job = rng.randrange(3)
                    context = contexts[job][: rng.randrange(1, len(contexts[job]) + 1)]
                    params = rng.choice([{"job_id": f"job{job}"}, None])
                    salt = rng.choice(salts)
                    tokens = rng.randrange(1, 40)
                    rig.add(f"r{i}", context, max_tokens=tokens, params=params, salt=salt)
                    if len(contexts[job]) < 170:
                        contexts[job] = contexts[job] + expected(context, 3) + text(20, seed=i)
                elif what < 0.72 and live:
                    rig.abort(rng.choice(live), late=rng.random() < 0.5)
                elif what < 0.77:
                    faulty.fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
                elif what < 0.82:
                    rig.wait_for_worker()
                else:
                    if rng.random() < 0.3:
                        rig.run()
                    for _ in range(rng.choice([1, 1, 3])):  # start, update, finish
                        workers.collective_rpc(rng.choice(UPDATES))
                        if rng.random() < 0.3:
                            rig.step()
                    if rng.random() < 0.3:  # trainers may reset as well, before or after
                        rig.scheduler.reset_prefix_cache()
            if place == "memory" and rng.random() < 0.5:  # what a killed engine leaves
                memory = folder / f"memory of {life}"
                shutil.copytree(extra["cpu_path"], memory)
            rig.run()
            rig.half.release_all()
            rig.wait_for_worker()
            rig.run()
            rig.check_clean()


@pytest.mark.scripts(50, nightly=10_000)
def test_random_scripts_with_weights_that_change(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play)
