"""Provoked races. The GPU is kept behind the CPU while jobs are submitted, so that any operation
that is not ordered by an event runs too early. Skipped without CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.memory import NEEDS_CUDA, WAYS, Vram, keep_busy, vram
from tests.random_transfers import RandomTransfers
from tiered_kv.page_group import Placement, page_layout
from tiered_kv.testing.conformance.transfer import addresses
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction

pytestmark = [*NEEDS_CUDA, pytest.mark.parametrize("way", WAYS)]

BLOCKS = 64
RUN = 16 << 10
LAYOUT = page_layout([Placement(8, BLOCKS * RUN, RUN, 0)], BLOCKS)
WHILE = 20_000_000
"""Number of GPU cycles that take about 10 ms."""


def kv(gpu: Vram) -> torch.Tensor:
    """Return the storage as ``[layers, blocks, bytes]``."""
    viewed: torch.Tensor = gpu.storage.reshape(8, BLOCKS, RUN)
    return viewed


def settle(gpu: Vram, jobs: int = 1) -> None:
    gpu.backend.drain()
    results = gpu.backend.poll()
    assert len(results) == jobs
    assert not any(result.failed for result in results)


def test_a_save_reads_what_a_late_compute_stream_writes_before_it(way: str) -> None:
    with vram(way, LAYOUT, BLOCKS) as gpu:
        for value in range(1, 20):
            keep_busy(WHILE // 10)
            kv(gpu).fill_(value)
            gpu.backend.submit(CopyJob(value, Direction.SAVE, range(BLOCKS), range(BLOCKS)))
            settle(gpu)
            assert (gpu.pool.slots == value).all()


def test_a_save_is_not_disturbed_by_a_compute_stream_that_rewrites_other_blocks(way: str) -> None:
    """Even blocks are saved while the compute stream rewrites the odd blocks. The saved pages and
    the odd blocks are correct, although the even blocks are overwritten as soon as the save is
    reported."""
    with vram(way, LAYOUT, BLOCKS) as gpu:
        even = range(0, BLOCKS, 2)
        for value in range(1, 100):
            kv(gpu)[:, ::2].fill_(value)
            gpu.backend.submit(CopyJob(value, Direction.SAVE, even, even))
            results: list[CopyResult] = []
            while not results:
                kv(gpu)[:, 1::2].fill_(value + 100)
                results = gpu.backend.poll()
            kv(gpu)[:, ::2].fill_(0)
            assert not results[0].failed
            assert (gpu.pool.slots[::2] == value).all()
            assert (kv(gpu)[:, 1::2] == value + 100).all().item()


def test_a_load_waits_for_what_still_reads_its_blocks(way: str) -> None:
    with vram(way, LAYOUT, BLOCKS) as gpu:
        gpu.pool.slots[:] = 9
        for number in range(20):
            kv(gpu).fill_(number + 10)
            keep_busy(WHILE // 10)
            read_late = kv(gpu).clone()
            gpu.backend.submit(CopyJob(number, Direction.LOAD, range(BLOCKS), range(BLOCKS)))
            settle(gpu)
            assert (read_late == number + 10).all().item()
            assert (kv(gpu) == 9).all().item()


def test_what_is_enqueued_after_run_sees_the_load(way: str) -> None:
    with vram(way, LAYOUT, BLOCKS) as gpu:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(100):
            gpu.pool.slots[:] = number + 1
            kv(gpu).zero_()
            gpu.backend.run(CopyJob(number, Direction.LOAD, range(BLOCKS), range(BLOCKS)))
            wrong += (kv(gpu) != number + 1).sum()
            torch.cuda.current_stream().synchronize()  # the CPU may overwrite the slots again
        assert wrong.item() == 0


def test_a_block_is_saved_and_loaded_back_to_back_without_a_pause(way: str) -> None:
    """A block is saved, loaded into another block and overwritten, a thousand times, without a wait
    on the CPU. Each load has the value that was saved."""
    with vram(way, LAYOUT, 4) as gpu:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(1000):
            value, there, back = number % 251, number % 60, 60 + number % 4
            kv(gpu)[:, there].fill_(value)
            gpu.backend.run(CopyJob(number, Direction.SAVE, [there], [number % 4]))
            gpu.backend.run(CopyJob(number, Direction.LOAD, [back], [number % 4]))
            kv(gpu)[:, there].fill_(255)
            wrong += (kv(gpu)[:, back] != value).sum()
        assert wrong.item() == 0


def test_concurrent_saves_and_loads_do_not_mix(way: str) -> None:
    half = BLOCKS // 2
    with vram(way, LAYOUT, BLOCKS) as gpu:
        kv(gpu)[:, :half].fill_(1)
        gpu.pool.slots[half:] = 2
        gpu.pool.slots[:half] = 0
        jobs = 0
        for start in range(0, half, 4):
            low, high = range(start, start + 4), range(half + start, half + start + 4)
            gpu.backend.submit(CopyJob(jobs, Direction.SAVE, low, low))
            gpu.backend.submit(CopyJob(jobs + 1, Direction.LOAD, high, high))
            jobs += 2
        settle(gpu, jobs)
        assert (gpu.pool.slots[:half] == 1).all()
        assert (kv(gpu)[:, half:] == 2).all().item()


def test_replays_of_a_cuda_graph_are_ordered_like_other_work(way: str) -> None:
    """A graph that adds one to every byte is replayed twice, with a save between the replays and a
    load after the second. The load undoes each second replay."""
    with vram(way, LAYOUT, BLOCKS) as gpu:
        kv(gpu).zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            keep_busy(WHILE // 100)
            gpu.storage.add_(1)
        kv(gpu).zero_()
        for number in range(50):
            graph.replay()
            gpu.backend.run(CopyJob(number, Direction.SAVE, range(BLOCKS), range(BLOCKS)))
            graph.replay()
            gpu.backend.run(CopyJob(number, Direction.LOAD, range(BLOCKS), range(BLOCKS)))
        assert (kv(gpu) == 50).all().item(), "each second replay was undone"


def test_a_job_during_the_capture_of_a_graph_is_refused_and_the_graph_is_whole(way: str) -> None:
    with vram(way, LAYOUT, BLOCKS) as gpu:
        job = CopyJob(7, Direction.LOAD, [0, 1], [0, 1])
        kv(gpu).zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gpu.storage.add_(1)
            gpu.backend.submit(job)
            assert gpu.backend.run(job).failed == {0, 1}

        graph.replay()

        assert [result.failed for result in gpu.backend.poll()] == [{0, 1}]
        assert (kv(gpu) == 1).all().item()


def test_after_all_jobs_the_backend_holds_nothing(way: str) -> None:
    with vram(way, LAYOUT, BLOCKS) as gpu:
        for number in range(200):
            job = CopyJob(number, Direction.SAVE, [number % BLOCKS], [number % BLOCKS])
            if number % 2:
                gpu.backend.run(job)
            else:
                gpu.backend.submit(job)
        settle(gpu, 100)
        assert gpu.backend.under_way == 0


@pytest.mark.slow
@pytest.mark.parametrize("run", [512, 1021, 18432])
def test_every_page_is_right_after_a_hundred_thousand_random_operations(way: str, run: int) -> None:
    layout = page_layout([Placement(5, 40 * run, run, 0)], 40)
    operations = 100_000 if run == 512 else 10_000
    with vram(way, layout, 48) as gpu:
        everything = RandomTransfers(layout, gpu.pool, gpu.backend, gpu.writer(), gpu.read)
        everything.go(operations)


def test_a_page_in_vram_has_the_addresses_of_its_layout(way: str) -> None:
    """A saved page equals the block at the layout's addresses and the block in this file's ``kv``
    view."""
    with vram(way, LAYOUT, 1) as gpu:
        gpu.backend.run(CopyJob(1, Direction.SAVE, [5], [0]))
        gpu.backend.drain()
        assert np.array_equal(gpu.pool.slots[0], gpu.read()[addresses(LAYOUT, 5)])
        assert np.array_equal(gpu.pool.slots[0], kv(gpu)[:, 5].flatten().cpu().numpy())
