"""Costs of the connector on the scheduler's thread with many jobs, long contexts and many pages.

    python -m bench.scale --json

vLLM's scheduler with the connector, without a model, beside stock vLLM in the same scenario. Times
are CPU time of that thread in milliseconds of a reference machine (``REFERENCE_S``): other programs
do not lengthen them, and a slow machine hardly does.

A step's *excess* is the time of our hooks, including vLLM's prefix look-ups that it has to repeat
because a hook answered "ask again", plus the time by which the rest of it is longer than the
longest step of stock vLLM.

``match_new_ratio``: a new job's match with 2,000 jobs running over that with 64. ``stall_ms``: the
largest excess of a step in any scenario. ``finished_128k_ms``: the end of a turn of 128k tokens.
``rerank_1e6_ms``: the longest call of the eviction order over a million pages, including what it
ranks again. ``decode_ratio``: see ``bench.overhead``, with its control ``decode_control``.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
REFERENCE_S = 0.0152
"""CPU seconds that ``loop_s`` takes on the reference machine: the least of 50 runs on a virtual
machine with two cores of an AMD EPYC (Zen 5), CPython 3.11."""
BLOCK = 16
BATCH_TOKENS = 32_768
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "has_pending_block_frees",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
)

_TOKENS = [int(t) for t in np.random.default_rng(0).integers(1, 1000, 140_000)]


def loop_s() -> float:
    """CPU seconds of a fixed loop: dictionary, list and integer work, as in hooks."""
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


class Speed:
    """Speed of this machine at present: sampled with every scenario, so that the effect of other
    load on its caches and clock counts for both."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def sample(self) -> None:
        self.seen += (loop_s() for _ in range(3))

    @property
    def scale(self) -> float:
        """Milliseconds of the reference machine in a second of this one."""
        return 1e3 * REFERENCE_S / statistics.median(self.seen)


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that share no block with those of another seed, and little memory."""
    return [seed % 1000, seed // 1000 % 1000, *_TOKENS[: tokens - 2]]


@dataclass(slots=True)
class Step:
    """CPU seconds of a step: all of it, and the part of our hooks."""

    whole: float = 0.0
    ours: float = 0.0


@dataclass(slots=True)
class Watched:
    """An engine without a model, whose steps are timed.

    Attributes:
        is_ours: True with the connector.
        hooks: CPU seconds of each call, by hook.
    """

    rig: Any
    is_ours: bool
    steps: list[Step] = field(default_factory=list)
    hooks: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HOOKS})
    _at: Step = field(default_factory=Step)
    _looked_up: float = 0.0

    def __post_init__(self) -> None:
        if self.is_ours:
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
        hook, seen = getattr(connector, name), self.hooks[name]
        asks = name == "get_num_new_matched_tokens"

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            answer = hook(*args)
            took = time.thread_time() - began
            seen.append(took)
            if asks and answer[0] is None:
                took += self._looked_up
            self._at.ours += took
            return answer

        setattr(connector, name, timed)

    def add_all(self, jobs: Sequence[tuple[str, int, int, int]]) -> None:
        """Add requests that arrive together: name, prompt tokens, seed and answered tokens of
        each. That is no part of a step."""
        for name, tokens, seed, answer in jobs:
            params = {"job_id": name.split("/")[0], "is_last_step": False}
            self.rig.add(name, prompt(tokens, seed), max_tokens=answer, params=params)

    def step(self) -> None:
        self._at = Step()
        self.rig.now += 0.02
        self.rig.step()
        self._at.whole = self.rig.scheduler_s
        self.steps.append(self._at)

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.rig.scheduler.has_unfinished_requests():
                return
            self.step()
        raise RuntimeError(f"still busy after {limit} steps")

    def until_decoding(self, jobs: int) -> None:
        while len(self.rig.scheduler.running) < jobs or self.rig.scheduler.waiting:
            self.step()
        self.step()

    def until_restored(self) -> None:
        """Step until all restores have finished, while the workers report none."""
        worker = self.rig.worker
        reports, results = worker.build_connector_worker_meta, worker.get_transfer_results
        nothing = results(set())
        worker.build_connector_worker_meta = lambda: None
        worker.get_transfer_results = lambda _: nothing
        for _ in range(200):
            self.step()
        worker.build_connector_worker_meta, worker.get_transfer_results = reports, results

    def release(self) -> None:
        """Release all pins."""
        if self.is_ours:
            self.rig.half.release_all()
            self.rig.step()


def excess(
    play: Callable[[Watched], None], size: Mapping[str, int], *, pins: bool = False
) -> float:
    """Play a scenario on stock vLLM and with the connector; the largest excess of a step, seconds.

    Args:
        size: see ``engine``.
        pins: pin every turn that ends, instead of those that the default policy pins.
    """
    steps = dict[bool, list[Step]]()
    for is_ours in (False, True):
        with engine(is_ours, pins, **size) as one:
            play(one)
        steps[is_ours] = one.steps
    longest = max(step.whole for step in steps[False])
    return max(step.ours + max(0.0, step.whole - step.ours - longest) for step in steps[True])


@contextmanager
def engine(
    is_ours: bool, pins: bool, *, blocks: int, longest: int, seqs: int, pages: int
) -> Iterator[Watched]:
    """An engine of ``blocks`` blocks, with prompts of ``longest`` tokens, ``seqs`` requests at a
    time and CPU memory for ``pages`` pages."""
    from tiered_kv.testing.checked_kv import CELL
    from tiered_kv.testing.vllm.rig import Rig, RigOptions

    policy = {} if pins else {"policy": "occupancy"}
    options = RigOptions(
        blocks=blocks,
        block_size=BLOCK,
        max_model_len=longest,
        max_num_seqs=seqs,
        max_batched_tokens=BATCH_TOKENS,
        extra={"cpu_gib": pages * BLOCK * CELL / 2**30, **policy} if is_ours else None,
        check_kv=False,
    )
    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder), options) as rig:
        gc.collect()
        gc.disable()
        try:
            yield Watched(rig, is_ours)
        finally:
            gc.enable()


# -- scenarios ----------------------------------------------------------------------------


def running(jobs: int, context: int) -> tuple[float, float]:
    """Time steps while jobs decode, new ones arrive one by one, and then all finish.

    Returns:
        The largest excess of a step, and the median of a new job's match, in seconds.
    """
    matches = list[float]()

    def play(one: Watched) -> None:
        one.add_all([(f"a{i}", context, i, 120 + i % 7) for i in range(jobs)])
        one.until_decoding(jobs)
        one.hooks["get_num_new_matched_tokens"].clear()
        for i in range(50):
            one.add_all([(f"b{i}", 256, 500_000 + i, 4)])
            one.step()
        matches[:] = one.hooks["get_num_new_matched_tokens"]
        one.run()

    blocks = (jobs + 60) * ((context + 100) // BLOCK + 2)
    size = {"blocks": blocks, "longest": context + 400, "seqs": jobs + 60, "pages": blocks}
    return excess(play, size), statistics.median(matches)


def queued(jobs: int) -> float:
    """Largest excess when new jobs arrive together while 64 run."""

    def play(one: Watched) -> None:
        one.add_all([(f"a{i}", 4_096, i, 60) for i in range(FEW)])
        one.until_decoding(FEW)
        one.add_all([(f"b{i}", 1_024, 10_000 + i, 4) for i in range(jobs)])
        one.run()

    blocks = (jobs + FEW) * 80
    return excess(play, {"blocks": blocks, "longest": 5_000, "seqs": 256, "pages": blocks})


def returning(jobs: int, context: int) -> float:
    """Largest excess when jobs return together to contexts in CPU memory: their restores end in one
    step."""
    blocks = jobs * (context // BLOCK + 12) + 600

    def play(one: Watched) -> None:
        one.add_all([(f"j{i}/1", context, i, 2) for i in range(jobs)])
        one.run()
        one.release()
        one.rig.pool.evict_blocks(set(range(blocks)))
        one.steps.clear()
        one.add_all([(f"j{i}/2", context + 64, i, 2) for i in range(jobs)])
        if one.is_ours:
            one.until_restored()
        one.run()

    size = {"blocks": blocks, "longest": context + 400, "seqs": jobs, "pages": 2 * blocks}
    return excess(play, size)


def long_turns(context: int, *, pins: bool, count: int = 6) -> tuple[float, float]:
    """Turns of long contexts finish, and jobs continue after VRAM has lost them.

    Returns:
        The largest excess of a step, and the median of a turn's end, in seconds.
    """
    ends = list[float]()
    blocks = 2 * (context // BLOCK) + 600

    def play(one: Watched) -> None:
        for i in range(count):
            one.add_all([(f"j{i}/1", context, i, 3)])
            one.run()
        ends[:] = one.hooks["request_finished_all_groups"]
        one.release()
        one.rig.pool.evict_blocks(set(range(blocks)))
        one.add_all([("hog", context, 77, 300)])
        one.step()
        one.add_all([(f"j{i}/2", context + 500, i, 3) for i in range(2)])
        one.run()

    size = {"blocks": blocks, "longest": context + 900, "seqs": 4, "pages": count * blocks}
    return excess(play, size, pins=pins), statistics.median(ends)


def full(pages: int) -> float:
    """Largest excess when jobs come and go while CPU memory is full of pages that nothing will
    use."""

    def play(one: Watched) -> None:
        if one.is_ours:
            index = one.rig.index
            keys = [PageKey(b"%064d" % i) for i in range(index.num_slots)]
            index.commit_all(keys, index.reserve_all(keys))
        for wave in range(6):
            one.add_all([(f"j{i}/{wave}", 4_096, i, 20 + i) for i in range(16)])
            one.run()
            one.rig.now += 3.0

    return excess(play, {"blocks": 20_000, "longest": 5_000, "seqs": 64, "pages": pages})


def reranking(pages: int, context: int) -> float:
    """The longest call of an eviction order while pages are evicted, jobs come, and go."""
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


def measure(engines: int, tick: Callable[[str], None]) -> dict[str, float | int]:
    """Every scenario."""
    speed = Speed()
    stalls: dict[str, float] = {}

    def done(what: str) -> None:
        speed.sample()
        tick(what)

    done("speed")
    stalls["running_64_4k"], few = running(FEW, 4_096)
    done("64 jobs")
    stalls["running_2000_1k"], many = running(MANY, 1_024)
    done("2,000 jobs")
    stalls["queued_2000"] = queued(MANY)
    done("2,000 queued")
    stalls["returning_64_32k"] = returning(FEW, 32_768)
    done("64 restores")
    stalls["turns_128k"], finished = long_turns(131_072, pins=False)
    stalls["pinned_128k"], pinned = long_turns(131_072, pins=True)
    done("contexts of 128k")
    for pages in (10_000, 100_000, PAGES):
        stalls[f"full_{pages}"] = full(pages)
        done(f"{pages} pages")
    rerank = max(reranking(PAGES, 2_048), reranking(PAGES, 256))
    done("ranking")
    steps = [scheduler_step(first, lambda _: None) for first in range(engines)]
    decode_ratio, decode_control = ratios(steps, CYCLE)
    done("decoding")
    ms = speed.scale
    return {
        "match_new_ratio": many / few,
        "stall_ms": ms * max(stalls.values()),
        "finished_128k_ms": ms * max(finished, pinned),
        "rerank_1e6_ms": ms * rerank,
        "decode_ratio": decode_ratio,
        "decode_control": decode_control,
        "match_new_64_ms": ms * few,
        "match_new_2000_ms": ms * many,
        **{f"stall_{name}_ms": ms * seconds for name, seconds in stalls.items()},
        "reference_s": REFERENCE_S,
        "loop_s": statistics.median(speed.seen),
    }


def main(
    engines: Annotated[int, typer.Option(help="Engines of each kind, for decoding.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the scheduler's thread."""
    with benchmark("The scheduler's thread", 11, as_json=as_json) as run:
        run.result = measure(engines, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
