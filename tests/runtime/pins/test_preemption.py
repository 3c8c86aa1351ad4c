"""Preemptions of requests whose blocks are being saved: no more requests are preempted together
than with stock vLLM, which frees a victim's blocks immediately."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.pins.pressure import SAVES_PATIENCE_S
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig


class Later:
    """A transfer backend whose copies are reported some steps late, like those of a GPU."""

    def __init__(self, backend: Any, steps: float) -> None:
        self.steps = steps
        self._backend = backend
        self._polls = 0
        self._done: deque[tuple[int, Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def poll(self) -> list[Any]:
        self._polls += 1
        self._backend.drain()
        self._done.extend((self._polls, result) for result in self._backend.poll())
        ready = []
        while self._done and self._done[0][0] + self.steps <= self._polls:
            ready.append(self._done.popleft()[1])
        return ready


def old_and_young(rig: Rig, *, young: int) -> dict[str, tuple[list[int], int]]:
    """Add old requests that decode, and take a block every 16 tokens, then young ones whose prompts
    fill the pool in one step. Returns the prompt and the answer length of each."""
    asked = {}
    for i in range(6 if young == 1 else 1):
        asked[f"old{i}"] = text(16 * 6 + 13, seed=i), 60
        rig.add(f"old{i}", *asked[f"old{i}"])
    for _ in range(2):
        rig.step()
    free = rig.pool.get_num_free_blocks()
    for i in range(young):
        blocks = free // young + (free % young if i == 0 else 0)
        asked[f"young{i}"] = text(blocks * 16 - (22 if young == 1 else 0), seed=50 + i), 6
        rig.add(f"young{i}", *asked[f"young{i}"])
    return asked


def most_preempted_at_once(rig: Rig, young: int) -> int:
    asked = old_and_young(rig, young=young)
    requests = [rig.scheduler.requests[name] for name in asked]
    most = before = 0
    while len(rig.finished) < len(asked):
        rig.step()
        now = sum(request.num_preemptions for request in requests)
        most, before = max(most, now - before), now
    rig.run()
    for name, (prompt, tokens) in asked.items():
        assert rig.outputs[name] == expected(prompt, tokens)
    rig.check_clean()
    return most


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("in_job_order", [False, True])
@pytest.mark.parametrize("young", [1, 8])
def test_no_more_requests_are_preempted_together_than_by_stock_vllm(
    make_rig: MakeRig, ahead: bool, in_job_order: bool, young: int
) -> None:
    size = {"blocks": 64, "max_model_len": 1024, "max_batched_tokens": 2048, "ahead": ahead}
    stock = most_preempted_at_once(make_rig(**size, extra=None), young)
    ours = make_rig(**size, in_job_order=in_job_order)
    ours.inject(lambda backend: Later(backend, 2))
    assert most_preempted_at_once(ours, young) == stock == 1


def test_a_request_waits_at_most_a_second_for_saves_that_never_end(make_rig: MakeRig) -> None:
    """A worker does not report its saves, so the blocks of preempted requests do not become free.
    After a second, more requests are preempted. All finish once the worker reports again."""
    rig = make_rig(blocks=64, max_model_len=1024, max_batched_tokens=2048)
    stuck = rig.inject(lambda backend: Later(backend, float("inf")))
    asked = old_and_young(rig, young=8)
    requests = [rig.scheduler.requests[name] for name in asked]

    def preempted() -> int:
        return sum(request.num_preemptions for request in requests)

    while rig.step().total_num_scheduled_tokens:  # until even the oldest request has to wait
        pass
    waited_with = preempted()
    assert waited_with <= 1, "and its blocks were being saved"
    for _ in range(10):
        assert not rig.step().total_num_scheduled_tokens
        assert preempted() == waited_with
    rig.now += SAVES_PATIENCE_S
    rig.step()
    assert preempted() > waited_with
    assert rig.count("hook_errors") == 0

    stuck.steps = 0
    rig.run()
    for name, (prompt, tokens) in asked.items():
        assert rig.outputs[name] == expected(prompt, tokens)
    rig.check_clean()
