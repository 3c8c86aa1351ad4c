"""Random clients and cache resets, each of which changes the weights: whatever begins after a
reset, made or refused by vLLM, attends to nothing of before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import CELL, Cells, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig, RigOptions
from tiered_kv.testing.vllm.runner import CheckingRunner
from tiered_kv.transfer.base import Direction

SCRIPTS = 40
OLD = 255


class Generations(CheckingRunner):
    """Writes KV that tells by which weights it was computed, and checks that of requests whose
    blocks were all given to them since the last reset."""

    def __init__(self, rig: Rig) -> None:
        pages = rig.groups[0].page_bytes
        super().__init__(rig.groups, rig.memory.numpy().view(np.uint8).reshape(-1, pages))
        self._blocks_of = rig.tables
        self._old: dict[str, Sequence[Any]] = {}
        self.generation = 0

    def begin(self) -> None:
        """The weights change."""
        self.generation += 1
        self._old = {name: blocks for name, blocks in self._blocks_of.items() if blocks}

    def model_kv(self, request_id: str, cells: Cells) -> Cells:
        weights = self.generation if self.is_checked(request_id) else OLD
        return cells ^ np.uint8(weights)

    def is_checked(self, request_id: str) -> bool:
        old = self._old.get(request_id)
        return old is None or self._blocks_of.get(request_id) is not old


def play(folder: Path, seed: int) -> int:
    """Returns how many resets vLLM refused."""
    rng, refused = random.Random(seed), 0
    ssd = {"ssd_path": str(folder / "ssd"), "codec": "raw"} if seed % 20 == 0 else {}
    options = RigOptions(
        blocks=rng.choice([30, 60]),
        max_model_len=256,
        max_batched_tokens=rng.choice([64, 256]),
        max_num_seqs=rng.choice([2, 8]),
        in_job_order=rng.random() < 0.5,
        ahead=rng.random() < 0.5,
        extra={"cpu_gib": rng.choice([12, 300]) * 16 * CELL / 2**30, "admission": "off", **ssd},
    )
    with Rig(folder / "model", options) as rig:
        runner = rig.runner = Generations(rig)
        rig.pages.restores.policy = AlwaysRestore(rng.choice(list(RestoreMode)))
        faulty = rig.inject(FaultyTransfer)
        contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(3)]
        for i in range(rng.randrange(20, 50)):
            for _ in range(rng.randrange(6)):
                rig.step()
            rig.now += rng.choice([0, 0.1, 3])
            what, live = rng.random(), [name for name in rig.outputs if name not in rig.finished]
            if what < 0.65:
                job = rng.randrange(3)
                context = contexts[job][: rng.randrange(1, len(contexts[job]) + 1)]
                params = rng.choice([{"job_id": f"job{job}"}, None])
                rig.add(f"r{i}", context, max_tokens=rng.randrange(1, 40), params=params)
                if len(contexts[job]) < 170:
                    contexts[job] = contexts[job] + expected(context, 3) + text(20, seed=i)
            elif what < 0.72 and live:
                rig.abort(rng.choice(live), late=rng.random() < 0.5)
            elif what < 0.78:
                faulty.fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
            elif what < 0.92:
                if rng.random() < 0.3:
                    rig.run()
                refused += not reset(rig, anew=rng.random() < 0.3 and not options.ahead)
                runner.begin()
        rig.run()
        rig.half.release_all()
        rig.wait_for_worker()
        rig.check_clean()
    return refused


def reset(rig: Rig, *, anew: bool) -> bool:
    try:
        return bool(rig.scheduler.reset_prefix_cache(reset_running_requests=anew))
    except RuntimeError as error:  # even though all were preempted
        assert "Failed to reset KV cache" in str(error)  # noqa: PT017
        return False


@pytest.mark.parametrize("part", range(4))
def test_nothing_that_begins_after_a_reset_sees_what_was_before(tmp_path: Path, part: int) -> None:
    refused = 0
    for seed in range(part, SCRIPTS, 4):
        refused += play(tmp_path / str(seed), seed)
    assert refused, "the scripts reach what they are about"
