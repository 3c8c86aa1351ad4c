"""KV events under random scripts with every tier. After each step, a consumer of the events has the
pages that are in the indices and whose tokens some request contained. The events' tokens and parent
hashes agree with vLLM's own events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import (
    Script,
    choose_policies,
    play_each,
    some_contexts,
    some_options,
    some_size,
    some_tiers,
)
from tests.runtime.event_consumers import Consumer, Expected, publish_events
from tests.runtime.groups.kinds import MODELS
from tests.runtime.pages import troubled_place
from tests.runtime.two_ranks import TwoRankRig, TwoRanks, facts_of_two
from tiered_kv.connectors.runtime.worker import cpu_memory
from tiered_kv.remote import breaker
from tiered_kv.testing.checked_kv import CELL
from tiered_kv.testing.engine import halves, rig
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.groups import GroupSpec, group_pages
from tiered_kv.testing.vllm.rig import Rig

ACTS = {
    "turn": 70,
    "compact": 10,
    "abort": 8,
    "fail_copy": 8,
    "fail_store": 7,
    "reset": 4,
    "hint": 8,
    "wait": 10,
}


@pytest.fixture(autouse=True)
def _processor_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "measure_flops", lambda *_: 0.0)


class Watch:
    """Compares a consumer with the indices after each step of an engine.

    Args:
        take: passes the events of the step to the consumer; None if the engine does.
        convert: converts a block hash as the engine does for events.
        adopts: True if the engine finds pages of other engines. These are published once they are
            in a prompt or are saved.
        asks: True if a tier must be queried, so that its pages may disappear and reappear. A page
            that reappears is published once a request contains it again.
    """

    def __init__(
        self,
        rig: EngineRig,
        groups: list[int],
        take: Callable[[], Any] | None = None,
        convert: Callable[[Any], Any] = bytes,
        *,
        adopts: bool = False,
        asks: bool = False,
    ) -> None:
        self.adopts, self.asks = adopts, asks
        self.rig, self.consumer = rig, Consumer()
        self.expected = Expected(rig, groups, convert)
        self.reached = Counter[str]({"CPU": 0, "STORAGE": 0})
        step = rig.step

        def watched() -> Any:
            result = step()
            if take is not None:
                self.consumer.take(take())
            self.look()
            return result

        rig.step = watched  # type: ignore[method-assign]

    def look(self) -> None:
        self.expected.look()
        if self.rig.half.events.pending:
            return
        prompts = self.expected.tiers(self.expected.prompts) if self.adopts else {}
        for tier, hashes in self.expected.tiers(self.expected.named).items():
            told = self.consumer.has[tier]
            if self.adopts or self.asks:
                assert told <= hashes, tier
                assert self.asks or told >= prompts[tier], tier
            else:
                assert told == hashes, tier
            self.reached[tier[1][0]] += len(told)

    def finish(self) -> Mapping[str, int]:
        """Wait until all events are published, and compare once more. Returns the number of
        compared hashes, by medium."""
        while self.rig.half.events.pending:
            self.rig.step()
        self.look()
        return self.reached


def some_settings(rng: random.Random, folder: Path, page_bytes: int) -> dict[str, Any]:
    return {
        **some_tiers(rng, folder, page_bytes, [30, 30, 300]),
        "pin_fraction": rng.choice([0, 0.5, 1]),
        "admission": "off",
        "eviction": rng.choice(["lru", "worth"]),
    }


def play_on_vllm(folder: Path, seed: int, groups: tuple[GroupSpec, ...] = ()) -> Mapping[str, int]:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    rng = random.Random(seed)
    page_bytes = group_pages(groups or (GroupSpec(),), CELL)[0].page_bytes
    options = some_options(
        rng, groups, configure=publish_events, extra=some_settings(rng, folder, page_bytes)
    )
    with Rig(folder / "model", options) as engine:
        choose_policies(engine, rng)
        groups_of_vllm = [group.index for group in engine.half.facts.groups]
        watch = Watch(engine, groups_of_vllm, convert=maybe_convert_block_hash)
        engine.scheduler.kv_event_publisher = watch.consumer
        script = Script(engine, rng, ACTS)
        script.play(rng.randrange(10, 40))
        script.finish()
        return {**watch.finish(), "as in VRAM": watch.consumer.compare_with_vram()}


@pytest.mark.scripts(60, nightly=5_000)
def test_events_tell_what_the_indices_hold(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_on_vllm)


@pytest.mark.scripts(60, nightly=5_000)
def test_events_of_several_kv_types_tell_what_the_indices_hold(
    tmp_path: Path, seeds: range
) -> None:
    models = list(MODELS.values())
    play_each(tmp_path, seeds, lambda at, seed: play_on_vllm(at, seed, models[seed % len(models)]))


def play_on_second(make: Callable[[RigOptions], SecondRig], folder: Path, seed: int) -> Any:
    rng = random.Random(seed)
    extra = some_settings(rng, folder, 16 * CELL * LAYERS)
    with make(RigOptions(**some_size(rng), extra=extra, events=True)) as engine:
        choose_policies(engine, rng)
        assert engine.halves is not None
        watch = Watch(engine, [0], engine.halves.take_events)
        script = Script(engine, rng, ACTS)
        script.play(rng.randrange(10, 40))
        script.finish()
        return watch.finish()


@pytest.mark.scripts(40, nightly=2_000)
def test_events_of_the_second_engine_tell_what_the_indices_hold(
    tmp_path: Path, seeds: range
) -> None:
    play_each(tmp_path, seeds, lambda at, seed: play_on_second(SecondRig, at, seed))


@pytest.mark.scripts(40, nightly=2_000)
def test_events_of_two_ranks_tell_what_both_have(
    tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "read_facts", facts_of_two)
    monkeypatch.setattr(rig, "Halves", TwoRanks)
    play_each(tmp_path, seeds, lambda at, seed: play_on_second(TwoRankRig, at, seed))


def play_lives(folder: Path, seed: int) -> Mapping[str, int]:
    """Play several engines one after another. They share a folder, or a tier that must be
    queried."""
    rng = random.Random(seed)
    place, contexts = troubled_place.renew(), some_contexts(rng)
    asks = rng.random() < 0.5
    name = f"{troubled_place.__name__}:{rng.choice(['OwnTier', 'SharedTier'])}"
    tier = {"tiers": name} if asks else {"ssd_path": str(folder / "ssd"), "ssd_gib": 1}
    reached = Counter[str]()
    for _ in range(rng.randrange(2, 4)):
        extra = {**some_settings(rng, folder, 16 * CELL * LAYERS), "ssd_path": "", **tier}
        options = RigOptions(**some_size(rng), extra=extra, events=True)
        with SecondRig(options) as engine:
            choose_policies(engine, rng)
            assert engine.halves is not None
            watch = Watch(engine, [0], engine.halves.take_events, adopts=True, asks=asks)
            script = Script(engine, rng, ACTS, contexts)
            script.play(rng.randrange(5, 20))
            if asks:
                place.befall(rng)
                script.play(5)
                place.recover()
            script.finish()
            reached.update(watch.finish())
    return reached


@pytest.mark.scripts(40, nightly=2_000)
def test_events_of_later_engines_tell_what_they_find(
    tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "PATIENCE_S", 0.005)
    play_each(tmp_path, seeds, play_lives)
