"""The addresses of staged copies, tested with CPU memory in place of VRAM and a runtime that copies
immediately. tests/gpu tests the streams."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.page_layouts import Move, moves
from tiered_kv.testing.conformance.transfer import Bytes
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Numbers, sort_out
from tiered_kv.transfer.cuda.staging import Lane, StagedCopies
from tiered_kv.transfer.host_memory import CpuPool


class CopiesAtOnce:
    """A CUDA runtime whose copies are memmoves, which it counts."""

    has_batches = True

    def __init__(self) -> None:
        self.copies = 0

    def device_pointer(self, host: int) -> int:
        return host

    def copy_batch(self, to: Numbers, source: Numbers, nbytes: Numbers, stream: int) -> None:
        self.copies += len(nbytes)
        for one_to, one_source, size in zip(to, source, nbytes, strict=True):
            ctypes.memmove(int(one_to), int(one_source), int(size))


class PinnedArray:
    """Memory of a test that is declared pinned."""

    pinned = True

    def __init__(self, view: Bytes) -> None:
        self.view = view

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Stream:
    """A CPU stream on which everything runs immediately. It records the streams for which it
    waited."""

    cuda_stream: int
    waited: list[Stream]

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


@pytest.fixture(scope="module", autouse=True)
def _no_gpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        yield


@given(moves(), st.integers(1, 4))
def test_every_page_is_copied_through_the_buffers_to_its_destination(
    move: Move, at_once: int
) -> None:
    pages = sort_out(move.job, move.layout.num_blocks, move.num_slots)
    if not len(pages):
        return
    storage, slab = torch.from_numpy(move.storage.copy()), move.slab.copy()
    runtime: Any = CopiesAtOnce()
    lanes: Any = {
        direction: [
            Lane(stream, torch.empty(at_once * move.layout.page_bytes, dtype=torch.uint8))
            for stream in (Stream(1, []), Stream(2, []))
        ]
        for direction in Direction
    }
    pool = CpuPool(PinnedArray(slab.reshape(-1)), slab.shape[1])
    staged = StagedCopies(runtime, move.layout, storage, pool, lanes)
    held = list[torch.Tensor]()

    staged.enqueue(move.job.direction, pages, held)

    for found, right in zip((storage.numpy(), slab), move.moved, strict=True):
        assert np.array_equal(found, right)
    assert runtime.copies <= len(pages), "whole pages, neighbours together"
    first, second = (lane.stream for lane in lanes[move.job.direction])
    forked = len(pages) > at_once
    assert second.waited == ([first] if forked else []), "it begins behind what the job waits for"
    assert first.waited == ([second] if forked else []), "the job ends with both"
    assert held, "page numbers are read later"
