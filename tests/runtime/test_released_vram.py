"""The engine frees its KV cache temporarily and allocates it again, possibly at another address."""

from __future__ import annotations

import pytest

from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import Direction

PROMPT = text(200, seed=1)


@pytest.mark.parametrize("direction", list(Direction))
def test_pending_copies_finish_and_the_new_memory_is_used(direction: Direction) -> None:
    with SecondRig(RigOptions(max_model_len=256)) as rig:
        rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
        rig.ask("t1", PROMPT)
        rig.fill()
        faulty = rig.inject(FaultyTransfer)
        faulty.hold(direction)
        known = PROMPT if direction is Direction.LOAD else text(200, seed=3)
        rig.add("t2", [*known, *text(60, seed=2)])
        for _ in range(10):
            rig.step()
            if faulty.held:
                break
        assert faulty.held
        rig.worker_half.release_vram()
        assert not faulty.held
        old = rig.engine.model.cache.clone()
        rig.engine.model.cache.fill_(255)
        rig.engine.model.cache.set_(old)
        rig.worker_half.take_vram()
        rig.run()
        assert rig.outputs["t2"] == expected(rig.prompts["t2"], 4)
        rig.fill()
        assert rig.ask("t3", rig.prompts["t2"]) == expected(rig.prompts["t2"], 4)
        assert rig.count("restore_failures") == rig.count("save_failures") == 0
        assert rig.count("prompt_tokens_cpu") > 0
        rig.check_clean()


def test_without_cpu_memory_nothing_is_done() -> None:
    with SecondRig(RigOptions(extra={"cpu_gib": 0})) as rig:
        rig.worker_half.release_vram()
        rig.worker_half.take_vram()
        assert rig.worker_half.backend is None
        assert rig.ask("t1", PROMPT) == expected(PROMPT, 4)
