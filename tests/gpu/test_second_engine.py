"""The project's second engine, a minimal one without vLLM, with its KV in VRAM: the worker half,
and copies during a forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.memory import NEEDS_CUDA
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import Direction

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("mode", list(RestoreMode))
def test_a_context_comes_back_from_pinned_memory(mode: RestoreMode) -> None:
    prompt = text(300, seed=1)
    with SecondRig(RigOptions(device="cuda")) as rig:
        rig.pages.restores.policy = AlwaysRestore(mode)
        rig.ask("first", prompt)
        rig.fill()
        assert rig.ask("again", prompt) == expected(prompt, 4)
        assert rig.count("prompt_tokens_cpu") == 299
        rig.check_clean()


def test_a_failed_restore_is_recomputed() -> None:
    prompt = text(300, seed=2)
    with SecondRig(RigOptions(device="cuda")) as rig:
        faulty = rig.inject(FaultyTransfer)
        rig.ask("first", prompt)
        rig.fill()
        faulty.fail_next(Direction.LOAD, {7})
        assert rig.ask("again", prompt) == expected(prompt, 4)
        assert rig.count("restore_failures") == 1
        rig.check_clean()


def test_many_requests_share_little_vram_and_an_ssd(tmp_path: Path) -> None:
    extra = {"cpu_gib": 0.0001, "ssd_path": str(tmp_path), "ssd_gib": 0.02, "codec": "raw"}
    prompts = {f"r{i}": text(200 + 7 * i, seed=i) for i in range(12)}
    with SecondRig(RigOptions(device="cuda", blocks=40, extra=extra)) as rig:
        for turn in range(2):
            for name, prompt in prompts.items():
                rig.add(f"{name}-{turn}", prompt, max_tokens=30)
            rig.run()
            for name, prompt in prompts.items():
                assert rig.outputs[f"{name}-{turn}"] == expected(prompt, 30)
        rig.check_clean()
