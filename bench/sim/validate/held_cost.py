"""Cost of held jobs for those that run: the time of a scheduler step.

vLLM looks the prefix of every waiting request up in every step. The jobs that
``ContinuumScheduler`` parks are not in its queue; this shows what is left of them.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.testing.vllm.rig import Rig

BLOCK = 16
OWN_TOKENS = 500
"""Tokens of a held job's prompt behind what all of them share."""
RUNNING_TOKENS = 2000
STEP_S = 0.02
"""Seconds that a step stands for: held jobs are looked at again by the clock."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Subject of the measurement.

    Attributes:
        held: jobs that wait. shared_tokens: of their prompts.
        running: requests that decode meanwhile.
        steps: timed, of either engine.
        pairs: of engines. Where their objects come to lie in memory makes one a little faster
            than another for as long as it lives.
    """

    held: int = 400
    shared_tokens: int = 15_000
    running: int = 16
    steps: int = 400
    pairs: int = 4


def measure(crowd: Crowd) -> dict[str, Any]:
    """Steps with held jobs over steps with none, both with ``ContinuumScheduler``.

    The engines of a pair take their steps in turn, so that a noisy neighbour hits both.
    """
    sums = {"none": 0.0, "held": 0.0}
    for number in range(crowd.pairs):
        for name, median in _pair(crowd, held_first=number % 2 == 1).items():
            sums[name] += median
    return {
        "step_ratio": sums["held"] / sums["none"],
        "step_ms": 1e3 * sums["none"] / crowd.pairs,
        "held_step_ms": 1e3 * sums["held"] / crowd.pairs,
        "held": crowd.held,
        "shared_tokens": crowd.shared_tokens,
        "running": crowd.running,
    }


def _pair(crowd: Crowd, *, held_first: bool) -> dict[str, float]:
    """Median seconds of a step of each."""
    names = ["held", "none"] if held_first else ["none", "held"]
    times: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rigs = {name: stack.enter_context(_engine(Path(folder) / name, crowd)) for name in names}
        _hold(rigs["held"], crowd)
        for rig in rigs.values():
            rig.step()
        gc.collect()
        gc.disable()
        try:
            for step in range(crowd.steps):
                for name in names[:: 1 if step % 2 else -1]:
                    rig = rigs[name]
                    rig.now += STEP_S
                    rig.step()
                    times[name].append(rig.scheduler_s)
        finally:
            gc.enable()
        parked = {name: len(rig.held()) for name, rig in rigs.items()}
        if parked != {"held": crowd.held, "none": 0} or any(r.finished for r in rigs.values()):
            raise RuntimeError(f"{parked} jobs were held at the end: nothing was measured")
    return {name: statistics.median(samples) for name, samples in times.items()}


def _engine(folder: Path, crowd: Crowd) -> Rig:
    """Full of requests that decode; the first has what the held ones share, so that vLLM would
    find it for each."""
    from tiered_kv.testing.checked_kv import text
    from tiered_kv.testing.vllm.rig import Rig, RigOptions

    answers = crowd.steps + 100
    first = crowd.shared_tokens + answers
    tokens = first + (crowd.running - 1) * (RUNNING_TOKENS + answers)
    rig = Rig(
        folder,
        RigOptions(
            blocks=tokens // BLOCK + 2 * crowd.running,
            block_size=BLOCK,
            max_model_len=max(first, RUNNING_TOKENS + answers) + OWN_TOKENS + BLOCK,
            max_num_seqs=crowd.running + crowd.held,
            max_batched_tokens=8192,
            extra={"cpu_gib": 0.0, "policy": "occupancy"},
            check_kv=False,
            in_job_order=True,
        ),
    )
    shared = text(crowd.shared_tokens, seed=0)
    for number in range(crowd.running):
        prompt = text(RUNNING_TOKENS, seed=number) if number else shared
        rig.add(f"running-{number}", prompt, answers, params={"job_id": f"running-{number}"})
        while not _all_run(rig):
            rig.step()
    return rig


def _all_run(rig: Rig) -> bool:
    """True if every request is past its prompt."""
    return all(one.num_output_tokens for one in rig.scheduler.requests.values())


def _hold(rig: Rig, crowd: Crowd) -> None:
    from tiered_kv.testing.checked_kv import text

    shared = text(crowd.shared_tokens, seed=0)
    for number in range(crowd.held):
        prompt = shared + text(OWN_TOKENS, seed=1000 + number)
        rig.add(f"held-{number}", prompt, 8, params={"job_id": f"held-{number}"})
