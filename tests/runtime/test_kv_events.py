"""KV events of the tiers outside VRAM, as vLLM publishes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.event_consumers import Consumer, blocks_of, publish_events
from tests.runtime.pages.test_lower_tiers import tiers
from tiered_kv.connectors.runtime import kv_events
from tiered_kv.connectors.vllm.published_events import EventConverter
from tiered_kv.connectors.vllm.requests.vllm_request import VllmRequest
from tiered_kv.keys import DIGEST_BYTES
from tiered_kv.orders import OrderKind
from tiered_kv.page_group import KvKind
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

PROMPT = text(100, seed=1)
"""Six whole blocks and a partial one."""
JOB = {"job_id": "job"}
CPU, SSD = ("CPU", None), ("STORAGE", "ssd")


class Listening:
    """An engine whose KV events are sent to a consumer."""

    def __init__(self, make_rig: MakeRig, **options: Any) -> None:
        self.rig: Rig = make_rig(configure=publish_events, **options)
        self.consumer = self.rig.scheduler.kv_event_publisher = Consumer()

    def has(self, tier: tuple[str, str | None], group: int = 0) -> set[Any]:
        return self.consumer.has[group, tier]

    def stored(self, medium: str) -> list[Any]:
        """Return the BlockStored events of a medium so far."""
        events = self.consumer.events
        return [one for one in events if _name(one) == "BlockStored" and one.medium == medium]


def _name(event: Any) -> str:
    return type(event).__name__


def hashes_of(rig: Rig, prompt: Sequence[int], **fields: Any) -> list[Any]:
    """Return the block hashes of a prompt, as published."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    request = rig.make_request("never sent", prompt, **fields)
    return [*map(maybe_convert_block_hash, request.block_hashes)]


def in_cpu(rig: Rig, prompt: Sequence[int]) -> list[Any]:
    """Return the page keys of a prompt's whole blocks that CPU memory has."""
    names = rig.half.pages.names.fingerprints(SimpleNamespace(adapter=None))
    hashes = rig.make_request("never sent", prompt).block_hashes
    return [key for key in (names[0] + one for one in hashes) if rig.index.readable(key)]


def test_a_saved_context_is_reported_in_whole_blocks_as_in_vram(make_rig: MakeRig) -> None:
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT, max_tokens=4)
    assert engine.has(CPU) == set(hashes_of(engine.rig, PROMPT))
    assert len(engine.rig.index) == 7, "the partial block is in CPU memory too"
    assert engine.consumer.compare_with_vram() == 6
    vram, cpu = engine.stored("GPU")[0], engine.stored("CPU")[0]
    same = "block_size group_idx kv_cache_spec_kind kv_cache_spec_sliding_window lora_id lora_name"
    assert [getattr(cpu, field) for field in same.split()] == [
        getattr(vram, field) for field in same.split()
    ]
    assert (cpu.locality, cpu.ownership) == ("LOCAL", None)
    assert engine.rig.count("kv_events") == len(engine.stored("CPU"))


def test_events_are_those_of_vllms_own_offloader(make_rig: MakeRig) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
        OffloadingEventsTracker,
        get_offloading_event_group_spec,
    )
    from vllm.v1.kv_offload.base import (
        Locality,
        Medium,
        OffloadingEvent,
        OffloadingKVEventsConfig,
        make_offload_key,
    )

    engine = Listening(make_rig)
    rig = engine.rig
    request = rig.add("t1", PROMPT)
    rig.run()
    rig.index.clear()
    rig.run()

    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    [group] = rig.scheduler.kv_cache_config.kv_cache_groups
    facts: Any = SimpleNamespace(
        group_idx=0,
        sliding_window_size_in_chunks=None,
        tokens_per_chunk=16,
        hashes_per_chunk=1,
        tokens_per_block=16,
        kv_event_group_spec=get_offloading_event_group_spec(group),
    )
    keys = [make_offload_key(one, 0) for one in request.block_hashes]
    for at, key in enumerate(keys):
        tracker.record_store(request, facts, at, key)
    event = partial(OffloadingEvent, keys, Medium.CPU, locality=Locality.LOCAL)
    [*stored, removed] = tracker.take_events([event(removed=False), event(removed=True)])

    ours = [block for one in engine.stored("CPU") for block in blocks_of(one)]
    theirs = [block for one in stored for block in blocks_of(one)]
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]
    found = [one for one in engine.consumer.events if getattr(one, "medium", "") == "CPU"]
    [gone] = [one for one in found if _name(one) == "BlockRemoved"]
    assert set(gone.block_hashes) == set(removed.block_hashes)
    for field in ["medium", "group_idx", "locality", "ownership"]:
        assert getattr(gone, field) == getattr(removed, field)
    for field in ("kv_cache_spec_kind", "block_size", "medium", "locality", "ownership"):
        assert getattr(found[0], field) == getattr(stored[0], field)


def test_vllms_publisher_sends_the_events_in_its_schema(make_rig: MakeRig, tmp_path: Path) -> None:
    import msgspec
    import zmq
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    endpoint = f"ipc://{tmp_path}/events"

    def configure(config: Any) -> None:
        config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint
        )
        config.parallel_config.data_parallel_index = 0

    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(endpoint)
        subscriber.subscribe("")
        rig = make_rig(configure=configure)
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        found: list[BlockStored] = []
        sequence = list[int]()
        for turn in range(100):  # a subscriber misses what was sent before it was connected
            rig.ask(f"t{turn}", text(100, seed=turn))
            while subscriber.poll(200):
                _, number, payload = subscriber.recv_multipart()
                sequence.append(int.from_bytes(number, "big"))
                batch = decoder.decode(payload)
                assert batch.data_parallel_rank == 0
                found += [one for one in batch.events if isinstance(one, BlockStored)]
            if any(one.medium == "CPU" for one in found):
                break
    assert any(one.medium == "CPU" and one.token_ids for one in found)
    assert sequence == [*range(sequence[0], sequence[0] + len(sequence))]


def test_a_demoted_page_is_in_storage_and_an_evicted_one_no_longer_in_cpu_memory(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    engine = Listening(make_rig, extra=tiers(tmp_path))
    engine.rig.policy = Always(Decision(Tier.STORE))
    engine.rig.ask("t1", PROMPT, params=JOB)
    engine.rig.settle()
    assert engine.has(SSD) == engine.has(CPU) == set(hashes_of(engine.rig, PROMPT))
    assert engine.stored("STORAGE")[0].locality == "LOCAL"

    engine.rig.index.clear()
    assert engine.rig.scheduler.has_requests(), "an idle engine makes a step for its events"
    engine.rig.run()
    assert engine.has(CPU) == set()
    assert len(engine.has(SSD)) == 6
    assert engine.consumer.compare_with_vram() == 6


def test_an_idle_engine_steps_until_its_demotions_are_published(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    engine = Listening(make_rig, extra=tiers(tmp_path))
    engine.rig.policy = Always(Decision(Tier.STORE))
    engine.rig.add("t1", PROMPT, params=JOB)
    while engine.rig.scheduler.has_requests():  # like vLLM's loop, which does not wait for the disk
        engine.rig.step()
    assert engine.rig.pages.book.number(OrderKind.DEMOTE) == 0
    assert len(engine.has(SSD)) == 6


def test_pages_of_an_engine_before_are_published_once_a_request_names_them(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    first = make_rig(extra=tiers(tmp_path))
    first.policy = Always(Decision(Tier.STORE))
    answer = first.ask("t1", PROMPT, params=JOB, max_tokens=40)
    first.close()

    engine = Listening(make_rig, extra=tiers(tmp_path))
    engine.rig.ask("other", text(20, seed=9))
    assert engine.has(SSD) == set(), "their tokens are not known"

    engine.rig.ask("t2", PROMPT[:60], max_tokens=1)
    assert engine.has(SSD) == set(hashes_of(engine.rig, PROMPT[:60]))
    # The answer repeats blocks that the first engine has saved.
    assert engine.rig.ask("t3", PROMPT, max_tokens=40) == answer
    engine.rig.settle()
    assert engine.has(SSD) == set(hashes_of(engine.rig, [*PROMPT, *answer[:-1]]))
    assert engine.consumer.compare_with_vram() == 1 + 8


# -- resets -----------------------------------------------------------------------------------


def test_a_reset_leaves_nothing(make_rig: MakeRig) -> None:
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT)
    assert engine.rig.scheduler.reset_prefix_cache()
    engine.rig.run()
    assert engine.consumer.cleared == 1, "by vLLM"
    assert engine.has(CPU) == set()
    assert _name(engine.consumer.events[-1]) == "AllBlocksCleared", "no removals follow"

    engine.rig.ask("t2", PROMPT)
    assert engine.has(CPU) == set(hashes_of(engine.rig, PROMPT))


def test_pages_are_removed_one_by_one_if_vllm_refuses_the_reset(make_rig: MakeRig) -> None:
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT)
    engine.rig.add("runs", text(40, seed=2), max_tokens=30)
    engine.rig.step()
    assert not engine.rig.scheduler.reset_prefix_cache()
    engine.rig.run()
    assert engine.consumer.cleared == 0
    assert engine.has(CPU) == set()


def test_pages_that_outlive_vrams_are_published_again(make_rig: MakeRig, tmp_path: Path) -> None:
    """vLLM's AllBlocksCleared makes consumers forget every tier. The pages that CPU memory and SSD
    still have are therefore published again."""
    engine = Listening(make_rig, extra=tiers(tmp_path))
    engine.rig.policy = Always(Decision(Tier.STORE))
    engine.rig.ask("t1", PROMPT, params=JOB)
    engine.rig.settle()
    assert engine.rig.pool.reset_prefix_cache(), "VRAM alone"
    engine.rig.run()
    assert engine.consumer.cleared == 1
    assert engine.has(CPU) == engine.has(SSD) == set(hashes_of(engine.rig, PROMPT))


# -- limits -----------------------------------------------------------------------------------


def test_the_oldest_pages_are_removed_if_there_are_too_many_names(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MOST_NAMED", 8)
    engine = Listening(make_rig, extra={"cpu_gib": 0.01})
    engine.rig.ask("t1", PROMPT)
    engine.rig.ask("t2", text(100, seed=2))
    assert len(engine.has(CPU)) == 8
    assert engine.has(CPU).issuperset(hashes_of(engine.rig, text(100, seed=2)))
    assert engine.rig.count("kv_event_pages_dropped") == 4

    engine.rig.ask("t3", PROMPT)
    assert engine.has(CPU).issuperset(hashes_of(engine.rig, PROMPT)), "named again"


def test_a_step_publishes_a_limited_number_of_pages(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "PAGES_A_STEP", 2)
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT)
    assert len(engine.has(CPU)) == 6
    engine.rig.index.clear()
    left = list[int]()
    while engine.rig.scheduler.has_requests():
        engine.rig.step()
        left.append(len(engine.has(CPU)))
    assert left == [4, 2, 0]


@pytest.mark.parametrize("part", [EventConverter.__call__, VllmRequest.extra_keys])
def test_events_that_cannot_be_published_end_with_all_blocks_cleared(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, part: Any
) -> None:
    engine = Listening(make_rig)

    def fails(*_: object) -> Any:
        raise TypeError("a field is missing")

    owner = EventConverter if part is EventConverter.__call__ else VllmRequest
    monkeypatch.setattr(owner, part.__name__, fails)
    engine.rig.ask("t1", PROMPT)
    assert engine.consumer.cleared == 1
    assert engine.rig.count("hook_errors") == 1
    assert engine.rig.outputs["t1"] == expected(PROMPT, 4)
    assert len(engine.rig.index) == 7, "saves go on"
    assert not engine.rig.scheduler.has_requests(), "nothing waits for events"


@pytest.mark.parametrize("events", ["off", "exact"])
def test_without_vllms_events_there_are_none(make_rig: MakeRig, events: str) -> None:
    rig = make_rig(
        extra={"cpu_gib": 0.001, "events": events},
        configure=publish_events if events == "off" else lambda _: None,
    )
    rig.ask("t1", PROMPT)
    assert rig.half.events is None
    assert (rig.index.on_changed, rig.pages.saves.on_filled) == (None, None)
    assert not list(rig.connector.take_events())


# -- identity ---------------------------------------------------------------------------------


def test_salt_is_in_the_first_blocks_extra_keys(make_rig: MakeRig) -> None:
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT, salt="tenant")
    assert engine.has(CPU) == set(hashes_of(engine.rig, PROMPT, salt="tenant"))
    assert engine.stored("CPU")[0].extra_keys == [("tenant",), *[None] * 5]
    assert engine.consumer.compare_with_vram() == 6


def test_adapters_are_named(make_rig: MakeRig, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    lora = LoRARequest("my-adapter", 7, str(tmp_path / "adapter"))
    engine = Listening(make_rig)
    until = time.monotonic() + 60
    while engine.rig.half.deps.fingerprints.of(lora, 0) is None:  # read on another thread
        assert time.monotonic() < until
    engine.rig.ask("t1", PROMPT, lora=lora)
    assert len(engine.has(CPU)) == 6
    event = engine.stored("CPU")[0]
    assert (event.lora_id, event.lora_name) == (7, "my-adapter")
    assert engine.consumer.compare_with_vram() == 6


def test_each_kv_type_has_its_own_events(make_rig: MakeRig) -> None:
    groups = (GroupSpec(KvKind.FULL, 16), GroupSpec(KvKind.WINDOW, 16, 40))
    engine = Listening(make_rig, groups=groups, blocks=200)
    engine.rig.ask("t1", PROMPT, max_tokens=30)
    engine.rig.settle()
    full, window = engine.has(CPU, 0), engine.has(CPU, 1)
    assert len(full) == 8
    assert window < full, "only the last blocks are kept"
    by_group = {one.group_idx: one for one in engine.stored("CPU")}
    assert by_group[0].kv_cache_spec_kind == "full_attention"
    assert by_group[1].kv_cache_spec_kind == "sliding_window"
    assert by_group[1].kv_cache_spec_sliding_window == 40
    assert engine.consumer.compare_with_vram() >= 8


# -- vllm-router ------------------------------------------------------------------------------


def a_context_in_both_tiers(make_rig: MakeRig, folder: Path, events: str) -> Listening:
    """Return an engine that has a context of 20 blocks on SSD and its first 18 blocks in CPU
    memory, but none in VRAM."""
    engine = Listening(make_rig, extra={**tiers(folder), "events": events})
    engine.rig.policy = Always(Decision(Tier.STORE))
    context = text(320, seed=3)
    engine.rig.ask("t1", context, params=JOB)
    engine.rig.settle()
    engine.rig.index.forget_all(in_cpu(engine.rig, context)[18:])
    engine.rig.pool.evict_blocks(set(range(len(engine.rig.pool.blocks))))
    engine.rig.run()
    return engine


def test_vllm_router_scores_an_engine_higher_if_ssd_is_reported_only_without_cpu_memory(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """The router counts only the longest continuation in one tier, even if a shorter one in another
    tier has a higher weight. So 20 blocks on SSD would hide 18 blocks in CPU memory."""
    scores = {}
    for events in ("exact", "vllm-router"):
        (tmp_path / events).mkdir()
        engine = a_context_in_both_tiers(make_rig, tmp_path / events, events)
        scores[events] = engine.consumer.score(hashes_of(engine.rig, text(320, seed=3)))
    assert scores == {"exact": 20 * 0.6, "vllm-router": 18 * 0.8}


def test_vllm_router_hears_of_ssd_once_cpu_memory_has_evicted(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    engine = a_context_in_both_tiers(make_rig, tmp_path, "vllm-router")
    storage = ("STORAGE", None)
    assert (len(engine.has(CPU)), len(engine.has(storage))) == (18, 2)
    engine.rig.index.clear()
    engine.rig.run()
    assert (len(engine.has(CPU)), len(engine.has(storage))) == (0, 20)


def test_vllm_router_hears_nothing_that_it_credits_falsely(make_rig: MakeRig) -> None:
    extra = {"cpu_gib": 0.001, "events": "vllm-router"}
    engine = Listening(make_rig, extra=extra)
    engine.rig.ask("salted", PROMPT, salt="tenant")
    assert len(engine.rig.index) == 7
    assert not engine.stored("CPU")

    groups = (GroupSpec(KvKind.FULL, 16), GroupSpec(KvKind.WINDOW, 16, 40))
    engine = Listening(make_rig, groups=groups, blocks=200, extra=extra)
    engine.rig.ask("t1", PROMPT)
    assert {one.group_idx for one in engine.stored("CPU")} == {0}


def test_the_fields_of_older_versions_are_left_out(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiered_kv.connectors.vllm import published_events

    older = published_events.STORED_FIELDS - {"locality", "ownership"}
    monkeypatch.setattr(published_events, "STORED_FIELDS", older)
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT)
    assert {one.locality for one in engine.stored("CPU")} == {None}


def test_hashes_are_bytes_if_vllm_is_told_so(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    engine = Listening(make_rig)
    engine.rig.ask("t1", PROMPT)
    [first, *_] = engine.stored("CPU")
    assert first.block_hashes[0] == in_cpu(engine.rig, PROMPT)[0][DIGEST_BYTES:]
    assert engine.consumer.compare_with_vram() == 6
