"""What held jobs cost vLLM's scheduler: steps with 400 of them over steps with none.

All share a prefix of 15,000 tokens, which vLLM would look up for each of them in every step if they
stayed in its queue. Real time of the scheduler, not the virtual clock's.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.sim.engine import Ask, Engine
from bench.sim.machines import machine
from bench.sim.servers import server

HELD, SHARED, RUNNING = 400, 15_000, 16
STEPS, ROUNDS = 150, 5
BLOCK = 16


def step_ratio() -> float:
    """Median step with held jobs over that without, the median of some rounds."""
    ratios = []
    for _ in range(ROUNDS):
        with_none, with_held = _step_s(0), _step_s(HELD)
        ratios.append(with_held / with_none)
    return statistics.median(ratios)


def _step_s(held: int) -> float:
    base = machine("h100-80", "llama-3.1-8b")
    # Room for those that run, and for none that comes after them.
    pool = (SHARED + RUNNING * 1_200) // BLOCK
    place = replace(base, pool_tokens=pool * BLOCK)
    with tempfile.TemporaryDirectory(prefix="held-") as folder:
        engine = Engine(
            place,
            server("occupancy"),
            Path(folder),
            pool_blocks=pool,
            block=BLOCK,
            max_len=SHARED + 4_096,
            cpu_bytes=0,
            ssd_bytes=0,
        )
        try:
            shared = [b"shared".ljust(16, b"-") + i.to_bytes(16, "big") for i in range(2_000)]
            for number in range(RUNNING):
                engine.add(_ask(f"running-{number}", shared, 1_000))
            while len(engine.scheduler.running) < RUNNING:
                engine.step(math.inf)
            for number in range(held):
                engine.add(_ask(f"held-{number}", shared, 50))
            engine.step(math.inf)
            if engine.scheduler.get_request_counts() != (RUNNING, held):
                raise AssertionError("the jobs that were to be held are not")
            times = []
            for _ in range(STEPS):
                began = time.perf_counter()
                output = engine.scheduler.schedule()
                times.append(time.perf_counter() - began)
                engine.execute(output, engine.now)  # no leap
            return statistics.median(times)
        finally:
            engine.scheduler.finish_requests(None, _aborted())
            engine.close()


def _ask(name: str, shared: list[bytes], output: int) -> Ask:
    prefix = shared[: SHARED // BLOCK]
    own = [name.encode().ljust(16, b"-") + i.to_bytes(16, "big") for i in range(200)]
    params = {"job_id": name}
    return Ask(name, prefix + own, [7] * (SHARED + 64), output, params, 0)


def _aborted() -> object:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
