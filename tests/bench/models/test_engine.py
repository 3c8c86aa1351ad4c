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
from tiered_kv.bench.models.engine.vram import Snapshot, unlike
from tiered_kv.kv_reach import KvKind, KvReach
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.cpu_pool import CpuPool
from tiered_kv.transfer.host_memory import AnonymousMemory

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
    watch = SourceWatch(scheduler)
    scheduler.schedule()
    assert watch.starting == {"r": 72}
    scheduler.schedule()
    assert watch.starting == {}
    asked.num_output_tokens = 1
    scheduler.schedule()
    scheduler.schedule()
    source = watch.sources["r"]
    assert (source.found, source.local, source.restored) == (72, 32, 40)
    assert (source.steps, source.drafted) == (2, 6)
    assert source.acceptance(9) == 1.0
    assert source.acceptance(6) == 0.5


def test_a_restore_that_failed_counts_as_computed() -> None:
    scheduler = ScriptedScheduler(request(100, local=0, external=96), [(4, 0), (96, 0)])
    watch = SourceWatch(scheduler)
    scheduler.schedule()
    scheduler.schedule()
    assert watch.sources["r"].restored == 0


def block(tokens: int, seed: int) -> Any:
    return torch.arange(2 * tokens * 3, dtype=torch.float32).reshape(2, tokens, 3) + seed


def test_bytes_are_compared_up_to_the_hit_s_last_token() -> None:
    ended = Snapshot(7, {0: {0: [block(4, 0)], 1: [block(3, 9)]}})
    shorter = Snapshot(6, {0: {0: [block(4, 0)], 1: [block(3, 9)[:, :2]]}})
    assert not unlike(ended, shorter, [ATTENTION])
    shorter.blocks[0][1][0] = shorter.blocks[0][1][0] + 1
    assert unlike(ended, shorter, [ATTENTION]) == ["bytes of attention: block 1 differs"]
    del shorter.blocks[0][1]
    assert unlike(ended, shorter, [ATTENTION]) == [
        "bytes of attention: block 1 is missing afterwards"
    ]


def test_a_state_is_of_exactly_as_many_tokens() -> None:
    ended = Snapshot(7, {1: {0: [torch.ones(5), torch.zeros(2)]}})
    assert not unlike(ended, Snapshot(7, ended.blocks), [STATE])
    assert unlike(ended, Snapshot(6, ended.blocks), [STATE])
    other = Snapshot(7, {1: {0: [torch.ones(5), torch.ones(2)]}})
    assert unlike(ended, other, [STATE]) == ["bytes of state: block 0 differs"]


def test_equal_numbers_of_other_bytes_differ() -> None:
    zero, minus_zero = (
        Snapshot(1, {1: {0: [torch.zeros(1)]}}),
        Snapshot(1, {1: {0: [-torch.zeros(1)]}}),
    )
    assert unlike(zero, minus_zero, [STATE])


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
