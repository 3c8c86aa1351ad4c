"""Random clients, faults and resets: outputs stay right, nothing hangs, and every block and slot is
accounted for at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import (
    Script,
    SomeTools,
    choose_policies,
    play_each,
    some_options,
    some_size,
    some_tiers,
)
from tests.runtime.groups.kinds import MODELS
from tiered_kv.connectors.runtime.worker import cpu_memory
from tiered_kv.testing.checked_kv import CELL
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.vllm.groups import GroupSpec, group_pages
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture(autouse=True)
def _processor_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of matrix products, which would take a quarter of the time. The rig
    ignores its result."""
    monkeypatch.setattr(cpu_memory, "measure_flops", lambda *_: 0.0)


ACTS = {
    "turn": 70,
    "compact": 10,
    "abort": 10,
    "fail_copy": 8,
    "fail_store": 7,
    "reset": 5,
    "hint": 12,
}


def watch_the_order(rig: Rig) -> None:
    """Check that no new job starts while an older one is parked, that parked requests are in
    admission order, and that none is parked beyond the admission limit."""
    allocated, build = rig.half.on_allocated, rig.half.build_orders
    longest = rig.options.extra["admission_max_wait_s"] if rig.options.extra else 0.0
    queue = rig.admission.queue

    def watched(request_id: str, *args: Any) -> None:
        turn = rig.turn(request_id)
        if turn.hold.new:
            parked = [one.arrival_time for one in rig.scheduler.parked.values()]
            assert turn.request.arrival_time < min(parked, default=float("inf")), "overtaken"
        parked = list(rig.scheduler.parked)
        assert parked == queue.in_parked_order(parked) or queue.ranks_changed
        allocated(request_id, *args)

    def built(*args: Any) -> Any:
        for one in rig.scheduler.parked.values():
            assert rig.now - rig.turn(one.request_id).arrived_at < longest, "held for too long"
        return build(*args)

    rig.half.on_allocated, rig.half.build_orders = watched, built


def some_settings(rng: random.Random, folder: Path, page_bytes: int) -> dict[str, Any]:
    return {
        **some_tiers(rng, folder, page_bytes, [0, 0, 30, 300]),
        "pin_fraction": rng.choice([0, 0.5, 1]),
        "admission": rng.choice(["auto", "auto", "off"]),
        "admission_max_wait_s": rng.choice([2, 2, 300]),
        "eviction": rng.choice(["lru", "worth", "worth"]),
    }


def play_script(
    folder: Path,
    seed: int,
    groups: tuple[GroupSpec, ...] = (),
    configure: Callable[[Any], None] = lambda _: None,
) -> None:
    """Play one script.

    Args:
        groups: KV groups; a single one with full attention if empty.
        configure: changes vLLM's configuration.
    """
    rng = random.Random(seed)
    options = some_options(
        rng,
        groups,
        tools=SomeTools(rng) if rng.random() < 0.5 else None,
        configure=configure,
        extra=some_settings(rng, folder, group_pages(groups or (GroupSpec(),), CELL)[0].page_bytes),
    )
    with Rig(folder / "model", options) as rig:
        choose_policies(rig, rng)
        if options.in_job_order:
            watch_the_order(rig)
        script = Script(rig, rng, ACTS)
        script.play(rng.randrange(10, 40))
        script.finish()


@pytest.mark.scripts(150, nightly=10_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_script)


@pytest.mark.scripts(1000, nightly=10_000)
def test_random_scripts_with_several_kv_types_end_well(tmp_path: Path, seeds: range) -> None:
    models = list(MODELS.values())
    play_each(tmp_path, seeds, lambda at, seed: play_script(at, seed, models[seed % len(models)]))


@pytest.mark.scripts(75, nightly=4_000)
def test_random_scripts_of_the_second_engine_end_well(tmp_path: Path, seeds: range) -> None:
    """The engine contains no part of vLLM. In one of five scripts it has no connector."""

    def play(folder: Path, seed: int) -> Mapping[str, int]:
        rng = random.Random(seed)
        extra = some_settings(rng, folder, 16 * CELL * LAYERS) if seed % 5 else None
        with SecondRig(RigOptions(**some_size(rng), extra=extra)) as rig:
            if extra is not None:
                choose_policies(rig, rng)
            script = Script(rig, rng, ACTS)
            script.play(rng.randrange(10, 40))
            script.finish()
            return {"pages_restored": rig.count("pages_restored") if extra is not None else 0}

    play_each(tmp_path, seeds, play)
