"""The engine of a tiny model is looked at without believing the connector."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiered_kv.bench.models.engine.control import ZeroedGroup
from tiered_kv.bench.models.engine.kv_groups import KvGroup, kv_groups
from tiered_kv.bench.models.engine.sources import SourceWatch
from tiered_kv.bench.models.engine.vram import Snapshot, Vram, arm, digests, unlike, watch
from tiered_kv.page_group import KvKind, KvReach
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

torch = pytest.importorskip("torch")

ATTENTION = KvGroup(0, KvReach(), 4, ("a",), "attention")
STATE = KvGroup(1, KvReach(KvKind.STATE), 8, ("b",), "state")


class MLAAttentionSpec(SimpleNamespace):
    """Named as vLLM's, since the name alone tells it."""


def test_groups_are_told_by_what_their_specs_have() -> None:
    specs: list[Any] = [
        SimpleNamespace(block_size=128),
        SimpleNamespace(block_size=256, sliding_window=200, extra_retained_tokens=3),
        SimpleNamespace(block_size=128, attention_chunk_size=512, sliding_window=None),
        SimpleNamespace(block_size=384, shapes=((2, 3),), mamba_type="gdn"),
        MLAAttentionSpec(block_size=16),
        SimpleNamespace(block_size=1, scratch=True),
    ]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["x", "y"]) for spec in specs]
    config = SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=range(5))
    full, window, chunk, state, latent = kv_groups(config)
    assert full.words == "full attention, 2 layers, blocks of 128"
    assert window.reach == KvReach(KvKind.WINDOW, 200, 3)
    assert chunk.reach == KvReach(KvKind.CHUNK, 512)
    assert state.reach == KvReach(KvKind.STATE)
    assert state.words == "gdn state, 2 layers, blocks of 384"
    assert latent.words.startswith("MLA")
    assert list(state.needs(400)) == [1]


def request(prompt: int, local: int, external: int) -> SimpleNamespace:
    stats = SimpleNamespace(num_local_cached_tokens=local, num_external_cached_tokens=external)
    return SimpleNamespace(
        num_prompt_tokens=prompt,
        num_output_tokens=0,
        num_computed_tokens=local + external,
        prefill_stats=stats,
    )


class ScriptedScheduler:
    """A scheduler whose steps are told beforehand: tokens and guesses of its one request."""

    def __init__(self, asked: SimpleNamespace, steps: Sequence[tuple[int, int]]) -> None:
        self.requests = {"r": asked}
        self._steps = iter(steps)

    def schedule(self) -> SimpleNamespace:
        tokens, guesses = next(self._steps)
        self.requests["r"].num_computed_tokens += tokens
        drafted = {"r": [0] * guesses} if guesses else {}
        return SimpleNamespace(
            num_scheduled_tokens={"r": tokens}, scheduled_spec_decode_tokens=drafted
        )


def test_sources_are_what_was_found_and_what_was_scheduled() -> None:
    asked = request(100, local=32, external=40)
    scheduler = ScriptedScheduler(asked, [(20, 0), (8, 0), (4, 3), (4, 3)])
    begun: list[tuple[str, int]] = []
    watched = SourceWatch(scheduler, lambda *told: begun.append(told))
    scheduler.schedule()
    scheduler.schedule()
    assert begun == [("r", 72)]
    asked.num_output_tokens = 1
    scheduler.schedule()
    scheduler.schedule()
    source = watched.sources["r"]
    assert (source.found, source.local, source.restored) == (72, 32, 40)
    assert (source.steps, source.drafted) == (2, 6)
    assert source.acceptance(9) == 1.0
    assert source.acceptance(6) == 0.5


def test_a_restore_that_failed_counts_as_computed() -> None:
    scheduler = ScriptedScheduler(request(100, local=0, external=96), [(4, 0), (96, 0)])
    watched = SourceWatch(scheduler, lambda *_: None)
    scheduler.schedule()
    scheduler.schedule()
    assert watched.sources["r"].restored == 0


def block(tokens: int, seed: int) -> Any:
    return torch.arange(2 * tokens * 3, dtype=torch.float32).reshape(2, tokens, 3) + seed


def test_bytes_are_compared_up_to_the_hit_s_last_token() -> None:
    ended = Snapshot(7, {0: {0: [block(4, 0)], 1: [block(4, 9)]}})
    other = Snapshot(7, {0: {0: [block(4, 0)], 1: [block(4, 9)]}})
    other.blocks[0][1][0][:, 2:] += 1
    assert ended.digest(ATTENTION, 6) == other.digest(ATTENTION, 6)
    assert ended.digest(ATTENTION, 7) != other.digest(ATTENTION, 7)
    del other.blocks[0][1]
    assert other.digest(ATTENTION, 7) == "block 1 is missing of 7 tokens"


def test_a_state_is_of_exactly_as_many_tokens() -> None:
    ended = Snapshot(7, {1: {0: [torch.ones(5), torch.zeros(2)]}})
    same, other = Snapshot(7, ended.blocks), Snapshot(7, {1: {0: [torch.ones(5), torch.ones(2)]}})
    assert ended.digest(STATE, 7) == same.digest(STATE, 7) != other.digest(STATE, 7)
    assert ended.digest(STATE, 6) == "a state after 7 tokens, not 6"


def test_equal_numbers_of_other_bytes_differ() -> None:
    zero = Snapshot(1, {1: {0: [torch.zeros(1, dtype=torch.bfloat16)]}})
    minus = Snapshot(1, {1: {0: [-torch.zeros(1, dtype=torch.bfloat16)]}})
    assert zero.digest(STATE, 1) != minus.digest(STATE, 1)


def test_what_ranks_hold_differs_by_group_and_lacks_are_told() -> None:
    assert not unlike([{"a": "12"}, {"a": "34"}], [{"a": "12"}, {"a": "34"}])
    assert unlike([{"a": "12"}, {"a": "34"}], [{"a": "12"}, {"a": "35"}]) == [
        "bytes of rank 1, a: 34, then 35"
    ]
    lacking = [{"a": "block 1 is missing"}]
    assert unlike(lacking, lacking) == ["bytes of a: block 1 is missing"]


def runner() -> SimpleNamespace:
    """A model runner with a layer of attention, blocks of 4, and one of states, blocks of 8."""
    layers = {
        "a": SimpleNamespace(kv_cache=torch.arange(5 * 2 * 4 * 3.0).reshape(5, 2, 4, 3)),
        "b": SimpleNamespace(kv_cache=(torch.arange(5.0), torch.arange(10.0).reshape(5, 2))),
    }
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4), layer_names=["a"]),
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=8, shapes=()), layer_names=["b"]),
    ]
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=5),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        _model_forward=lambda: layers["a"].kv_cache.sum().item(),
    )


def test_a_worker_looks_just_before_it_computes() -> None:
    worker = SimpleNamespace(model_runner=runner())
    watch(worker)
    arm(worker, "one", [[1, 2], [3]], 6, ["a"])
    before = worker.model_runner.compilation_config.static_forward_context["a"].kv_cache
    worker.model_runner._model_forward()  # noqa: SLF001 - as vLLM does
    assert not before[[1, 2]].any(), "zeroed for the forward pass"
    assert before[3].any()
    vram: Vram = worker.model_runner.watched_vram
    taken = vram.snapshots["one"]
    assert taken.blocks[0][0][0].any(), "copied before"
    assert list(taken.blocks[0]) == [0, 1]
    assert [part.tolist() for part in taken.blocks[1][0]] == [3.0, [6.0, 7.0]]
    attention, state = digests(worker, "one", 5).values()
    assert " " not in attention
    assert state == "a state after 6 tokens, not 5"
    assert set(digests(worker, "two", 5).values()) == {"nothing was found"}


class Backend(TransferBackend):
    """Copies nothing, and remembers the jobs."""

    def __init__(self) -> None:
        self.jobs: list[CopyJob] = []

    def submit(self, job: CopyJob) -> None:
        self.jobs.append(job)

    def run(self, job: CopyJob) -> CopyResult:
        self.jobs.append(job)
        return CopyResult(job.job_id, frozenset(), 0, 0.0)

    def poll(self) -> list[CopyResult]:
        return []

    def drain(self) -> None: ...

    def close(self) -> None: ...


def test_only_restores_of_one_group_are_zeroed() -> None:
    pool = CpuPool(AnonymousMemory(4 * 8), 8)
    pool.slots[:] = 7
    backend = Backend()
    zeroed = ZeroedGroup(backend, pool, 1)
    zeroed.submit(CopyJob(1, Direction.LOAD, [5], [0], 0))
    zeroed.submit(CopyJob(2, Direction.SAVE, [5], [1], 1))
    zeroed.run(CopyJob(3, Direction.LOAD, [5, 6], [2, 3], 1))
    assert zeroed.struck == 2
    assert [job.job_id for job in backend.jobs] == [1, 2, 3]
    assert np.array_equal(pool.slots[:, 0], [7, 7, 0, 0])
    pool.close()
