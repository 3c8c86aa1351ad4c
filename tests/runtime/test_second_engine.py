"""The runtime behind an engine that has nothing of vLLM: random clients, faults and resets, with
the same answers as the engine gives by itself."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.orders import RestoreMode
from tiered_kv.policies import registry
from tiered_kv.policies.cache.restore_mode import AlwaysRestore, FasterRestore
from tiered_kv.testing.checked_kv import CELL, VOCABULARY, expected, text
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.requests import Outcome
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.transfer.base import Direction

SCRIPTS = 60


def play(rig: SecondRig, rng: random.Random) -> None:
    """Run one script. All draws are made whatever the connector does."""
    faulty = None
    if rig.half is not None and rig.index.num_slots:
        faulty = rig.inject(FaultyTransfer)
    contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(4)]
    for i in range(rng.randrange(10, 40)):
        for _ in range(rng.randrange(0, 6)):
            rig.step()
        rig.now += rng.choice([0, 0.1, 0.5, 3])
        what, job = rng.random(), rng.randrange(len(contexts))
        cut, tokens = rng.randrange(1, len(contexts[job]) + 1), rng.randrange(1, 40)
        stops = rng.choice([(), tuple(range(0, VOCABULARY, 12))])
        params: Any = {"job_id": f"job{job}", "is_last_step": rng.random() < 0.2}
        params = rng.choice([params, None])
        direction, page = rng.choice(list(Direction)), rng.randrange(3)
        if what < 0.7:
            context = contexts[job][:cut]
            rig.add(f"r{i}", context, max_tokens=tokens, params=params, stop_ids=stops)
            longer = contexts[job] + expected(context, 3) + text(20, seed=1000 + i)
            contexts[job] = longer[:190]
        elif what < 0.8 and rig.prompts:
            rig.abort(rng.choice(list(rig.prompts)))
        elif what < 0.95 and faulty is not None:
            faulty.fail_next(direction, {page})
        elif what >= 0.95:
            rig.reset_cache()
    rig.run()


@pytest.mark.parametrize("seed", range(SCRIPTS))
def test_answers_are_those_of_the_engine_by_itself(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    size: dict[str, Any] = {
        "blocks": rng.choice([20, 30, 60]),
        "max_model_len": 256,
        "max_batched_tokens": rng.choice([64, 256]),
    }
    slots = rng.choice([0, 30, 300])
    extra: dict[str, Any] = {
        "cpu_gib": slots * 16 * CELL * LAYERS / 2**30,
        "pin_fraction": rng.choice([0, 0.5, 1]),
        "admission": rng.choice(["auto", "off"]),
    }
    if slots:
        on_disk = {"ssd_path": str(tmp_path / "ssd"), "codec": "raw"}
        extra |= rng.choice([{}, {**on_disk, "ssd_gib": 0.004}])
    with SecondRig(RigOptions(**size, extra=None)) as alone:
        play(alone, random.Random(f"script {seed}"))
        alone.check_clean()
    with SecondRig(RigOptions(**size, extra=extra)) as rig:
        if rng.random() < 0.7:
            rig.policy = registry.policy(rng.choice(sorted(registry.POLICIES)))
        modes = [FasterRestore(), *(AlwaysRestore(mode) for mode in RestoreMode)]
        rig.pages.restores.policy = rng.choice(modes)
        play(rig, random.Random(f"script {seed}"))
        rig.now += 5 * 3600  # no gap is waited for that long
        for i in range(2):
            rig.wait_for_worker()
            rig.ask(f"last{i}", text(1, seed=1), max_tokens=8)
        rig.half.release_all()
        rig.check_clean()
        for name in alone.prompts:
            if Outcome.CANCELLED not in (alone.finished[name], rig.finished[name]):
                assert rig.outputs[name] == alone.outputs[name], name


def test_it_runs_where_vllm_is_absent() -> None:
    code = """
import sys
sys.modules["vllm"] = None
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.rig import SecondRig
with SecondRig() as rig:
    prompt = text(300, seed=1)
    rig.ask("first", prompt)
    rig.fill()
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 299
    rig.check_clean()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
