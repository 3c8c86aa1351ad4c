"""Random clients, faults and resets against the real scheduler: outputs stay right,
nothing hangs, and every block and slot is accounted for at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.connector.conftest import MakeRig
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.restore import AlwaysRestore, FasterRestore
from tiered_kv.policies.signals import Decision, Tier, TurnEnd
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm_rig import CELL, Rig, expected, text
from tiered_kv.transfer.base import Direction

SCRIPTS = 40


class SomeGoToSsd:
    """Decisions of every kind, by lot."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def decide(self, turn: TurnEnd) -> Decision:
        return Decision(self._rng.choice(list(Tier)), self._rng.choice([0.5, 5]))


def break_once(store: Any, rng: random.Random) -> None:
    """The next read or write of the store fails, or some of it does."""
    name = rng.choice(["put", "get"])
    right: Callable[..., frozenset[int]] = getattr(store, name)
    raises = rng.random() < 0.5

    def wrong(pages: Sequence[Any]) -> frozenset[int]:
        setattr(store, name, right)
        if raises:
            raise OSError(5, "injected")
        return frozenset(range(len(pages)))

    setattr(store, name, wrong)


def play(rig: Rig, rng: random.Random) -> int:
    """Run one script; returns how many requests finished."""
    faulty = rig.inject(FaultyTransfer) if rig.half.index.num_slots else None
    contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    for i in range(rng.randrange(10, 40)):
        for _ in range(rng.randrange(0, 6)):
            rig.step()
        rig.now += rng.choice([0, 0.1, 0.5, 3])
        what = rng.random()
        if what < 0.7:
            job = rng.randrange(len(contexts))
            context = contexts[job][: rng.randrange(1, len(contexts[job]) + 1)]
            tokens = rng.randrange(1, 40)
            name = f"r{i}"
            params: Any = {"job_id": f"job{job}", "is_last_step": rng.random() < 0.2}
            rig.add(name, context, max_tokens=tokens, params=rng.choice([params, None]))
            asked[name] = (context, tokens)
            if rng.random() < 0.5:
                longer = contexts[job] + expected(context, 3) + text(20, seed=rng.randrange(10**6))
                contexts[job] = longer[-190:] if rng.random() < 0.1 else longer[:190]
        elif what < 0.8 and asked:
            name = rng.choice(list(asked))
            if name not in rig.finished:
                rig.abort(name)
        elif what < 0.95:
            if faulty is not None:
                faulty.fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
            if rig.worker.worker_half.ssd is not None:
                break_once(rig.worker.worker_half.ssd.io.store, rng)
        else:
            rig.scheduler.reset_prefix_cache()
    rig.run()
    rig.now += 60
    rig.ask("last", text(1, seed=1), max_tokens=1)
    done = 0
    for name, (prompt, tokens) in asked.items():
        if rig.finished[name] != "abort":
            assert rig.outputs[name] == expected(prompt, tokens), name
            done += 1
    return done


@pytest.mark.parametrize("seed", range(SCRIPTS))
def test_random_scripts_end_well(make_rig: MakeRig, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.choice([0, 30, 30, 300])
    on_disk: dict[str, Any] = {"ssd_path": str(tmp_path / "ssd"), "codec": "raw"}
    ssd = rng.choice([{}, {**on_disk, "ssd_gib": 1}, {**on_disk, "ssd_gib": 0.004}])
    rig = make_rig(
        blocks=rng.choice([20, 30, 60]),
        max_model_len=256,
        max_batched_tokens=rng.choice([64, 256]),
        max_num_seqs=rng.choice([2, 8]),
        extra={
            "cpu_gib": slots * 16 * CELL / 2**30,
            "pin_fraction": rng.choice([0, 0.5, 1]),
            **(ssd if slots else {}),
        },
    )
    if rng.random() < 0.5:
        rig.half.policy = SomeGoToSsd(rng)
    rig.half.restores.policy = rng.choice(
        [FasterRestore(), *(AlwaysRestore(mode) for mode in RestoreMode)]
    )
    assert play(rig, rng) >= 0
    rig.check_clean()
