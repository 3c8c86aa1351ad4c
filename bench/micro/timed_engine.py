"""An engine whose steps are timed, without a model, and this machine's speed beside it."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

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
    """Speed of this machine at present: looked at beside every scenario, so that what a
    neighbour does to its caches and clock counts for both."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def look(self) -> None:
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
    """CPU seconds of a step: all of it, and what of it is ours."""

    whole: float = 0.0
    ours: float = 0.0


@dataclass(slots=True)
class Watched:
    """An engine whose steps are timed.

    Attributes:
        hooks: CPU seconds of each call, by hook.
    """

    rig: Any
    steps: list[Step] = field(default_factory=list)
    hooks: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HOOKS})
    _at: Step = field(default_factory=Step)
    _looked_up: float = 0.0

    def __post_init__(self) -> None:
        connector = self.rig.connector
        if connector is not None:
            for name in HOOKS:
                self._watch(connector, name)
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

    def add(self, name: str, tokens: int, seed: int, say: int, *, last: bool = False) -> None:
        params = {"job_id": name.split("/")[0], "is_last_step": last}
        self.rig.add(name, prompt(tokens, seed), max_tokens=say, params=params)

    def add_all(self, jobs: Sequence[tuple[str, int, int, int]]) -> None:
        """Requests that arrive together; that is no part of a step."""
        for job in jobs:
            self.add(*job)

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

    def until_restores_are_there(self) -> None:
        """The workers say nothing of them meanwhile."""
        worker = self.rig.worker
        reports, results = worker.build_connector_worker_meta, worker.get_transfer_results
        nothing = results(set())
        worker.build_connector_worker_meta = lambda: None
        worker.get_transfer_results = lambda _: nothing
        for _ in range(200):
            self.step()
        worker.build_connector_worker_meta, worker.get_transfer_results = reports, results

    def clear(self) -> None:
        self.steps.clear()
        for seen in self.hooks.values():
            seen.clear()


@contextmanager
def engine(
    *, ours: bool, pins: bool, blocks: int, longest: int, seqs: int, pages: int
) -> Iterator[Watched]:
    """An engine of that size, with memory for so many pages of ours; ``pins``: every turn that ends
    is pinned, instead of those that the default policy would pin."""
    from tiered_kv.testing.checked_kv import CELL
    from tiered_kv.testing.vllm.rig import Rig, RigOptions

    policy = {} if pins else {"policy": "occupancy"}
    extra = {"cpu_gib": pages * BLOCK * CELL / 2**30, **policy} if ours else None
    options = RigOptions(
        blocks=blocks,
        block_size=BLOCK,
        max_model_len=longest,
        max_num_seqs=seqs,
        max_batched_tokens=BATCH_TOKENS,
        extra=extra,
        check_kv=False,
    )
    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder), options) as rig:
        gc.collect()
        gc.disable()
        try:
            yield Watched(rig)
        finally:
            gc.enable()
