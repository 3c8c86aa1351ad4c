"""Random turns, snapshots, forks, faults and resets. Outputs stay right, every operation ends,
restored pages exist, and no slot, block or reference leaks."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import (
    LONGEST,
    LONGEST_ANSWER,
    Script,
    choose_restores,
    play_each,
    some_contexts,
    some_options,
    some_size,
)
from tests.runtime.cold import PAGE, WAITS, cold_settings
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.groups.kinds import MODELS
from tests.runtime.snapshots.asking import ask, fork, restore, take
from tiered_kv.connectors.runtime.base import Request
from tiered_kv.connectors.runtime.snapshots.context_pages import ContextNames
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.page_group import KvKind
from tiered_kv.policies import registry
from tiered_kv.policies.base import JobKey, TurnEnd
from tiered_kv.testing import shrinking
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions as SecondOptions
from tiered_kv.testing.engine.rig import SecondRig
from tiered_kv.testing.policies import Always
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

pytestmark = pytest.mark.usefixtures("small_bundles")
INJECTED = "The operation failed: see the engine's log."


class Naming:
    """Delays the computation of contexts' page keys, or makes it fail.

    Attributes:
        goes_on: the computation waits while this event is not set.
        failing: number of the next calls that fail.
        failed: number of calls that failed.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.start_over()

    def start_over(self) -> None:
        self.goes_on.set()
        self.failing = self.failed = 0

    def strike(self) -> None:
        """Wait while calls are blocked, and fail if failures are left."""
        assert self.goes_on.wait(300)
        if self.failing:
            self.failing -= 1
            self.failed += 1
            raise RuntimeError("injected")


@pytest.fixture
def naming(monkeypatch: pytest.MonkeyPatch) -> Iterator[Naming]:
    made, name = Naming(), ContextNames.name

    def named(names: ContextNames, token_ids: Sequence[int], salt: str | None) -> Turn:
        made.strike()
        return name(names, token_ids, salt)

    monkeypatch.setattr(ContextNames, "name", named)
    yield made
    made.goes_on.set()


class Player(Script):
    """Clients of one engine that take and restore snapshots, and fork jobs."""

    naming: Naming
    others: Sequence[Player] = ()

    def __init__(
        self,
        rig: EngineRig,
        rng: random.Random,
        acts: Mapping[str, float],
        contexts: list[list[int]],
    ) -> None:
        super().__init__(rig, rng, acts, contexts)
        self.begun: list[dict[str, Any]] = []
        self.names: dict[str, bool] = {}  # whether each snapshot is exact, by name
        adopt = rig.gaps.manager.adopt

        def adopted(end: TurnEnd, named: Request, pages: Sequence[PageKey]) -> None:
            assert all(map(rig.index.readable, pages)), "a job is back without its pages"
            adopt(end, named, pages)

        rig.gaps.manager.adopt = adopted  # type: ignore[method-assign]

    def step(self) -> None:
        self.rig.step()
        if self.rng.random() < 0.3 and self.naming.goes_on.is_set():
            self.rig.wait_for_worker()

    def send(self, job: str, prompt: list[int], **fields: Any) -> str:
        """Send a turn. While another turn of its job runs, another job usually sends it instead."""
        if self.runs(job) and self.rng.random() < 0.9:
            return super().send("another", prompt, **fields)
        return super().send(job, prompt, **fields)

    def runs(self, job: str) -> bool:
        """Return True if a turn of that job is running."""
        return any(one.running for one in self.rig.gaps.manager.jobs.named(job, 9))

    def operate(self) -> None:
        """Start an operation on a job, or restore a snapshot of either engine."""
        jobs = [f"job{i}" for i in range(len(self.contexts))]
        rng, rig, job = self.rng, self.rig, self.rng.choice(jobs)
        alone = rig.turns.running == 1 and rng.random() < 0.7
        alone = alone or rng.random() < 0.1
        if alone and (running := [one for one in jobs if self.runs(one)]):
            job = rng.choice(running)
        match rng.randrange(4):
            case 0 | 1:
                name, exact = f"s{rig.steps}-{len(self.begun)}", alone and rng.random() < 0.5
                said = take(
                    rig,
                    job,
                    name,
                    exact=exact,
                    wait_turn=rng.random() < 0.2,
                    stop=rng.random() < 0.1,
                )
                self.names[name] = exact
            case 2:
                children = [f"{job}+{rig.steps}-{i}" for i in range(rng.randrange(1, 4))]
                said = fork(rig, job, *children, exact=alone and rng.random() < 0.5)
            case _:
                root: Path = rig.half.deps.config.snapshot_path
                found = {
                    name: exact
                    for one in (self, *self.others)
                    for name, exact in one.names.items()
                    if (root / name).exists() or rng.random() < 0.05
                }
                if not found:
                    return
                name = rng.choice(sorted(found))
                exact = found[name] and rng.random() < 0.8
                said = restore(rig, name, rng.choice([None, None, "other", job]), exact=exact)
        if said.get("operation") is not None:
            self.begun.append(said)

    def trouble(self) -> None:
        """Start or end a random fault or delay."""
        rng, rig = self.rng, self.rig
        assert self.faulty is not None
        match rng.randrange(8):
            case 0 | 1:
                self.fail_copy()
            case 2:
                self.faulty.hold(rng.choice(list(Direction)))
            case 3:
                self.faulty.let_go()
                self.naming.goes_on.set()
            case 4:
                self.naming.failing += 1
            case 5:
                self.naming.goes_on.clear()
            case 6:
                self.fail_store()
            case _ if rng.random() < 0.3:
                self.reset()
            case _:
                rig.now += 301  # longer than an operation waits

    def finish(self) -> None:
        rig = self.rig
        self.naming.goes_on.set()
        rig.worker_half.backend.let_go()
        for _ in range(1000):
            if not rig.half.snapshots.under_way:
                break
            rig.half.snapshots.drain()
            rig.wait_for_worker()
            rig.step()
        rig.run()
        for begun in self.begun:
            ended = ask(rig, "operation", engine=begun["engine"], id=begun["operation"])
            assert ended["state"] in ("done", "failed"), ended
            if ended["state"] == "failed" and ended["why"] == INJECTED:
                assert self.naming.failed, "an operation failed with a traceback"
        super().finish()

    def check(self, name: str, answer: list[int]) -> None:
        """Compare an answer, which may be shorter than expected because an operation stopped the
        turn."""
        said = self.rig.outputs[name]
        assert said == answer[: len(said)], name
        assert said or self.rig.aborted(name), name


@pytest.mark.scripts(150, nightly=10_000)
def test_random_scripts_with_snapshots_end_well(
    tmp_path: Path, naming: Naming, seeds: range
) -> None:
    def play(folder: Path, seed: int) -> Mapping[str, int]:
        try:
            return play_script(folder, seed, naming)
        finally:
            naming.start_over()
            shrinking.forget_pages()

    play_each(tmp_path, seeds, play)


def play_script(folder: Path, seed: int, naming: Naming) -> Mapping[str, int]:
    """Play one script on one engine, or on two that share a snapshot folder."""
    rng = random.Random(seed)
    contexts, kind = some_contexts(rng, 5), make_kind(folder, rng)
    acts = {"turn": 50, "operate": 35, "abort": 5, "trouble": rng.choice([0, 0, 3, 10])}
    with ExitStack() as rigs:
        players = [
            Player(rigs.enter_context(kind(at)), rng, acts, contexts)
            for at in range(rng.choice([1, 2]))
        ]
        for one in players:
            one.naming, one.others = naming, players
        rigs.callback(naming.goes_on.set)  # before the engines close, which wait for its calls
        for _ in range(rng.randrange(15, 50)):
            rng.choice(players).act()
        if rng.random() < 0.1:
            return {}  # the engines are closed with operations in progress
        counts = Counter[str]()
        for one in players:
            one.finish()
            for name in ("snapshots_taken", "snapshots_restored", "jobs_forked"):
                counts[name] += one.rig.count(name)
        go_on_elsewhere(players, rng)
        return counts


def go_on_elsewhere(players: Sequence[Player], rng: random.Random) -> None:
    """Restore some of the snapshots, and continue a job from each. The rig then checks the restored
    KV."""
    there = rng.choice(players)
    left = sorted(name for one in players for name in one.names)
    for name in rng.sample(left, min(2, len(left))):
        exact = any(one.names.get(name) for one in players)
        begun = restore(there.rig, name, f"from {name}", exact=exact)
        there.begun.append(begun)
        for _ in range(200):
            said = ask(there.rig, "operation", engine=0, id=begun["operation"])
            if said["state"] != "running":
                break
            there.rig.half.snapshots.drain()
            there.rig.wait_for_worker()
            there.rig.step()
        if said["state"] == "done":
            salt = said["result"]["cache_salt"]
            context = there.rig.half.snapshots.contexts.get(JobKey(salt or "", f"from {name}"))
            so_far = list(context.token_ids)[: LONGEST - LONGEST_ANSWER]
            there.send(f"from {name}", so_far, salt=salt)
    there.finish()


def make_kind(folder: Path, rng: random.Random) -> Callable[[int], EngineRig]:
    """Choose a type of engine, and return a function that creates one by its number."""
    groups = rng.choice([(), (), (), *MODELS.values()])
    second = not groups and rng.random() < 0.5
    page = max((group.block_size for group in groups), default=16) * PAGE // 16
    slots = rng.choice([24, 40, 60, 100, 300]) * max(1, len(groups))
    on_disk: dict[str, Any] = {"ssd_gib": rng.choice([1, 0.004])} if rng.random() < 0.4 else {}
    states = any(group.kind is KvKind.STATE for group in groups)  # states are not compressed
    cold = not second and not states and rng.random() < 0.5
    size = some_size(rng, groups)
    options = some_options(rng, groups, **size, max_num_seqs=rng.choice([1, 2, 8]))
    policy = rng.choice(sorted(registry.POLICIES))
    pins, eviction = rng.choice([0, 0.5]), "worth" if cold else rng.choice(["lru", "worth"])

    def make(at: int) -> EngineRig:
        extra = {
            "pin_fraction": pins,
            "admission": "off",
            "eviction": eviction,
            "snapshot_path": str(folder / "snapshots"),
            **on_disk,
            **({"ssd_path": str(folder / f"ssd{at}")} if on_disk else {}),
        }
        if second:
            extra |= {"cpu_gib": (slots * page * LAYERS + 1) / 2**30, "codec": "raw"}
            rig: EngineRig = SecondRig(SecondOptions(**size, extra=extra))
        else:
            extra |= cold_settings(slots, page)
            if not cold:
                extra |= {"codec": "raw"}
            rig = Rig(folder / f"model{at}", replace(options, extra=extra))
        rig.policy = Always(WAITS) if cold else registry.policy(policy)
        choose_restores(rig, rng)
        return rig

    return make
