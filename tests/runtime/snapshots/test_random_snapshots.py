"""Random turns, snapshots and forks, faults and resets: outputs stay right, every operation ends,
what is reported as restored is there, and no slot, block or reference is left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import BATCH, play_each
from tests.runtime.cold import PAGE, Waits, cold_settings
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.groups.kinds import MODELS
from tests.runtime.snapshots.asking import ask, fork, restore, take
from tests.runtime.test_random_scripts import break_once
from tiered_kv.connectors.runtime.base import Request
from tiered_kv.connectors.runtime.snapshots.context_pages import ContextNames
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import RestoreMode
from tiered_kv.page_group import KvKind
from tiered_kv.policies import registry
from tiered_kv.policies.base import JobKey, TurnEnd
from tiered_kv.policies.cache.restore_mode import AlwaysRestore, FasterRestore
from tiered_kv.testing import shrinking
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions as SecondOptions
from tiered_kv.testing.engine.rig import SecondRig
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.rig import Rig, RigOptions
from tiered_kv.transfer.base import Direction

pytestmark = pytest.mark.usefixtures("small_bundles")
LONGEST = 256
"""Longest request, tokens."""
JOBS = 5
INJECTED = "It failed; the engine's log says why."


class Naming:
    """Naming of contexts that is slow, or fails, when a script says so.

    Attributes:
        goes_on: set unless naming waits.
        failing: calls that are to fail. failed: calls that did.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.start_over()

    def start_over(self) -> None:
        self.goes_on.set()
        self.failing = self.failed = 0

    def strike(self) -> None:
        """Wait, and fail if this call is to."""
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


class Player:
    """One engine, and what a script has asked of it."""

    def __init__(self, rig: EngineRig, rng: random.Random, naming: Naming, *, calm: bool) -> None:
        self.rig, self.rng, self.naming, self.calm = rig, rng, naming, calm
        self.root: Path = rig.half.deps.config.snapshot_path
        self.faulty: FaultyTransfer = rig.inject(FaultyTransfer)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.gone: set[str] = set()  # aborted, perhaps while a step was under way
        self.begun: list[dict[str, Any]] = []
        self.names: dict[str, bool] = {}  # snapshots, and whether they are exact
        adopt = rig.gaps.manager.adopt

        def adopted(end: TurnEnd, named: Request, pages: Sequence[PageKey]) -> None:
            assert all(map(rig.index.readable, pages)), "a job is back without its pages"
            adopt(end, named, pages)

        rig.gaps.manager.adopt = adopted  # type: ignore[method-assign]

    def turn(self, job: str, prompt: list[int], salt: str | None = None) -> None:
        rng, name = self.rng, f"r{len(self.asked)}"
        tokens = rng.choice([1, 4, 12, 40])
        params = {"job_id": job, "is_last_step": rng.random() < 0.05}
        self.rig.add(name, prompt, max_tokens=tokens, params=params, salt=salt)
        self.asked[name] = prompt, tokens

    def runs(self, job: str) -> bool:
        """True if a turn of that job is under way."""
        return any(one.running for one in self.rig.gaps.manager.jobs.named(job, 9))

    def operate(self, jobs: Sequence[str], others: Sequence[Player]) -> None:
        """Start an operation on one of these jobs, or restore a snapshot of either engine."""
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
                found = {
                    name: exact
                    for one in (self, *others)
                    for name, exact in one.names.items()
                    if (self.root / name).exists() or rng.random() < 0.05
                }
                if not found:
                    return
                name = rng.choice(sorted(found))
                exact = found[name] and rng.random() < 0.8
                said = restore(rig, name, rng.choice([None, None, "other", job]), exact=exact)
        if said.get("operation") is not None:
            self.begun.append(said)

    def trouble(self) -> None:
        """A fault, or something slow, or the end of that."""
        rng, rig = self.rng, self.rig
        match rng.randrange(8):
            case 0 | 1:
                self.faulty.fail_next(rng.choice(list(Direction)), {rng.randrange(3)})
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
                if stores := rig.worker_half.stores:
                    break_once(stores[rng.choice(sorted(stores))].io.store, rng)
            case _ if rng.random() < 0.3:
                with suppress(RuntimeError):  # vLLM refuses while a restore is under way
                    rig.reset_cache()
            case _:
                rig.now += 301  # longer than an operation waits

    def abort(self) -> None:
        running = [name for name in self.asked if name not in self.rig.finished]
        if running:
            name = self.rng.choice(running)
            self.gone.add(name)
            self.rig.abort(name)

    def end(self) -> None:
        """Let everything come to its end, and check it."""
        rig = self.rig
        self.naming.goes_on.set()
        self.faulty.let_go()
        for _ in range(1000):
            if not rig.half.snapshots.under_way:
                break
            rig.half.snapshots.drain()
            rig.wait_for_worker()
            rig.step()
        rig.run()
        for name, (prompt, tokens) in self.asked.items():
            if name not in self.gone:
                said = rig.outputs[name]
                assert said == expected(prompt, tokens)[: len(said)], name
                assert said, name
        for begun in self.begun:
            ended = ask(rig, "operation", engine=begun["engine"], id=begun["operation"])
            assert ended["state"] in ("done", "failed"), ended
            if ended["state"] == "failed" and ended["why"] == INJECTED:
                assert self.naming.failed, "an operation failed with a traceback"
        for i in range(2):
            rig.wait_for_worker()
            rig.ask(f"last{i}", text(1, seed=1), max_tokens=8)
        rig.half.release_all()
        rig.check_clean()


@pytest.fixture(autouse=True)
def _no_pages_are_kept() -> Iterator[None]:
    yield
    shrinking.forget_pages()


@pytest.mark.scripts(150, nightly=10_000)
def test_random_scripts_with_snapshots_end_well(
    tmp_path: Path, naming: Naming, seeds: range
) -> None:
    counts = dict.fromkeys(("snapshots_taken", "snapshots_restored", "jobs_forked"), 0)

    def play(folder: Path, seed: int) -> None:
        play_script(folder, seed, naming, counts)
        shrinking.forget_pages()

    play_each(tmp_path, seeds, play)
    assert all(counts.values()) or len(seeds) < BATCH, f"nothing was done: {counts}"


def play_script(folder: Path, seed: int, naming: Naming, counts: dict[str, int]) -> None:
    """Play one script on one engine, or on two that share a folder of snapshots."""
    rng = random.Random(seed)
    folder.mkdir()
    rigs = list[EngineRig]()
    kind = make_kind(folder, rng)
    try:
        for at in range(rng.choice([1, 2])):
            rigs.append(kind(at))
        calm = rng.random() < 0.25
        players = [Player(rig, rng, naming, calm=calm) for rig in rigs]
        play(players, rng)
        if rng.random() < 0.1:
            return  # with operations under way
        for one in players:
            one.end()
            for name in counts:
                counts[name] += one.rig.count(name)
        go_on_elsewhere(players, rng)
    finally:
        naming.start_over()
        for rig in rigs:
            rig.close()


def play(players: Sequence[Player], rng: random.Random) -> None:
    """Make random turns and operations, between a few steps each."""
    contexts = {
        f"job{i}": text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for i in range(JOBS)
    }
    chance = rng.choice([0.1, 0.3])
    for i in range(rng.randrange(15, 50)):
        one = rng.choice(players)
        for _ in range(rng.randrange(0, 6)):
            one.rig.step()
            if rng.random() < 0.3:
                one.rig.wait_for_worker() if one.naming.goes_on.is_set() else None
        one.rig.now += rng.choice([0, 0.1, 0.5, 3])
        what, job = rng.random(), rng.choice(sorted(contexts))
        if what < 0.5 and (not one.runs(job) or rng.random() < 0.1):
            context = contexts[job]
            prompt = (
                context[: rng.randrange(1, len(context) + 1)] if rng.random() < 0.2 else context
            )
            one.turn(job, prompt)
            longer = [*prompt, *expected(prompt, 4), *text(rng.randrange(1, 20), seed=i)]
            contexts[job] = longer if len(longer) < LONGEST - 45 else longer[: len(longer) // 2]
        elif what < 0.85:
            one.operate(sorted(contexts), players)
        elif what < 0.9:
            one.abort()
        elif not one.calm and rng.random() < 3 * chance:
            one.trouble()


def go_on_elsewhere(players: Sequence[Player], rng: random.Random) -> None:
    """Snapshots that are left have the bytes that they should: a job goes on from each."""
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
            so_far = list(context.token_ids)[: LONGEST - 20]
            there.turn(f"from {name}", so_far, salt)
    there.end()


def make_kind(folder: Path, rng: random.Random) -> Callable[[int], EngineRig]:
    """Choose a kind of engine, and return what makes one by its number."""
    groups = rng.choice([(), (), (), *MODELS.values()])
    second = not groups and rng.random() < 0.5
    size: dict[str, Any] = {
        "max_model_len": LONGEST,
        "max_batched_tokens": rng.choice([64, 256]),
    }
    page = max((group.block_size for group in groups), default=16) * PAGE // 16
    slots = rng.choice([24, 40, 60, 100, 300]) * max(1, len(groups))
    on_disk: dict[str, Any] = {"ssd_gib": rng.choice([1, 0.004])} if rng.random() < 0.4 else {}
    states = any(group.kind is KvKind.STATE for group in groups)  # these are not compressed
    cold = not second and not states and rng.random() < 0.5
    longest = sum(LONGEST // group.block_size + 2 for group in groups) + 1
    blocks = max(longest, rng.choice([20, 30, 60]) * max(1, len(groups)))
    options = RigOptions(**size, blocks=blocks)
    if groups:
        options = replace(options, groups=groups, retention=rng.choice([0, 0, None]))
    options = replace(
        options,
        max_num_seqs=rng.choice([1, 2, 8]),
        ahead=rng.random() < 0.5,
        in_job_order=rng.random() < 0.5,
    )
    policy = rng.choice(sorted(registry.POLICIES))
    restores = rng.choice([FasterRestore(), *(AlwaysRestore(mode) for mode in RestoreMode)])
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
            rig: EngineRig = SecondRig(SecondOptions(**size, blocks=blocks, extra=extra))
        else:
            extra |= cold_settings(slots, page)
            if not cold:
                extra |= {"codec": "raw"}
            rig = Rig(folder / f"model{at}", replace(options, extra=extra))
        rig.policy = Waits() if cold else registry.policy(policy)
        rig.pages.restores.policy = restores
        return rig

    return make
