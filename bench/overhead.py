"""Overhead of the connector per step when its saved pages are never used.

    python -m bench.overhead --json

``step_ratio``: time per step of vLLM's scheduler (schedule and update, without a model) with 64
decoding requests: the time with the connector, divided by the time without it. ``decode_ratio``:
the same ratio for a decode step of the real model in a real engine, with eight requests and every
filled block saved. ``step_control`` and ``decode_control`` compare two variants of stock vLLM,
measured in the same way in the same run, and show the machine's noise. ``*_net`` is the ratio
divided by its control.

The variants alternate within fractions of a second, so that other load affects all of them.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.output import AsJson, ModelFolder, Tick, run_benchmark, served_benchmark
from tiered_kv.bench.servers.engines import engine

RUNNING = 64
CYCLE = 256
"""Number of steps after which the same requests save pages again
(``connectors.runtime.pages.saves``)."""
CYCLES = 6
"""Number of cycles that each engine runs."""
DECODE_TOKENS = 96

Times = dict[str, list[float]]
"""Step times of each variant, seconds."""
CONTESTANTS: Mapping[str, dict[str, Any] | None] = {
    "stock": None,
    "control": None,
    "connector": {"cpu_gib": 0.05},
}
"""Connector settings of each variant; None is stock vLLM."""


def ratios(rounds: list[Times], period: int) -> tuple[float, float]:
    """Return the connector's time over the mean time of the two stock variants, and the larger of
    these two times over the smaller.

    Time that recurs every ``period`` samples is a cost of the connector, and time that occurs once
    is noise, so each phase of the period contributes its median. Phases and rounds are summed.
    """
    totals = {
        name: sum(
            statistics.median(times[name][phase::period])
            for times in rounds
            for phase in range(period)
        )
        for name in rounds[0]
    }
    both = totals["stock"], totals["control"]
    return totals["connector"] / statistics.fmean(both), max(both) / min(both)


def scheduler_step(
    first: int, tick: Tick, extras: Mapping[str, dict[str, Any] | None] = CONTESTANTS
) -> Times:
    """Measure the scheduler's time per step, seconds, of each variant in alternation. Prompts
    differ in length, so that their blocks fill at different steps, as on a server. The time of the
    simulated model is excluded.

    Args:
        first: index of the variant to create first. The position of an engine's objects in memory
            makes all of its steps up to 1% faster or slower.
        extras: connector settings of the three variants.

    Raises:
        RuntimeError: a request finished early.
    """
    from tiered_kv.testing.checked_kv import text
    from tiered_kv.testing.vllm.rig import Rig, RigOptions

    steps = CYCLE * CYCLES
    context = steps + 400
    names = [*extras, *extras][first % 3 :][:3]
    times: Times = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rigs: dict[str, Rig] = {}
        for name in names:
            options = RigOptions(
                blocks=RUNNING * (context // 16 + 2),
                max_model_len=context,
                max_num_seqs=RUNNING,
                max_batched_tokens=8192,
                extra=extras[name],
                check_kv=False,
            )
            rigs[name] = stack.enter_context(Rig(Path(folder) / name, options))
            for i in range(RUNNING):
                rigs[name].add(f"r{i}", text(100 + i, seed=i), max_tokens=steps + 200)
            for _ in range(20):
                rigs[name].step()
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for i in range(steps):
            for name in names[i % 3 :] + names[: i % 3]:
                rigs[name].step()
                times[name].append(rigs[name].scheduler_s)
        tick("scheduler steps")
        if any(rig.finished for rig in rigs.values()):
            raise RuntimeError("requests finished early, so fewer than planned were decoding")
    return times


def decode_step(model: Path, rounds: int, tick: Tick) -> Times:
    """Measure the seconds per decode step of each variant, in one engine whose connector is removed
    and put back. Two processes of the same stock server can differ by 17%, so all variants share
    one process.

    Raises:
        RuntimeError: too few pages were saved to measure their cost.
    """
    times: Times = {name: [] for name in CONTESTANTS}
    names = list(times)
    options = {"num_gpu_blocks_override": 400, "extra": {"cpu_gib": 1}}
    with engine(model, connector=True, **options) as running:
        for i in range(-1, rounds):
            for turn, name in enumerate(names[i % 3 :] + names[: i % 3]):
                seed = 31 * (3 * i + turn + 3)
                prompts = [[(seed + r * 17 + j) % 40_000 + 9 for j in range(8)] for r in range(8)]
                off = nullcontext() if name == "connector" else running.without_connector()
                with off:
                    began = time.perf_counter()
                    running.generate(prompts, max_tokens=DECODE_TOKENS)
                    seconds = time.perf_counter() - began
                    running.settle()
                if i >= 0:  # the first round warms up
                    times[name].append(seconds / DECODE_TOKENS)
            tick("decode rounds")
        saved = running.half.counters.totals["pages_saved"]
        if saved < rounds * 8 * (DECODE_TOKENS // 32):
            raise RuntimeError(f"only {saved} pages were saved, too few to measure their cost")
    return times


def measure(model: Path, engines: int, rounds: int, tick: Tick) -> dict[str, float | str]:
    """Measure scheduler steps and decode steps. Returns the ratios that the module docstring
    explains, and the step times of stock vLLM.

    Args:
        engines: number of engines per variant for the scheduler's step times.
        rounds: decode rounds per variant.
    """
    scheduler = [scheduler_step(first, tick) for first in range(engines)]
    step_ratio, step_control = ratios(scheduler, CYCLE)
    decode = decode_step(model, rounds, tick)
    decode_ratio, decode_control = ratios([decode], 1)
    return {
        "step_ratio": step_ratio,
        "decode_ratio": decode_ratio,
        "control_ratio": max(step_control, decode_control),
        "step_control": step_control,
        "decode_control": decode_control,
        "step_net": step_ratio / step_control,
        "decode_net": decode_ratio / decode_control,
        "step_ms": 1e3 * statistics.median(scheduler[0]["stock"]),
        "decode_ms": 1e3 * statistics.median(decode["stock"]),
        "running": RUNNING,
        "engines": engines,
        "steps": CYCLE * CYCLES,
        "rounds": rounds,
    }


def main(
    engines: Annotated[
        int, typer.Option(help="Number of engines per variant when measuring step times.")
    ] = 9,
    rounds: Annotated[int, typer.Option(help="Decode rounds per variant.")] = 15,
    model: ModelFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure steps with and without the connector."""
    title = "Time per step with the connector, relative to stock vLLM"
    with served_benchmark(title, engines + rounds + 1, model, as_json=as_json) as run:
        run.result = measure(run.model, engines, rounds, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
