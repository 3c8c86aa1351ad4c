"""Costs of the connector on the scheduler's thread as jobs, contexts and pages get many.

    python -m bench.scale --json

vLLM's scheduler with the connector, without a model, beside stock vLLM in the same scenario. Times
are CPU time of that thread in milliseconds of a reference machine (``REFERENCE_S``): other
programs make them no longer, and a slow machine not much.

A step's *excess* is what our hooks take of it, vLLM's look-ups of prefixes that it has to repeat
because a hook said "ask again" included; and by how much the rest of it is longer than the longest
step of stock vLLM.

``match_new_ratio``: a new job's match with 2,000 jobs running over that with 64. ``stall_ms``: the
largest excess of a step in any scenario. ``finished_128k_ms``: the end of a turn of 128k tokens.
``rerank_1e6_ms``: the longest call of the eviction order over a million pages, whatever it ranks
anew. ``decode_ratio``: see ``bench.overhead``, with ``decode_control`` beside it.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.micro.timed_engine import BLOCK, REFERENCE_S, Speed, Watched, engine
from tiered_kv.bench.output import (
    AsJson,
    only_result_on_stdout,
    progress,
    run_benchmark,
    show,
)
from tiered_kv.bench.overhead import CYCLE, ratios, scheduler_step
from tiered_kv.keys import PageKey
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.distribution import GRID, Forecast

FEW, MANY = 64, 2_000
PAGES = 1_000_000
Tick = Callable[[str], None]


def excess(ours: Watched, stock: Watched) -> float:
    """The largest of any step, in seconds."""
    longest = max(step.whole for step in stock.steps)
    return max(one.ours + max(0.0, one.whole - one.ours - longest) for one in ours.steps)


def fill(watched: Watched, pages: int) -> None:
    """Pages that nobody waits for take all of CPU memory."""
    index = watched.rig.index
    keys = [PageKey(b"%064d" % i) for i in range(pages)]
    index.commit_all(keys, index.reserve_all(keys))


# -- scenarios ----------------------------------------------------------------------------


def running(jobs: int, context: int) -> tuple[float, float]:
    """Time steps while jobs decode, new ones come one by one, and then all end.

    Returns:
        Seconds of a new job's match, the median; and the largest excess of a step.
    """
    both: list[Watched] = []
    matches = 0.0
    blocks = (jobs + 60) * ((context + 100) // BLOCK + 2)
    for is_ours in (False, True):
        size = {"blocks": blocks, "longest": context + 400, "seqs": jobs + 60, "pages": blocks}
        with engine(ours=is_ours, pins=False, **size) as one:
            one.add_all([(f"a{i}", context, i, 120 + i % 7) for i in range(jobs)])
            one.until_decoding(jobs)
            one.hooks["get_num_new_matched_tokens"].clear()
            for i in range(50):
                one.add_all([(f"b{i}", 256, 500_000 + i, 4)])
                one.step()
            if is_ours:
                matches = statistics.median(one.hooks["get_num_new_matched_tokens"])
            one.run()
            both.append(one)
    return matches, excess(both[1], both[0])


def queued(jobs: int) -> float:
    """Largest excess when new jobs arrive at once beside 64 that run."""
    both = []
    for is_ours in (False, True):
        blocks = (jobs + FEW) * 80
        with engine(
            ours=is_ours, pins=False, blocks=blocks, longest=5_000, seqs=256, pages=blocks
        ) as one:
            one.add_all([(f"a{i}", 4_096, i, 60) for i in range(FEW)])
            one.until_decoding(FEW)
            one.add_all([(f"b{i}", 1_024, 10_000 + i, 4) for i in range(jobs)])
            one.run()
            both.append(one)
    return excess(both[1], both[0])


def returning(jobs: int, context: int) -> float:
    """Time the return of jobs, all at once, to contexts in CPU memory: their restores end in one
    step; the largest excess."""
    both = []
    blocks = jobs * (context // BLOCK + 12) + 600
    for is_ours in (False, True):
        size = {"blocks": blocks, "longest": context + 400, "seqs": jobs, "pages": 2 * blocks}
        with engine(ours=is_ours, pins=False, **size) as one:
            for i in range(jobs):
                one.add(f"j{i}/1", context, i, 2)
            one.run()
            rig = one.rig
            if is_ours:
                rig.half.release_all()
                rig.step()
            rig.pool.evict_blocks(set(range(blocks)))
            one.clear()
            one.add_all([(f"j{i}/2", context + 64, i, 2) for i in range(jobs)])
            if is_ours:
                one.until_restores_are_there()
            one.run()
            both.append(one)
    return excess(both[1], both[0])


def long_turns(context: int, *, pins: bool, count: int = 6) -> tuple[float, float]:
    """Turns of long contexts end, and go on after VRAM has lost them.

    Returns:
        Seconds of a turn's end, the median; and the largest excess of a step.
    """
    both: list[Watched] = []
    end = 0.0
    blocks = 2 * (context // BLOCK) + 600
    for is_ours in (False, True):
        size = {"blocks": blocks, "longest": context + 900, "seqs": 4, "pages": count * blocks}
        with engine(ours=is_ours, pins=pins, **size) as one:
            for i in range(count):
                one.add_all([(f"j{i}/1", context, i, 3)])
                one.run()
            if is_ours:
                end = statistics.median(one.hooks["request_finished_all_groups"])
                one.rig.half.release_all()
                one.rig.step()
            one.rig.pool.evict_blocks(set(range(blocks)))
            one.add_all([("hog", context, 77, 300)])
            one.step()
            one.add_all([(f"j{i}/2", context + 500, i, 3) for i in range(2)])
            one.run()
            both.append(one)
    return end, excess(both[1], both[0])


def full(pages: int) -> float:
    """Jobs come and go beside CPU memory that is full; the largest excess of a step."""
    both = []
    for is_ours in (False, True):
        with engine(
            ours=is_ours, pins=False, blocks=20_000, longest=5_000, seqs=64, pages=pages
        ) as one:
            if is_ours:
                fill(one, one.rig.index.num_slots)
            for wave in range(6):
                one.add_all([(f"j{i}/{wave}", 4_096, i, 20 + i) for i in range(16)])
                one.run()
                one.rig.now += 3.0
            both.append(one)
    return excess(both[1], both[0])


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


def measure(engines: int, tick: Tick) -> dict[str, float | int]:
    """Every scenario."""
    speed = Speed()
    stalls: dict[str, float] = {}

    def done(what: str) -> None:
        speed.look()
        tick(what)

    done("speed")
    few, stalls["running_64_4k"] = running(FEW, 4_096)
    done("64 jobs")
    many, stalls["running_2000_1k"] = running(MANY, 1_024)
    done("2,000 jobs")
    stalls["queued_2000"] = queued(MANY)
    done("2,000 queued")
    stalls["returning_64_32k"] = returning(FEW, 32_768)
    done("64 restores")
    finished, stalls["turns_128k"] = long_turns(131_072, pins=False)
    pinned, stalls["pinned_128k"] = long_turns(131_072, pins=True)
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
    with only_result_on_stdout(), progress() as bar:
        bar.disable = as_json or not sys.stderr.isatty()
        task = bar.add_task("", total=11)
        result = measure(engines, lambda what: bar.update(task, advance=1, description=what))
    show("The scheduler's thread", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
