"""No container of the scheduler or worker half grows without bound, whatever clients send and
whichever device hangs.

Most of these tests lower the declared bounds, send jobs with invented names, and measure every
container that is reachable from both halves and from the package's modules. A container that still
grows has no bound.
"""

from __future__ import annotations

import functools
import inspect
import queue
import random
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import PAGE
from tiered_kv.connectors.runtime.admission.active_jobs import ActiveJob, Scopes
from tiered_kv.connectors.runtime.between_turns.turn_ends import PrefetchQueue
from tiered_kv.connectors.runtime.tool_reader import ToolReader
from tiered_kv.policies.base import MAX_SALT_CHARS, Costs, Decision, JobKey, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.storage.notebook import MOST_QUEUED, Notebook
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

TURNS = 90
"""Number of turns between two measurements."""
MOST_OPEN_REQUESTS = 12
BOUNDS = {
    "connectors.runtime.admission.active_jobs.MOST_SILENT": 4,
    "connectors.runtime.admission.active_jobs.SILENT_OF_ALL": 16,
    "connectors.runtime.between_turns.turn_ends.SPARE_ENTRIES": 4,
    "connectors.runtime.between_turns.turn_ends.MOST_RECENT": 16,
    "connectors.runtime.tool_reader.MAX_QUEUED": 8,
    "connectors.runtime.job_table.MAX_JOBS": 48,
    "connectors.runtime.steps.step_trace.MOST_PREEMPTED": 4,
    "connectors.runtime.steps.step_trace.AT_ONCE": 8,
    "policies.admission.working_set.JOBS": 8,
    "policies.baselines.continuum.MAX_GAPS": 4,
    "policies.baselines.continuum.MAX_TOOLS": 8,
    "policies.forecast.job_history.MAX_GAPS": 4,
    "policies.forecast.job_history.MAX_JOBS": 16,
    "policies.forecast.tool_hierarchy.MAX_NODES": 16,
    "policies.jobs.lineage.MAX_JOBS": 12,
    "policies.jobs.lineage.MAX_NEIGHBOURS": 4,
    "connectors.runtime.between_turns.open_gaps.MOST_OPEN": 32,
    "policies.pricing.estimators.WINDOW": 8,
    "metrics.MOST_OBSERVED": 16,
    "pages.tier_index.MOST_ANSWERS": 128,
    "storage.notebook.MOST_FACTS": 32,
    "storage.notebook.MOST_QUEUED": 16,
    "storage.remote_pages.MOST_OWN": 64,
    "storage.remote_pages.MOST_RUNS": 64,
    "trace.trace_writer.MAX_QUEUED": 32,
}
"""The bounds that the project declares, each with a value so low that the traffic of these tests
reaches it."""
REACHED = {
    "JobTable._jobs": "connectors.runtime.job_table.MAX_JOBS",
    "Lineage._jobs": "policies.jobs.lineage.MAX_JOBS",
    "OpenGaps._gaps": "connectors.runtime.between_turns.open_gaps.MOST_OPEN",
    "RecentDecisions._last": "connectors.runtime.between_turns.turn_ends.MOST_RECENT",
}
"""Containers that are full at the end of the tests that use them, with the name of their bound."""
AS_LARGE_AS_DISKS = {
    "Catalogue.pages",
    "FolderContents._names[]",
    "FolderContents.places",
    "Segment.live",
    "TailIndex._by_parent",
    "TailIndex._by_parent[]",
    "TailIndex._parents",
    "TierIndex._used",
    "VirtualStore._segments[]",
    "VirtualStore._where",
}
"""Containers with one or two entries for each page on SSD or in a shared folder. They are bounded
by the configured size of the SSD tier or folder, which these tests do not fill."""


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, low in BOUNDS.items():
        home, _, name = f"tiered_kv.{path}".rpartition(".")
        usual = getattr(import_module(home), name)
        for module_name, module in list(sys.modules.items()):
            imported = vars(module).get(name)
            if module_name.startswith("tiered_kv.") and imported is usual:
                monkeypatch.setattr(module, name, low)


# -- sizes of reachable containers -------------------------------------------------------


def sizes(roots: Iterable[object]) -> Counter[str]:
    """Return the size of each container that is reachable from ``roots`` or from a module of the
    package.

    Containers are named by their owner: ``JobTable._jobs`` is an attribute, ``JobTable._jobs[]``
    all containers in it together. The size is the number of items, of bytes for arrays, and of
    characters for long strings. Objects of other packages are not entered.
    """
    found, seen = Counter[str](), set[int]()
    waiting = deque[tuple[str, object]]((type(root).__name__, root) for root in roots)
    waiting += _of_modules()
    while waiting:
        name, one = waiting.popleft()
        if isinstance(one, (str, bytes, bytearray)):
            found[f"{name} (characters)"] += len(one) * (len(one) > 200)
        elif id(one) not in seen:
            seen.add(id(one))
            waiting += _parts(name, one, found)
    return found


def _of_modules() -> Iterator[tuple[str, object]]:
    for module_name, module in list(sys.modules.items()):
        if _is_ours(module_name):
            short = module_name.rpartition(".")[2]
            for name, value in list(vars(module).items()):
                if isinstance(value, (dict, list, set, deque)) and not name.startswith("__"):
                    yield f"{short}.{name}", value
                elif hasattr(value, "cache_info"):
                    yield f"{short}.{name} (cache)", range(value.cache_info().currsize)


def _parts(name: str, one: Any, found: Counter[str]) -> Iterable[tuple[str, object]]:
    """Return the objects that ``one`` refers to, each with its name. Counts ``one`` if it is a
    container."""
    inside = name if name.endswith("[]") else f"{name}[]"
    match one:
        case np.ndarray():
            found[f"{name} (bytes)"] += one.nbytes
        case range():
            found[name] += len(one)
        case Mapping():
            found[name] += len(one)
            return [(inside, part) for item in _copied(one) for part in item]
        case list() | set() | deque():
            found[name] += len(one)
            return [(inside, part) for part in _copied(one)]
        case tuple() | frozenset():
            return [(inside, part) for part in one]
        case queue.Queue():
            return [(name, one.queue)]
        case queue.SimpleQueue():
            found[name] += one.qsize()
        case ThreadPoolExecutor():
            return [(f"{name}._work_queue", one._work_queue)]  # noqa: SLF001
        case functools.partial():
            return [(name, part) for part in (one.func, one.args, one.keywords)]
        case types.MethodType():
            return [(name, one.__self__)]
        case types.FunctionType():
            return [
                (one.__qualname__, part) for part in inspect.getclosurevars(one).nonlocals.values()
            ]
        case _ if _is_ours(type(one).__module__) and not isinstance(one, type):
            owner = type(one).__name__
            return [(f"{owner}.{attribute}", value) for attribute, value in _attributes(one)]
    return ()


def _copied(container: Any) -> list[Any]:
    """Return the items of a container that another thread may be changing."""
    while True:
        try:
            return list(container.items() if isinstance(container, Mapping) else container)
        except RuntimeError:
            continue


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(one, "__dict__", {}).items())
    for cls in type(one).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(one, slot):
                yield slot, getattr(one, slot)


def _is_ours(module: str) -> bool:
    return module.startswith("tiered_kv.") and not module.startswith("tiered_kv.testing.")


# -- clients ----------------------------------------------------------------------------


class Clients:
    """Clients that invent jobs, salts, tools and commands, and disconnect, retry or return."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._rng = random.Random(1)
        self._sent = 0
        self._jobs: list[tuple[dict[str, Any], str | None, list[int]]] = []
        self._open: list[str] = []

    def send(self, turns: int) -> None:
        """Send ``turns`` turns, and wait for their answers."""
        for _ in range(turns):
            self._send_turn()
            self._rig.now += self._rng.choice([0.01, 0.05, 0.2])
            self._step_until_open(MOST_OPEN_REQUESTS)
        self._step_until_open(0)

    def _step_until_open(self, most: int) -> None:
        for _ in range(1000):
            self._rig.step()
            self._rig.now += 0.001
            self._open = [one for one in self._open if one not in self._rig.finished]
            if len(self._open) <= most:
                return
        raise AssertionError("requests wait for what hangs")

    def _send_turn(self) -> None:
        rng, rig = self._rng, self._rig
        params, salt, prompt = self._turn_of_a_job()
        luck = rng.random()
        for _ in range(2 if luck > 0.9 else 1):  # sometimes two concurrently
            self._sent += 1
            name = f"request {self._sent}"
            rig.add(name, prompt, max_tokens=rng.randrange(1, 12), params=params, salt=salt)
            self._open.append(name)
            if luck < 0.25:
                if luck < 0.15:
                    rig.step()
                if name not in rig.finished:
                    rig.abort(name)

    def _turn_of_a_job(self) -> tuple[dict[str, Any], str | None, list[int]]:
        rng, number = self._rng, self._sent
        if self._jobs and rng.random() < 0.35:
            params, salt, prompt = rng.choice(self._jobs)
            prompt = (prompt + text(rng.randrange(1, 30), seed=number))[:200]
        else:
            params = rng.choice([{}, {"job_id": f"job {number}"}, {"job_id": f"job {number}"}])
            salt = rng.choice([None, None, "a client", f"client {number} " + 5000 * "x"])
            prompt = text(rng.randrange(1, 100), seed=number)
        if rng.random() < 0.5:
            params = {
                **params,
                "tool_name": rng.choice(["bash", f"tool_{number}"]),
                "tool_command": f"program{number} --option{number} /path/{number} && sleep 3",
                "expected_tool_s": rng.choice([0.1, 60.0, 80_000.0]),
            }
        if rng.random() < 0.2:
            params = {**params, "is_last_step": True}
        self._jobs = [*self._jobs[-5:], (params, salt, prompt)]
        return params, salt, prompt


class ByLot(StatelessPolicy):
    """A policy that chooses pin, CPU or store at random, and never drops KV."""

    reads_tools = True

    def __init__(self) -> None:
        self._rng = random.Random(2)

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        tier = self._rng.choice([Tier.PIN, Tier.CPU, Tier.STORE, Tier.STORE])
        forecast = Forecast(np.sort(self._rng.choices(range(100), k=len(GRID))) / 100)
        back_s = self._rng.choice([None, 0.5, 10_000.0])
        return Decision(tier, 5.0 * (tier is Tier.PIN), forecast=forecast, back_s=back_s)


class Tokenizer:
    """Decodes every answer to a different tool call, once the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def decode(self, tokens: list[int], **_: Any) -> str:
        self._gate.wait()
        call = f'{{"name": "tool_{sum(tokens)}", "arguments": {{"command": "sleep 3"}}}}'
        return f"<tool_call>{call}</tool_call>"


def make(
    make_rig: MakeRig, folder: Path, gate: threading.Event, *, slots: int = 64, **extra: Any
) -> Rig:
    settings = {
        "admission": "auto",
        "admission_max_wait_s": 2,
        "cpu_gib": (slots * PAGE + 1) / (1 << 30),
        "ssd_path": str(folder / "ssd"),
        "ssd_gib": 0.001,
        "codec": "raw",
        "policy": "occupancy",
        "trace": str(folder / "trace.jsonl"),
        "trace_steps": True,
        **extra,
    }
    return make_rig(extra=settings, in_job_order=True, tools=ToolReader(lambda: Tokenizer(gate)))


def shared(folder: Path) -> str:
    (folder / "shared").mkdir()
    return f"{(folder / 'shared').as_uri()}?gib=1"


def held_back(gate: threading.Event, owner: Any, *names: str) -> threading.Event:
    """Make calls of these methods wait until the gate is open. Returns an event that the first call
    sets."""
    waits = threading.Event()

    def call(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        waits.set()
        gate.wait()
        return usual(*args, **kwargs)

    for name in names:
        setattr(owner, name, functools.partial(call, getattr(owner, name)))
    return waits


def check_that_nothing_grows(rig: Rig) -> Counter[str]:
    """Send the same number of turns four times, and assert that no container grows. Returns the
    final sizes.

    Containers fill during the first two rounds. A container that grows in proportion to the number
    of turns doubles during the others. Small containers are ignored, because they may have an entry
    for each block of VRAM or each slot of CPU memory, and these tests use only some of these.
    """
    clients, found = Clients(rig), list[Counter[str]]()
    for _ in range(4):
        clients.send(TURNS)
        found.append(sizes([rig.half, rig.worker_half]))
    _, before, between, after = found
    grown = {
        name: (before[name], between[name], size)
        for name, size in after.items()
        if before[name] < between[name] < size > 1.3 * before[name]
        and size > (8 if name.endswith("(bytes)") else 1) * 2 * rig.options.blocks
        and name not in AS_LARGE_AS_DISKS
    }
    assert not grown, "\n".join(f"{name}: {each}" for name, each in grown.items())
    for name, bound in REACHED.items():
        if name in after:
            late = after[name] - BOUNDS[bound]  # some bounds are enforced only occasionally
            assert 0 <= late < MOST_OPEN_REQUESTS, f"{name} has {after[name]}"
    return after


@pytest.mark.usefixtures("low_bounds")
def test_invented_jobs_salts_and_tools_fill_no_container(make_rig: MakeRig, tmp_path: Path) -> None:
    gate = threading.Event()
    gate.set()
    rig = make(make_rig, tmp_path, gate, snapshot_path=str(tmp_path / "snapshots"))
    check_that_nothing_grows(rig)


@pytest.mark.usefixtures("low_bounds")
def test_nothing_waits_without_bound_for_disks_servers_and_threads_that_hang(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        gate = threading.Event()
        stack.callback(gate.set)
        rig = make(make_rig, tmp_path, gate, remote=shared(tmp_path))
        rig.policy = ByLot()
        for tier in rig.worker_half.stores.values():
            held_back(gate, tier.io.store, "put", "get", "exists", "reclaim")
        held_back(gate, rig.half.deps.notebook, "_append")
        held_back(gate, rig.half.gaps.log.trace._writer, "_append")  # noqa: SLF001
        check_that_nothing_grows(rig)


@pytest.mark.usefixtures("low_bounds")
def test_nothing_waits_without_bound_for_copies_that_hang(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    gate = threading.Event()
    gate.set()
    # CPU memory has fewer slots than VRAM has blocks (64).
    rig = make(make_rig, tmp_path, gate, slots=24, remote=shared(tmp_path))
    rig.policy = ByLot()
    faulty = rig.inject(FaultyTransfer)
    faulty.hold(Direction.SAVE)
    check_that_nothing_grows(rig)
    assert faulty.held
    faulty.let_go()


@pytest.mark.usefixtures("low_bounds")
def test_observe_mode_fills_no_container(make_rig: MakeRig, tmp_path: Path) -> None:
    gate = threading.Event()
    gate.set()
    check_that_nothing_grows(make(make_rig, tmp_path, gate, mode="observe", policy="continuum"))


# -- single containers ------------------------------------------------------------------


def test_a_job_that_returns_early_leaves_no_entry_until_it_was_expected() -> None:
    expected = PrefetchQueue()
    job = JobKey("", "job")
    for turn in range(1000):
        expected.expect(job, 10_000.0 + turn, ())
        expected.forget(job)
    expected.expect(job, 1.0, ())
    assert sizes([expected])["PrefetchQueue._heap"] < 100
    assert [(job, 1.0, ())] == expected.take(until=1e9)


def test_clients_with_invented_salts_share_the_bound_of_silent_jobs() -> None:
    scopes = Scopes()
    for salt in range(1024):
        for name in range(200):
            job = JobKey(f"{salt}", f"{name}")
            scopes.add_silent(job, ActiveJob(1, 0, 1.0, 0, b"", 0.0, 0.0))
    found = sizes([scopes])
    assert found["Scopes._by_salt"] == 1024
    assert found["Scope.silent"] < 50_000, "not clients times jobs"


def test_a_long_salt_is_kept_as_its_digest(make_rig: MakeRig) -> None:
    rig = make_rig()
    salt = "x" * 100_000
    for turn in range(2):
        rig.ask(f"{turn}", text(40 + turn, seed=1), salt=salt, params={"job_id": "job"})
    (job,) = rig.gaps.manager.jobs.after(0, 10)
    assert job.turns == 2
    assert 0 < len(job.key.salt) < MAX_SALT_CHARS
    assert not +sizes([rig.gaps])["JobTable._jobs[] (characters)"]


def test_finished_jobs_do_not_queue_for_a_hung_disk(tmp_path: Path) -> None:
    gate = threading.Event()
    notebook = Notebook(tmp_path / "notes.jsonl", keep=True)
    waits = held_back(gate, notebook, "_append")
    notebook.note("first", {"turns": 1})
    assert waits.wait(300), "from here on nothing is taken from the queue"
    for number in range(3 * MOST_QUEUED):
        notebook.note(f"{number}", {"turns": 1})
        notebook.strike(f"{number}")
    queued = sizes([notebook])["Notebook._queue"]
    gate.set()
    notebook.close()
    assert MOST_QUEUED <= queued <= 2 * MOST_QUEUED
    assert notebook.lost > 0


def test_there_are_at_most_twice_as_many_tails_as_pages(make_rig: MakeRig) -> None:
    slots = 16
    rig = make_rig(extra={"cpu_gib": (slots * PAGE + 1) / (1 << 30)})
    for number in range(3 * slots):  # 20 + 12 tokens have KV, so the turn's end leaves no tail
        rig.ask(f"{number}", text(20, seed=number), max_tokens=13)
    assert rig.index.evictions > 0
    assert len(rig.pages.tails) <= 2 * slots
