"""A request that vLLM refuses leaves its job between turns: the gap continues, no turn is counted,
and the pin stays.

vLLM refuses requests in two places: the server rejects a request, and since 0.33 a paused engine
refuses it. In both cases the request passes through the scheduler, so that connectors can free what
they hold for it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCoreProc

from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import JobKey
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig

PROMPT = text(200, seed=1)
JOB = {"job_id": "job"}
KEY = JobKey("", "job")
paused_engine_refuses = pytest.mark.skipif(
    not hasattr(EngineCoreProc, "_reject_add_while_paused"), reason="since vLLM 0.33"
)


class Idle:
    """Workers that have no work in progress."""

    def collective_rpc(self, method: str) -> None:
        assert method == "synchronize_device"


class Core(EngineCoreProc):
    """vLLM's engine core around a rig's scheduler, without a process, sockets and workers."""

    def __init__(self, rig: Rig) -> None:
        self.scheduler = rig.scheduler
        self.output_queue: Any = queue.Queue()
        self.reject_new_requests = False
        self.engines_running, self.batch_queue = False, None
        self.model_executor = Idle()

    def __del__(self) -> None:
        pass

    def receive(self, request: Any) -> None:
        """Handle an arriving request, as the engine core's busy loop does."""
        if not self._reject_add_while_paused(request):
            self.add_request(request)


def away(rig: Rig) -> Any:
    """Return the state of the job between its turns."""
    job, gap = rig.gaps.manager.jobs.get(KEY), rig.gaps.manager.open[KEY]
    assert job is not None
    return rig.pins.look(KEY), gap.since, job.turns, set(job.running), job.started_at


def rejected(rig: Rig, name: str) -> None:
    """Have the server reject a request, as ``AsyncLLM.notify_kv_transfer_request_rejected``
    does."""
    request = rig.make_request(name, [0], 1, params={**JOB, "do_remote_prefill": True})
    request.abort_immediately = True
    Core(rig).add_request(request)


def refused(rig: Rig, name: str) -> None:
    """Have a paused engine refuse a request, which the client may send again later."""
    rig.run()  # a pause is complete when no request is in progress
    core = Core(rig)
    assert core.pause_generation("abort", clear_cache=False) is None
    core.receive(rig.make_request(name, PROMPT, params=JOB))
    core.resume_scheduler()
    _, said = core.output_queue.get_nowait()
    assert said.outputs[0].finish_reason is FinishReason.ERROR
    assert said.outputs[0].error.retryable


@pytest.mark.parametrize("in_job_order", [False, True])
@pytest.mark.parametrize(
    "refuse",
    [rejected, pytest.param(refused, marks=paused_engine_refuses)],
    ids=["server", "pause"],
)
def test_a_refused_request_leaves_its_job_as_it_was(
    make_rig: MakeRig, refuse: Callable[[Rig, str], None], in_job_order: bool
) -> None:
    rig = make_rig(blocks=64, in_job_order=in_job_order)
    rig.ask("t1", PROMPT, params=JOB)
    before = away(rig)
    assert before[0] is not None
    rig.now += 1.0
    for n in range(3):
        refuse(rig, f"again-{n}")
    assert away(rig) == before
    assert rig.turns.running == 0
    rig.fill()
    assert away(rig) == before

    assert rig.ask("t2", PROMPT + text(40, seed=2), params=JOB) == expected(
        PROMPT + text(40, seed=2), 4
    )
    assert rig.count("prompt_tokens_vram") == 192
    job = rig.gaps.manager.jobs.get(KEY)
    assert job is not None
    assert job.turns == 2
    rig.half.release_all()
    rig.check_clean()


@pytest.mark.parametrize("last", [False, True])
def test_refused_requests_of_a_running_or_unknown_job_change_nothing(
    make_rig: MakeRig, last: bool
) -> None:
    rig = make_rig(blocks=64)
    rig.add("t1", PROMPT, max_tokens=20, params=JOB)
    rig.step()
    for n, job in enumerate(("job", "other")):
        request = rig.make_request(f"r{n}", PROMPT, params={"job_id": job, "is_last_step": last})
        request.abort_immediately = True
        Core(rig).add_request(request)
    rig.run()
    assert rig.outputs["t1"] == expected(PROMPT, 20)
    assert rig.gaps.manager.jobs.get(JobKey("", "other")) is None
    assert away(rig)[2] == 1
    rig.half.release_all()
    rig.check_clean()
