"""Random scripts: requests of clients, faults and resets, all drawn from a seed.

A test marked ``@pytest.mark.scripts(150, nightly=10_000)`` has an argument ``seeds``. By default,
the test runs 150 seeds in batches. With ``-m nightly``, it runs 10,000 seeds. With
``--scripts N --first-seed S``, it runs N seeds from S on.

Each type of script has an engine and a ``Script``: the actions of its clients, with weights. In
each step, the engine's fake model checks that it reads the right KV, and the engine's test rig
checks that requests are admitted fairly. At the end, every answer is compared with the expected
answer, and every block, slot, order and reference is accounted for.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.conftest import BATCH
from tiered_kv.connectors.runtime import hint_actions, kv_events
from tiered_kv.connectors.runtime.between_turns import turn_ends
from tiered_kv.connectors.runtime.pages import lookups, pieces, promotions, restores, saves
from tiered_kv.connectors.runtime.pins import pin_table
from tiered_kv.orders import RestoreMode
from tiered_kv.pages import cpu_index, order_book
from tiered_kv.policies import registry
from tiered_kv.policies.base import NO_TOOL, Costs, Decision, Tier, ToolUse, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.cache import eviction
from tiered_kv.policies.cache.restore_mode import AlwaysRestore, FasterRestore
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.policies.jobs.kv_hints import Intent, KvHint, Target
from tiered_kv.testing.checked_kv import VOCABULARY, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import RigOptions
from tiered_kv.transfer.base import Direction

LONGEST = 256
"""Length of the longest request in tokens."""
LONGEST_CONTEXT = 190
LONGEST_ANSWER = 40
STOPS = range(0, VOCABULARY, 12)
"""Stop tokens of the requests that have any."""


def play_each(
    folder: Path, seeds: range, play: Callable[[Path, int], Mapping[str, int] | None]
) -> None:
    """Run the script of each seed in a folder of its own. An exception names its seed.

    With an odd seed, a scheduler step is limited to a few pages, so that the work is split over
    several steps.

    Args:
        play: runs one script, and may return counts of the cases that the script is meant to
            reach. None of them may be 0 after a full batch.
    """
    reached = Counter[str]()
    for seed in seeds:
        own = folder / f"{seed}"
        own.mkdir()
        try:
            with work_in_pieces(seed):
                reached.update(play(own, seed))
        except BaseException as error:
            error.add_note(f"repeat with: --scripts 1 --first-seed {seed}")
            raise
        shutil.rmtree(own, ignore_errors=True)
    assert all(reached.values()) or len(seeds) < BATCH, f"nothing was tested: {reached}"


@contextmanager
def work_in_pieces(seed: int) -> Iterator[None]:
    """Limit a scheduler step to a few pages if the seed is odd."""
    with ExitStack() as patches:
        for module, limit, pages in (
            (restores, "WHOLE_PAGES", 3),
            (restores, "PAGES_A_STEP", 4),
            (pieces, "PAGES_A_STEP", 2),
            (pieces, "TOUCHED_A_STEP", 3),
            (promotions, "PAGES_A_STEP", 3),
            (promotions, "SEARCHED_A_STEP", 3),
            (promotions, "TOUCHED_A_STEP", 2),
            (lookups, "LATER_LOOKUP", 3),
            (pin_table, "RELEASED_AT_ONCE", 2),
            (eviction, "AT_A_TIME", 1),
            (turn_ends, "PAGES_A_STEP", 3),
            (hint_actions, "PAGES_A_STEP", 2),
            (kv_events, "PAGES_A_STEP", 5),
            (kv_events, "SEARCHED_A_STEP", 3),
            (kv_events, "BLOCKS_TOGETHER", 3),
            (saves, "TOUCHED_A_STEP", 3),
            (saves, "LOOKED_AT", 2),
            (order_book, "SETTLED_AT_ONCE", 3),
            (cpu_index, "SPARED_AT_ONCE", 2),
        ):
            if seed % 2:
                patches.enter_context(patch.object(module, limit, pages))
        yield


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that a script has sent."""

    prompt: list[int]
    tokens: int
    stops: Sequence[int]

    def answer(self) -> list[int]:
        """Return the expected answer."""
        whole = expected(self.prompt, self.tokens)
        end = next((i for i, token in enumerate(whole, 1) if token in self.stops), self.tokens)
        return whole[:end]


class Script:
    """Random clients of one engine, with faults and resets.

    The random choices of turns, aborts and resets do not depend on the engine, so that two engines
    can be compared.

    Args:
        acts: names of methods, and their weights.
        contexts: the contexts of jobs that another script has served before; None for new ones.

    Attributes:
        steps: possible numbers of engine steps before an action.
        passes: possible numbers of seconds by which the clock advances before an action.
        left: the context that each job last replaced, by the job's number.
        sent: requests by ID.
        faulty: the worker's transfers, in which faults can be injected; None without faults.
    """

    steps: Sequence[int] = range(6)
    passes: Sequence[float] = (0, 0.1, 0.5, 3)

    def __init__(
        self,
        rig: EngineRig,
        rng: random.Random,
        acts: Mapping[str, float],
        contexts: list[list[int]] | None = None,
    ) -> None:
        self.rig, self.rng, self.acts = rig, rng, acts
        self.contexts = some_contexts(rng) if contexts is None else contexts
        self.left: dict[int, list[int]] = {}
        self.sent: dict[str, Sent] = {}
        self.faulty: FaultyTransfer | None = None
        if rig.half is not None and rig.index.num_slots:
            self.faulty = rig.inject(FaultyTransfer)

    def play(self, acts: int) -> None:
        """Run the given number of random actions."""
        for _ in range(acts):
            self.act()

    def act(self) -> None:
        """Run a few engine steps, then one random action."""
        for _ in range(self.rng.choice(self.steps)):
            self.step()
        self.rig.now += self.rng.choice(self.passes)
        [name] = self.rng.choices(list(self.acts), list(self.acts.values()))
        getattr(self, name)()

    def step(self) -> None:
        """Run one engine step."""
        self.rig.step()

    # -- actions ---------------------------------------------------------------------

    def turn(self) -> None:
        """Send a turn of a random job, with the whole context or only the start of it. In some
        cases, the context then grows by the answer and new text."""
        rng, job = self.rng, self.rng.randrange(len(self.contexts))
        context = self.contexts[job]
        prompt = context[: rng.randrange(1, len(context) + 1)] if rng.random() < 0.4 else context
        sent = self.sent[self.send(f"job{job}", prompt)]
        if rng.random() < 0.6:
            said = text(rng.randrange(1, 30), seed=rng.randrange(10**6))
            self.contexts[job] = self.fit([*context, *sent.answer(), *said])

    def send(self, job: str, prompt: list[int], **fields: Any) -> str:
        """Send a request. Returns its ID."""
        rng, name = self.rng, f"r{len(self.sent)}"
        tokens = rng.choice([1, 4, 12, rng.randrange(1, LONGEST_ANSWER)])
        sent = self.sent[name] = Sent(prompt, tokens, rng.choice([(), STOPS]))
        fields = {**self.fields(job), **fields}
        self.rig.add(name, prompt, tokens, stop_ids=sent.stops, **fields)
        return name

    def fields(self, job: str) -> dict[str, Any]:
        """Return the other fields of a job's next request."""
        hints = {"job_id": job, "is_last_step": self.rng.random() < 0.1}
        return {"params": self.rng.choice([hints, hints, None])}

    def fit(self, context: list[int]) -> list[int]:
        """Return a context, shortened if it is too long."""
        if len(context) <= LONGEST_CONTEXT:
            return context
        most = self.rng.choice([LONGEST_CONTEXT, LONGEST_CONTEXT, len(context) // 2])
        return context[-most:] if self.rng.random() < 0.1 else context[:most]

    def compact(self) -> None:
        """Replace a job's context by its start and a summary, or by the context that it last
        replaced. The job then runs one or two turns."""
        rng, job = self.rng, self.rng.randrange(len(self.contexts))
        context = self.contexts[job]
        summary = [*context[: rng.choice([0, 20, 48])], *text(40, seed=rng.randrange(10**6))]
        before = self.left.get(job, summary)
        self.contexts[job] = before if rng.random() < 0.3 else summary
        self.left[job] = context
        for _ in range(rng.choice([1, 2, 2])):
            name = self.send(f"job{job}", self.contexts[job], params={"job_id": f"job{job}"})
            for _ in range(2 * LONGEST_ANSWER):
                if name not in self.rig.finished:
                    self.step()
            self.rig.now += 0.1
            said = text(20, seed=rng.randrange(10**6))
            self.contexts[job] = self.fit([*self.contexts[job], *self.sent[name].answer(), *said])

    def abort(self) -> None:
        """Abort one of the latest requests. The abort may arrive while the next step runs."""
        late, name = self.rng.random() < 0.5, self.rng.choice([*self.sent, ""][-8:])
        if name and name not in self.rig.finished:
            self.rig.abort(name, late=late)

    def fail_copy(self) -> None:
        """Make a page of the next save or load fail."""
        direction, page = self.rng.choice(list(Direction)), self.rng.randrange(3)
        if self.faulty is not None:
            self.faulty.fail_next(direction, {page})

    def fail_store(self) -> None:
        """Make the next read or write of a tier fail."""
        if self.faulty is not None and (stores := self.rig.worker_half.stores):
            break_once(stores[self.rng.choice(sorted(stores))].io.store, self.rng)

    def reset(self) -> bool:
        """Reset the prefix cache, in some cases with running requests. Returns False if the reset
        is refused."""
        running = self.rng.random() < 0.5
        with suppress(RuntimeError):  # vLLM refuses while restores are in flight
            return self.rig.reset_cache(running=running)
        return False

    def hint(self) -> None:
        """Carry out random hints about the KV of jobs and contexts, in some cases on behalf of a
        live request."""
        rng = self.rng
        hints = [self.some_hint() for _ in range(rng.choice([1, 3]))]
        live = rng.choice([*self.sent, "nobody"][-8:])
        request = live if rng.random() < 0.3 else None
        scope = rng.choice(["", "", "", "", None, "somebody"])
        if self.rig.half is not None:
            results = self.rig.half.kv_hints.carry_out(scope, hints, request)
            assert [one.action_id for one in results] == [one.action_id for one in hints]

    def some_hint(self) -> KvHint:
        rng, job = self.rng, self.rng.randrange(len(self.contexts))
        context = self.contexts[job]
        named = [Target(job=f"job{job}"), Target(number=rng.randrange(1, 6)), Target(own=True)]
        named += [Target(tokens=tuple(context[: rng.randrange(1, len(context) + 1)]))]
        if self.rig.half is not None:
            deps = self.rig.half.deps
            hashes = deps.make_request(context, None, deps.facts.hash_tokens).block_hashes
            end = rng.choice([slice(None), slice(-8, None)])
            named += [Target(hashes=tuple(one[end] for one in hashes))]
        return KvHint(
            action_id=f"{rng.random()}",
            intent=rng.choice(list(Intent)),
            target=rng.choice([named[0], named[0], *named]),
            ttl_s=rng.choice([None, 0.5, 5.0, 1e6]),
            priority=rng.choice([-1, 0, 1]),
            expected_s=rng.choice([None, 0.0, 1.0, 1e3]),
            progress=rng.choice([None, 0.0, 0.5]),
            done=rng.random() < 0.3,
        )

    def wait(self) -> None:
        """Wait until the workers have finished their copies."""
        self.rig.wait_for_worker()

    # -- the end ----------------------------------------------------------------------

    def finish(self) -> None:
        """Run all requests to the end. Asserts that the answers are correct and that no resource is
        still held."""
        rig = self.rig
        self.outlast_hints()
        rig.run()
        for name, sent in self.sent.items():
            self.check(name, sent.answer())
        if rig.half is not None:
            rig.now += 5 * 3600  # longer than the connector waits for any next turn
            for i in range(2):
                rig.wait_for_worker()
                rig.ask(f"last{i}", text(1, seed=1), max_tokens=8)
            rig.half.release_all()
            rig.settle()
        rig.check_clean()

    def outlast_hints(self) -> None:
        """Step until no request is left, and let the time pass in which an idle engine steps for
        hints. A hint may wait for a promotion that is due later, and the clock stands still while
        the rig runs to the end."""
        rig = self.rig
        if rig.half is None:
            return
        for _ in range(2000):
            if rig.finished.keys() >= self.sent.keys():
                break
            rig.step()
            if not rig.running():
                rig.wait_for_worker()
        if rig.half.kv_hints.works:
            rig.now += hint_actions.EAGER_S

    def check(self, name: str, answer: list[int]) -> None:
        """Assert that the engine's answer is the expected one. An aborted request may have only the
        start of it."""
        said = self.rig.outputs[name]
        assert said == (answer[: len(said)] if self.rig.aborted(name) else answer), name


# -- engines -------------------------------------------------------------------------------


def some_contexts(rng: random.Random, jobs: int = 4) -> list[list[int]]:
    return [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(jobs)]


def some_size(rng: random.Random, groups: Sequence[GroupSpec] = ()) -> dict[str, Any]:
    """Draw the size of an engine that has few blocks. The longest request fits."""
    longest = sum(LONGEST // group.block_size + 2 for group in groups) + 1
    return {
        "blocks": max(longest, rng.choice([20, 30, 60]) * max(1, len(groups))),
        "max_model_len": LONGEST,
        "max_batched_tokens": rng.choice([64, 256]),
    }


def some_options(rng: random.Random, groups: tuple[GroupSpec, ...] = (), **own: Any) -> RigOptions:
    """Draw the options of an engine with vLLM's scheduler, except those given in ``own``."""
    drawn: dict[str, Any] = {
        **some_size(rng, groups),
        "max_num_seqs": rng.choice([2, 8]),
        "in_job_order": rng.random() < 0.6,
        "ahead": rng.random() < 0.5,
        "groups": groups,
        "retention": rng.choice([0, 0, None]) if groups else 0,
    }
    return RigOptions(**{**drawn, **own})


def some_tiers(
    rng: random.Random, folder: Path, page_bytes: int, slots: Sequence[int]
) -> dict[str, Any]:
    """Draw the settings of a CPU tier that has one of these numbers of slots, and in some cases of
    an SSD tier, which may be too small."""
    count, ssd_gib = rng.choice(slots), rng.choice([None, 1, 0.004])
    found = {"cpu_gib": count * page_bytes / 2**30, "codec": "raw"}
    if count and ssd_gib is not None:
        found |= {"ssd_path": str(folder / "ssd"), "ssd_gib": ssd_gib}
    return found


def choose_policies(rig: EngineRig, rng: random.Random) -> None:
    """Draw the policies that decide where a turn's KV is kept and how it is restored."""
    named = registry.policy(rng.choice(sorted(registry.POLICIES)))
    rig.policy = rng.choice([rig.policy, AnyDecision(rng), named])
    choose_restores(rig, rng)


def choose_restores(rig: EngineRig, rng: random.Random) -> None:
    rig.pages.restores.policy = rng.choice([FasterRestore(), *map(AlwaysRestore, RestoreMode)])


class AnyDecision(StatelessPolicy):
    """A policy that makes random decisions of every type, both before and after tool calls are
    read."""

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
    """A fake tool reader that reads tool calls immediately, later or never."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._queued: list[str] = []
        self.answers = (("", NO_TOOL),)  # read in every step

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
    """Make the next read or write of a store raise an exception or report all pages as failed."""
    name = rng.choice(["put", "get"])
    right: Callable[..., frozenset[int]] = getattr(store, name)
    raises = rng.random() < 0.5

    def wrong(pages: Sequence[Any]) -> frozenset[int]:
        setattr(store, name, right)
        if raises:
            raise OSError(5, "injected")
        return frozenset(range(len(pages)))

    setattr(store, name, wrong)
