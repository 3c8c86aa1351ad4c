"""Random clients, faults and resets against the real scheduler: outputs stay right,
nothing hangs, and every block and slot is accounted for at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.random_scripts import play_each
from tiered_kv.orders import RestoreMode
from tiered_kv.policies import registry
from tiered_kv.policies.base import NO_TOOL, Costs, Decision, Tier, ToolUse, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.cache.restore_mode import AlwaysRestore, FasterRestore
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing.checked_kv import CELL, VOCABULARY, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.groups import GroupSpec, group_pages
from tiered_kv.testing.vllm.rig import Rig, RigOptions
from tiered_kv.transfer.base import Direction

LONGEST = 256
"""Longest request, tokens."""


class SomeGoToSsd(StatelessPolicy):
    """Decisions of every kind, by lot, before and after tools were read."""

    reads_tools = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        tier = self._rng.choice(list(Tier))
        steps = np.sort(self._rng.choices(range(100), k=len(GRID))) / 100
        return Decision(
            tier,
            self._rng.choice([0.5, 5]) if tier is Tier.PIN else 0.0,
            forecast=self._rng.choice([None, Forecast(steps)]),
            back_s=self._rng.choice([None, 0.1, 3.0]),
        )


class SomeTools:
    """Reads tool calls at once, later, or never."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._queued: list[str] = []
        self.answers = (("", NO_TOOL),)  # asked in every step

    dropped = errors = 0

    def read(self, ticket: str, token_ids: Sequence[int]) -> bool:
        if self._rng.random() < 0.2:
            return False
        self._queued.append(ticket)
        return True

    def take(self) -> list[tuple[str, ToolUse]]:
        count = self._rng.randint(0, len(self._queued))
        self._rng.shuffle(self._queued)
        taken, self._queued = self._queued[:count], self._queued[count:]
        tools = [NO_TOOL, ToolUse(("bash", "pytest"), "pytest -x"), ToolUse(())]
        return [(ticket, self._rng.choice(tools)) for ticket in taken]

    def close(self) -> None:
        pass


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


def watch_the_order(rig: Rig) -> None:
    """Check that no new job starts while an older one is parked, that parked requests are in the
    order in which they are let in, and that none is parked beyond the admission limit."""
    allocated, build = rig.half.on_allocated, rig.half.build_orders
    longest = rig.options.extra["admission_max_wait_s"] if rig.options.extra else 0.0
    queue = rig.admission.queue

    def watched(request_id: str, *args: Any) -> None:
        turn = rig.turn(request_id)
        if turn.hold.new:
            parked = [one.arrival_time for one in rig.scheduler.parked.values()]
            assert turn.request.arrival_time < min(parked, default=float("inf")), "overtaken"
        parked = list(rig.scheduler.parked)
        assert parked == queue.in_parked_order(parked) or queue.ranks_changed
        allocated(request_id, *args)

    def built(*args: Any) -> Any:
        for one in rig.scheduler.parked.values():
            assert rig.now - rig.turn(one.request_id).arrived_at < longest, "held for too long"
        return build(*args)

    rig.half.on_allocated, rig.half.build_orders = watched, built


def play(rig: Rig, rng: random.Random) -> None:
    """Run one script."""
    faulty = rig.inject(FaultyTransfer) if rig.index.num_slots else None
    contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(4)]
    asked: dict[str, tuple[list[int], int, Sequence[int]]] = {}
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
            stops = rng.choice([(), range(0, VOCABULARY, 12)])
            params = rng.choice([params, None])
            rig.add(name, context, max_tokens=tokens, params=params, stop_ids=stops)
            asked[name] = (context, tokens, stops)
            if rng.random() < 0.5:
                longer = contexts[job] + expected(context, 3) + text(20, seed=rng.randrange(10**6))
                contexts[job] = longer[-190:] if rng.random() < 0.1 else longer[:190]
        elif what < 0.8 and asked:
            name = rng.choice(list(asked))
            if name not in rig.finished:
                rig.abort(name, late=rng.random() < 0.5)
        elif what < 0.95:
            if faulty is not None:
                faulty.fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
            if stores := rig.worker.worker_half.stores:
                break_once(stores[rng.choice(sorted(stores))].io.store, rng)
        else:
            rig.scheduler.reset_prefix_cache()
    rig.run()
    rig.now += 5 * 3600  # no gap is waited for that long
    for i in range(2):
        rig.wait_for_worker()
        rig.ask(f"last{i}", text(1, seed=1), max_tokens=8)
    for name, (prompt, tokens, stops) in asked.items():
        if rig.finished[name] != "abort":
            whole = expected(prompt, tokens)
            end = next((i for i, token in enumerate(whole, 1) if token in stops), tokens)
            assert rig.outputs[name] == whole[:end], name


@pytest.mark.scripts(150, nightly=10_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_script)


def play_script(
    folder: Path,
    seed: int,
    groups: tuple[GroupSpec, ...] = (),
    configure: Callable[[Any], None] = lambda _: None,
) -> None:
    """Play one script.

    Args:
        groups: kinds of KV; one of full attention without any.
        configure: changes vLLM's configuration.
    """
    rng = random.Random(seed)
    page_bytes = group_pages(groups or (GroupSpec(),), CELL)[0].page_bytes
    longest = sum(LONGEST // group.block_size + 2 for group in groups) + 1
    slots = rng.choice([0, 0, 30, 300])
    on_disk: dict[str, Any] = {"ssd_path": str(folder / "ssd"), "codec": "raw"}
    ssd = rng.choice([{}, {**on_disk, "ssd_gib": 1}, {**on_disk, "ssd_gib": 0.004}])
    options = RigOptions(
        blocks=max(longest, rng.choice([20, 30, 60]) * max(1, len(groups))),
        max_model_len=LONGEST,
        max_batched_tokens=rng.choice([64, 256]),
        max_num_seqs=rng.choice([2, 8]),
        in_job_order=rng.random() < 0.7,
        ahead=rng.random() < 0.5,
        tools=SomeTools(rng) if rng.random() < 0.5 else None,
        configure=configure,
        extra={
            "cpu_gib": slots * page_bytes / 2**30,
            "pin_fraction": rng.choice([0, 0.5, 1]),
            "admission": rng.choice(["auto", "auto", "off"]),
            "admission_max_wait_s": 2 if seed % 3 else 300,
            "eviction": "lru" if seed % 4 == 0 else "worth",
            **(ssd if slots else {}),
        },
    )
    if groups:
        options = replace(options, groups=groups, retention=rng.choice([0, 0, None]))
    with Rig(folder / "model", options) as rig:
        if rng.random() < 0.7:
            named = registry.policy(rng.choice(sorted(registry.POLICIES)))
            rig.policy = rng.choice([SomeGoToSsd(rng), named])
        rig.pages.restores.policy = rng.choice(
            [FasterRestore(), *(AlwaysRestore(mode) for mode in RestoreMode)]
        )
        if options.in_job_order:
            watch_the_order(rig)
        play(rig, rng)
        rig.half.release_all()  # "last" may be waited for, as well
        rig.check_clean()
