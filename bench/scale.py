"""Costs of the connector on the scheduler's thread with many jobs, long contexts and many pages.

    python -m bench.scale --json

Runs vLLM's scheduler with the connector, without a model, and compares it with stock vLLM in the
same scenario, and with vLLM's own offloading connector where it supports the scenario
(``bench.offloader``). Times are CPU time of the scheduler's thread in milliseconds, scaled to a
reference machine (``REFERENCE_S``), so that other programs and slow machines have little influence.
Each scenario is played twice, and the smaller time counts.

A step's *excess* is the time of the connector's hooks, plus the time by which the rest of the step
exceeds the longest step of stock vLLM. Hook time includes prefix lookups that vLLM repeats because
a hook answered "ask again". Arrivals are not part of steps: ``arrival_us`` is the mean time of
``on_new_request``, ``arrival_worst_us`` the longest, and ``arrival_stock_us`` the mean time of
stock vLLM's own ``add_request``.

``stall_NAME_ms``: the largest excess of a step in a scenario; ``vllm_offloader_NAME_ms``: the same
with vLLM's offloading connector; ``finished_NAME_ms``: the longest call of the hook for a finished
turn. Contexts of 32k, 128k, 512k and 1M tokens, in blocks of 128 or (``_16``) of 16, have separate
scenarios: ``pins`` pins every finished turn; ``ssd`` and ``remote`` have CPU memory for one context
only. In each scenario, turns finish (``turns``), several jobs return together after their eviction
from VRAM (``several``), and one job returns alone (``one``). ``stall_1m_ms`` is the largest excess
with 1M tokens in blocks of 128, and so on.

``stall_ms``: the largest excess in the other scenarios. ``match_new_ratio``: the time to match a
new job with 2,000 running jobs, divided by the time with 64 running jobs. ``finished_128k_ms``: the
median time of the hook for a finished turn of 128k tokens in blocks of 16. ``rerank_1e6_ms``: the
longest call of the eviction order over a million pages, including re-ranking. ``decode_ratio`` and
its control ``decode_control``: time per scheduler step, as ``step_ratio`` of ``bench.overhead``.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, benchmark, run_benchmark
from tiered_kv.bench.overhead import CYCLE, ratios, scheduler_step
from tiered_kv.keys import PageKey
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.distribution import GRID, Forecast

FEW, MANY = 64, 2_000
PAGES = 1_000_000
PLAYS = 2
"""Number of times that each scenario is played. The smallest value of each figure counts, because
other programs can only add time."""
CONTEXTS = {"32k": 1 << 15, "128k": 1 << 17, "512k": 1 << 19, "1m": 1 << 20}
REFERENCE_S = 0.0152
"""CPU seconds of ``loop_s`` on the reference machine: the minimum of 50 runs on a virtual machine
with two cores of an AMD EPYC (Zen 5), CPython 3.11."""
BATCH_TOKENS = 32_768
TOKEN_S, ANSWER_S = 1e-4, 0.003
"""Seconds per token on the engine's clock with a lower tier, chosen so that reading pages is faster
than computing them, and the real time after each step for the thread that queries a store, seconds.
"""
PAGE_OF_MEMORY = 4096
"""Granularity to which vLLM's offloading connector rounds block sizes up, bytes."""
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "has_pending_block_frees",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
)


@cache
def _tokens() -> list[int]:
    """Return the token ids of the longest context. All contexts share these int objects, to save
    memory.
    """
    return [int(t) for t in np.random.default_rng(0).integers(1, 1000, (1 << 20) + 2_000)]


def loop_s() -> float:
    """Time a fixed loop of dictionary, list and integer work, as in hooks. Returns CPU seconds."""
    began = time.thread_time()
    seen: dict[int, int] = {}
    out: list[int] = []
    for i in range(150_000):
        key = (i * 7919) & 4095
        seen[key] = seen.get(key, 0) + 1
        if seen[key] & 1:
            out.append(key)
    assert len(out) > 1000
    return time.thread_time() - began


def prompt(tokens: int, seed: int) -> list[int]:
    """Return token ids that take little memory and share no block with the ids of other seeds."""
    return [seed % 1000, seed // 1000 % 1000, *_tokens()[: tokens - 2]]


class Kind(Enum):
    """The connector of an engine."""

    STOCK = "none"
    OURS = "tiered-kv"
    OFFLOADER = "vLLM's own offloading connector"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario, and the engine on which it runs.

    Attributes:
        name: name in the results.
        play: function that drives an engine.
        blocks: blocks of VRAM.
        longest: maximum request length, tokens.
        seqs: maximum number of running requests.
        pages: capacity of CPU memory in pages.
        block: tokens per block.
        pins: pin every finished turn, not only the turns selected by the default policy.
        tier: the tier below CPU memory, ``ssd`` or ``remote``; empty for none.
        has_peer: True to play the scenario with vLLM's offloading connector too.
        context: group of long-context scenarios that includes this one; empty for none.
    """

    name: str
    play: Callable[[Watched], None]
    blocks: int
    longest: int
    seqs: int
    pages: int
    block: int = 16
    pins: bool = False
    tier: str = ""
    has_peer: bool = True
    context: str = ""

    @property
    def kinds(self) -> Iterator[Kind]:
        """The connectors with which the scenario is played."""
        return (kind for kind in Kind if self.has_peer or kind is not Kind.OFFLOADER)


@dataclass(slots=True)
class Step:
    """CPU time of a step or an arrival in seconds: in total, and in hooks."""

    whole: float = 0.0
    hooks: float = 0.0


@dataclass(slots=True)
class Phase:
    """CPU seconds of a part of a scenario: of each step, of each arrival, and of each call by
    hook.
    """

    steps: list[Step] = field(default_factory=list)
    arrivals: list[Step] = field(default_factory=list)
    hooks: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HOOKS})


@dataclass(slots=True)
class Watched:
    """An engine without a model, whose steps are timed.

    Attributes:
        rig: the engine.
        kind: its connector.
        has_tier: True if the engine has the connector and a tier below CPU memory.
        phases: phases by name. The scenario itself is the phase with an empty name.
        now: the current phase.
    """

    rig: Any
    kind: Kind
    has_tier: bool
    now: Phase = field(default_factory=Phase)
    phases: dict[str, Phase] = field(default_factory=dict)
    _at: Step = field(default_factory=Step)
    _looked_up: float = 0.0

    def __post_init__(self) -> None:
        self.phases[""] = self.now
        if self.kind is not Kind.STOCK:
            for name in HOOKS:
                self._watch(self.rig.connector, name)
        manager = self.rig.scheduler.kv_cache_manager
        look_up = manager.get_computed_blocks

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return look_up(*args)
            finally:
                self._looked_up = time.thread_time() - began

        manager.get_computed_blocks = timed

    def _watch(self, connector: Any, name: str) -> None:
        hook = getattr(connector, name)
        asks = name == "get_num_new_matched_tokens"

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            answer = hook(*args)
            took = time.thread_time() - began
            self.now.hooks[name].append(took)
            if asks and answer[0] is None:
                took += self._looked_up
            self._at.hooks += took
            return answer

        setattr(connector, name, timed)

    def begin(self, phase: str) -> None:
        """Start a phase with this name."""
        self.now = self.phases[phase] = Phase()

    def add_all(self, jobs: Sequence[tuple[str, int, int, int]]) -> None:
        """Add requests that arrive together, given as job name, prompt tokens, seed and answer
        tokens.

        Neither the arrival nor block hashing, which vLLM does in another thread, is part of a step.
        """
        for name, tokens, seed, answer in jobs:
            params = {"job_id": name.split("/")[0], "is_last_step": False}
            words = prompt(tokens, seed)
            request = self.rig.make_request(name, words, max_tokens=answer, params=params)
            self._at = Step()
            began = time.thread_time()
            self.rig.scheduler.add_request(request)
            self._at.whole = time.thread_time() - began
            self.now.arrivals.append(self._at)

    def step(self) -> None:
        self._at = Step()
        self.rig.now += 0.02
        output = self.rig.step()
        self._at.whole = self.rig.scheduler_s
        self.now.steps.append(self._at)
        tokens = output.total_num_scheduled_tokens
        if self.has_tier:
            self.rig.now += TOKEN_S * tokens
            time.sleep(ANSWER_S)
        if self.has_tier or (self.kind is Kind.OURS and not tokens):
            # Otherwise the clock of an idle engine would overtake its threads.
            self.rig.wait_for_worker()

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            is_writing = self.has_tier and self.rig.orders_under_way
            if not (is_writing or self.rig.scheduler.has_unfinished_requests()):
                return
            self.step()
        raise RuntimeError(f"still busy after {limit} steps")

    def until_decoding(self, jobs: int) -> None:
        while len(self.rig.scheduler.running) < jobs or self.rig.scheduler.waiting:
            self.step()
        self.step()

    def until_restored(self) -> None:
        """Run 200 steps, so that all restores finish, but withhold the workers' reports. The next
        step then receives all reports together."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        worker = self.rig.worker
        reports, results = worker.build_connector_worker_meta, worker.get_transfer_results
        worker.build_connector_worker_meta = lambda: None
        worker.get_transfer_results = lambda _: KVConnectorTransferResults(set(), set())
        for _ in range(200):
            self.step()
        worker.build_connector_worker_meta, worker.get_transfer_results = reports, results

    def lose_vram(self) -> None:
        """Release all pins, and evict all cached blocks from VRAM."""
        if self.kind is Kind.OURS:
            self.rig.half.release_all()
        if self.kind is not Kind.STOCK:
            for _ in range(3):  # for the reports of the last saves
                self.rig.step()
        self.rig.pool.evict_blocks(set(range(self.rig.options.blocks)))


def excess(steps: Sequence[Step], stock: Mapping[str, Phase]) -> float:
    """Return the largest excess of any step over the longest step of stock vLLM, seconds; see the
    module docstring.
    """
    longest = max(step.whole for phase in stock.values() for step in phase.steps)
    return max(one.hooks + max(0.0, one.whole - one.hooks - longest) for one in steps)


@contextmanager
def engine(kind: Kind, scenario: Scenario) -> Iterator[Watched]:
    """Create an engine for a scenario. Python's garbage collection is off until the block ends."""
    from tiered_kv.testing.checked_kv import CELL
    from tiered_kv.testing.valkey import ValkeyServer
    from tiered_kv.testing.vllm.rig import Rig, RigOptions

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        extra: dict[str, Any] = {"cpu_gib": scenario.pages * scenario.block * CELL / 2**30}
        if not scenario.pins:
            extra["policy"] = "occupancy"
        if scenario.tier == "ssd":
            extra |= {"ssd_path": str(folder / "pages"), "ssd_gib": 8.0}
        elif scenario.tier == "remote" and kind is Kind.OURS:
            extra["remote"] = stack.enter_context(ValkeyServer(folder)).url
        offloader = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": scenario.pages * PAGE_OF_MEMORY,
                "spec_name": "UncopiedSpec",
                "spec_module_path": "tiered_kv.bench.offloader",
            },
        }
        options = RigOptions(
            blocks=scenario.blocks,
            block_size=scenario.block,
            max_model_len=scenario.longest,
            max_num_seqs=scenario.seqs,
            max_batched_tokens=BATCH_TOKENS,
            extra=None if kind is Kind.STOCK else extra,
            around=(lambda _: offloader) if kind is Kind.OFFLOADER else None,
            check_kv=False,
        )
        rig = stack.enter_context(Rig(folder, options))
        gc.collect()
        gc.disable()
        try:
            yield Watched(rig, kind, bool(scenario.tier) and kind is Kind.OURS)
        finally:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Played:
    """Measurements of one play of a scenario.

    Attributes:
        seconds: figures by name: those that start with ``stall_``, ``vllm_offloader_`` and
            ``finished_``, and the median call time of each hook, in seconds.
        arrivals: CPU time of each arrival, by engine.
    """

    seconds: dict[str, float]
    arrivals: dict[Kind, list[Step]]


def play(scenario: Scenario) -> Played:
    """Play a scenario on every engine. Returns the measurements.

    Raises:
        RuntimeError: a hook raised, the engine made no progress, or nothing was read from the lower
            tier.
    """
    phases: dict[Kind, dict[str, Phase]] = {}
    for kind in scenario.kinds:
        with engine(kind, scenario) as one:
            scenario.play(one)
            count = one.rig.count if kind is Kind.OURS else lambda _: 0
            if count("hook_errors") or count("watchdog_barks"):
                raise RuntimeError(
                    f"{scenario.name}: a hook raised, or the engine made no progress"
                )
            if one.has_tier and not count(f"prompt_tokens_{scenario.tier}"):
                raise RuntimeError(f"{scenario.name}: nothing was read from {scenario.tier}")
        phases[kind] = one.phases
    seconds: dict[str, float] = {}
    for kind, prefix in ((Kind.OURS, "stall"), (Kind.OFFLOADER, "vllm_offloader")):
        for part, phase in phases.get(kind, {}).items():
            if phase.steps:
                name = "_".join(filter(None, (prefix, scenario.name, part)))
                seconds[name] = excess(phase.steps, phases[Kind.STOCK])
    if scenario.context:
        seconds[f"finished_{scenario.name}"] = max(
            took
            for phase in phases[Kind.OURS].values()
            for took in phase.hooks["request_finished_all_groups"]
        )
    for hook, calls in phases[Kind.OURS][""].hooks.items():
        seconds[f"{hook} {scenario.name}"] = statistics.median(calls or [0.0])
    arrivals = {
        kind: [one for phase in parts.values() for one in phase.arrivals]
        for kind, parts in phases.items()
    }
    return Played(seconds, arrivals)


def least(plays: Sequence[Played]) -> Played:
    """Return the minimum of each figure over several plays, and each engine's arrivals in the play
    in which they were fastest.
    """
    first = plays[0]
    return Played(
        {name: min(one.seconds[name] for one in plays) for name in first.seconds},
        {
            kind: min((one.arrivals[kind] for one in plays), key=lambda a: sum(x.whole for x in a))
            for kind in first.arrivals
        },
    )


# -- scenarios ----------------------------------------------------------------------------


def running(jobs: int, context: int) -> Scenario:
    """Return a scenario in which jobs decode, new jobs arrive one by one, and then all jobs
    finish.
    """

    def play(one: Watched) -> None:
        one.add_all([(f"a{i}", context, i, 120 + i % 7) for i in range(jobs)])
        one.until_decoding(jobs)
        one.now.hooks["get_num_new_matched_tokens"].clear()
        for i in range(50):
            one.add_all([(f"b{i}", 256, 500_000 + i, 4)])
            one.step()
        one.run()

    blocks = (jobs + 60) * ((context + 100) // 16 + 2)
    name = f"running_{jobs}_{context >> 10}k"
    return Scenario(name, play, blocks, longest=context + 400, seqs=jobs + 60, pages=blocks)


def queued(jobs: int) -> Scenario:
    """Return a scenario in which new jobs arrive together while 64 jobs run."""

    def play(one: Watched) -> None:
        one.add_all([(f"a{i}", 4_096, i, 60) for i in range(FEW)])
        one.until_decoding(FEW)
        one.add_all([(f"b{i}", 1_024, 10_000 + i, 4) for i in range(jobs)])
        one.run()

    blocks = (jobs + FEW) * 80
    return Scenario(f"queued_{jobs}", play, blocks, longest=5_000, seqs=256, pages=blocks)


def returning(jobs: int, context: int) -> Scenario:
    """Return a scenario in which jobs with contexts in CPU memory return together, and their
    restores finish in one step.
    """
    blocks = jobs * (context // 16 + 12) + 600

    def play(one: Watched) -> None:
        one.add_all([(f"j{i}/1", context, i, 2) for i in range(jobs)])
        one.run()
        one.lose_vram()
        one.begin("")
        one.add_all([(f"j{i}/2", context + 64, i, 2) for i in range(jobs)])
        if one.kind is not Kind.STOCK:
            one.until_restored()
        one.run()

    name = f"returning_{jobs}_{context >> 10}k"
    return Scenario(name, play, blocks, longest=context + 400, seqs=jobs, pages=2 * blocks)


def turns(context: int, *, pins: bool, count: int = 6) -> Scenario:
    """Return a scenario in which turns with long contexts finish, and two of the jobs return after
    eviction from VRAM.
    """
    blocks = 2 * (context // 16) + 600

    def play(one: Watched) -> None:
        for i in range(count):
            one.add_all([(f"j{i}/1", context, i, 3)])
            one.run()
        one.lose_vram()
        one.add_all([("hog", context, 77, 300)])
        one.step()
        one.add_all([(f"j{i}/2", context + 500, i, 3) for i in range(2)])
        one.run()

    name = f"{'pinned' if pins else 'turns'}_{context >> 10}k"
    longest, pages = context + 900, count * blocks
    return Scenario(name, play, blocks, longest, 4, pages, pins=pins, has_peer=not pins)


def full(pages: int) -> Scenario:
    """Return a scenario in which jobs start and finish while CPU memory is full of pages that no
    job uses.
    """

    def play(one: Watched) -> None:
        if one.kind is Kind.OURS:
            index = one.rig.index
            keys = [PageKey(b"%064d" % i) for i in range(index.num_slots)]
            index.commit_all(keys, index.reserve_all(keys))
        for wave in range(6):
            one.add_all([(f"j{i}/{wave}", 4_096, i, 20 + i) for i in range(16)])
            one.run()
            one.rig.now += 3.0

    return Scenario(f"full_{pages}", play, 20_000, 5_000, 64, pages, has_peer=False)


def long_context(size: str, block: int, *, pins: bool = False, tier: str = "") -> Scenario:
    """Return a scenario in which turns with long contexts finish. After eviction from VRAM, two
    jobs return together and then one alone, while another job is prefilled and decodes.
    """
    context = CONTEXTS[size]
    of_one = context // block + 80

    def play(one: Watched) -> None:
        one.begin("turns")
        for i in range(3):
            one.add_all([(f"j{i}/1", context, i, 3)])
            one.run()
        one.add_all([("j2/2", context + 100, 2, 3)])
        one.run()
        one.lose_vram()
        one.begin("several")
        one.add_all([("hog/1", context, 77, 300)])
        one.step()
        one.add_all([(f"j{i}/3", context + 500, i, 3) for i in range(2)])
        one.run()
        one.lose_vram()
        one.begin("one")
        one.add_all([("hog/2", 4_096, 78, 300)])
        one.step()
        one.add_all([("j0/4", context + 600, 0, 3)])
        one.run()

    group = size if block == 128 else f"{size}_{block}"
    name = f"{group}_{tier or ('pins' if pins else 'cpu')}"
    pages = (5 * of_one // 4) if tier else 4 * of_one
    peer = not (pins or tier)
    longest = context + 900
    return Scenario(
        name, play, 3 * of_one, longest, 4, pages, block, pins, tier, peer, context=group
    )


def reranking(pages: int, context: int) -> float:
    """Return the CPU time of the longest call of an eviction order or its page index, seconds,
    while pages are evicted and gaps of jobs begin and end.

    Args:
        pages: number of pages in the index.
        context: number of pages per job.
    """
    now = 0.0
    order = ByWorth(lambda: now, 2 * pages)
    index = PageIndex(pages, order, lambda: now)
    rng = np.random.default_rng(0)
    forecasts = [Forecast(np.minimum(GRID / s, 1.0)) for s in (5.0, 60.0, 600.0)]
    longest = 0.0

    def timed(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal longest
        began = time.thread_time()
        made = call(*args)
        longest = max(longest, time.thread_time() - began)
        return made

    def job(number: int) -> list[PageKey]:
        return [PageKey(b"%064d" % (number * context + i)) for i in range(context)]

    jobs = [job(number) for number in range(pages // context)]
    for number, keys in enumerate(jobs):
        index.commit_all(keys, index.reserve_all(keys))
        order.on_gap_begun(number, keys, forecasts[number % 3], now, rng.random())
        now += 0.01
    gc.collect()
    gc.disable()
    try:
        for number in range(400):
            now += 0.05
            here = int(rng.integers(len(jobs)))
            if number % 4 == 0:
                timed(order.on_gap_ended, here)
            elif number % 4 == 1:
                timed(order.on_gap_begun, here, jobs[here], forecasts[here % 3], now, rng.random())
            keys = job(10**9 + number)[:64]
            slots = timed(index.reserve_all, keys)
            timed(index.commit_all, keys, slots)
    finally:
        gc.enable()
    return longest


def all_scenarios() -> list[Scenario]:
    """Return all scenarios, those with short contexts first."""
    many = [running(FEW, 4_096), running(MANY, 1_024), queued(MANY), returning(FEW, 32_768)]
    many += [turns(1 << 17, pins=False), turns(1 << 17, pins=True)]
    many += [full(pages) for pages in (10_000, 100_000, PAGES)]
    for block in (128, 16):
        for size in CONTEXTS:
            many += [long_context(size, block, pins=pins) for pins in (False, True)]
        for tier in ("ssd", "remote"):
            many += [long_context(size, block, tier=tier) for size in ("128k", "1m")]
    return many


def measure(
    scenarios: Sequence[Scenario], engines: int, tick: Callable[[str], None]
) -> dict[str, float | int]:
    """Measure every scenario, the eviction order, and scheduler steps of decoding requests. Returns
    the figures that the module docstring explains.

    Args:
        engines: number of engines per variant for the scheduler steps of decoding requests.
    """
    loops: list[float] = []
    seconds: dict[str, float] = {}
    arrivals: dict[Kind, list[Step]] = {kind: [] for kind in Kind}
    for scenario in scenarios:
        loops += (loop_s() for _ in range(3))
        played = least([play(scenario) for _ in range(PLAYS)])
        seconds |= played.seconds
        for kind, some in played.arrivals.items():
            arrivals[kind] += some
        for prefix in ("stall", "finished", "vllm_offloader") if scenario.context else ():
            name = f"{prefix}_{scenario.context}"
            own = [s for n, s in played.seconds.items() if n.startswith(f"{prefix}_")]
            seconds[name] = max([*own, seconds.get(name, 0.0)])
        tick(scenario.name)
    rerank = max(reranking(PAGES, 2_048), reranking(PAGES, 256))
    tick("ranking")
    steps = [scheduler_step(first, lambda _: None) for first in range(engines)]
    decode_ratio, decode_control = ratios(steps, CYCLE)
    tick("decoding")
    ms = (
        1e3 * REFERENCE_S / statistics.median(loops)
    )  # milliseconds of the reference machine per measured second
    few, many = (
        seconds[f"get_num_new_matched_tokens running_{name}"] for name in ("64_4k", "2000_1k")
    )
    ends = [seconds[f"request_finished_all_groups {name}_128k"] for name in ("turns", "pinned")]
    short = [seconds[f"stall_{scenario.name}"] for scenario in scenarios if not scenario.context]
    ours, peer = ([one.hooks for one in arrivals[kind]] for kind in (Kind.OURS, Kind.OFFLOADER))
    stock = [one.whole for one in arrivals[Kind.STOCK]]
    return {
        **{f"{name}_ms": ms * one for name, one in seconds.items() if " " not in name},
        "stall_ms": ms * max(short),
        "match_new_ratio": many / few,
        "match_new_64_ms": ms * few,
        "match_new_2000_ms": ms * many,
        "finished_128k_ms": ms * max(ends),
        "arrival_us": 1e3 * ms * statistics.fmean(ours),
        "arrival_worst_us": 1e3 * ms * max(ours),
        "arrival_stock_us": 1e3 * ms * statistics.fmean(stock),
        "arrival_stock_worst_us": 1e3 * ms * max(stock),
        "arrival_vllm_offloader_us": 1e3 * ms * statistics.fmean(peer),
        "rerank_1e6_ms": ms * rerank,
        "decode_ratio": decode_ratio,
        "decode_control": decode_control,
        "reference_s": REFERENCE_S,
        "loop_s": statistics.median(loops),
    }


def main(
    engines: Annotated[
        int, typer.Option(help="Number of engines per variant when measuring decode steps.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the connector's cost on the scheduler's thread."""
    scenarios = all_scenarios()
    with benchmark("The scheduler's thread", len(scenarios) + 2, as_json=as_json) as run:
        run.result = measure(scenarios, engines, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
