"""Every wait has a bound, and clients share the running requests and the pool equally while others
wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.runtime.admission.admitting import TOKENS, holding_rig, prefills_take
from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import store, tiers
from tests.runtime.stories.test_tiers import push_out
from tiered_kv.connectors.runtime.fairness import IDLE_STEPS, TIERS_GRACE
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.pins.release_order import PinState, PinValue
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig

LIMIT_S = 10.0
"""Value of admission_max_wait_s, in seconds."""
STEP_S = 0.05

both_orders = pytest.mark.parametrize(
    "in_job_order", [False, True], ids=["vLLM's order", "job order"]
)


def limited(make_rig: MakeRig, **options: Any) -> Rig:
    """Create a rig with the admission limit ``LIMIT_S``. Two requests may run concurrently unless
    stated otherwise."""
    extra = {"cpu_gib": 0.001, "admission": "auto", "admission_max_wait_s": LIMIT_S}
    extra |= options.pop("extra", {})
    return make_rig(**{"blocks": 64, "max_num_seqs": 2, **options}, extra=extra)


def busy_jobs(rig: Rig, jobs: int, tokens: int = 20) -> Callable[[], None]:
    """Return a function that runs one step of an engine with jobs that never end: each job gets its
    next turn as soon as its previous turn has finished."""
    contexts = {f"busy{i}": text(tokens, seed=i) for i in range(jobs)}
    turns = dict.fromkeys(contexts, 0)

    def step() -> None:
        for job, turn in turns.items():
            if not turn or f"{job}.{turn}" in rig.finished:
                turns[job] += 1
                name, params = f"{job}.{turns[job]}", {"job_id": job}
                rig.add(name, contexts[job], max_tokens=4, params=params)
        rig.step()
        rig.wait_for_worker()  # copies then take less than a step, even on a busy machine
        rig.now += STEP_S

    return step


def wait_of(rig: Rig, step: Callable[[], None], name: str = "newcomer", **how: Any) -> float:
    """Return the seconds until a new request is answered while the busy jobs run."""
    prompt = text(30, seed=99)
    rig.add(name, prompt, max_tokens=4, **how)
    began = rig.now
    while name not in rig.finished and rig.now - began < 10 * LIMIT_S:
        step()
    assert rig.outputs[name][:4] == expected(prompt, 4)
    return rig.now - began


@both_orders
@pytest.mark.parametrize(
    "how",
    [{"params": {"job_id": "newcomer"}}, {}, {"resumable": True}],
    ids=["a job", "no job", "streamed input"],
)
def test_jobs_that_never_end_keep_no_request_waiting_beyond_the_limit(
    make_rig: MakeRig, in_job_order: bool, how: dict[str, Any]
) -> None:
    rig = limited(make_rig, in_job_order=in_job_order)
    step = busy_jobs(rig, 4)
    for _ in range(60):
        step()
    rig.add("newcomer", text(30, seed=99), max_tokens=4, **how)
    began = rig.now
    while len(rig.outputs["newcomer"]) < 4 and rig.now - began < 10 * LIMIT_S:
        step()
    assert rig.outputs["newcomer"] == expected(text(30, seed=99), 4)
    assert rig.now - began < 1.2 * LIMIT_S


@both_orders
def test_pins_of_jobs_that_never_end_give_way_to_an_overdue_request(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    """VRAM is scarce, but more requests could run. In every turn, the older jobs' pins are worth
    more than a younger job's wait. The younger job is still admitted soon after the limit."""
    rig = limited(
        make_rig,
        blocks=34,
        max_num_seqs=64,
        in_job_order=in_job_order,
        extra={"policy": "occupancy"},
    )
    contexts = {f"pinned{i}": text(110, seed=i) for i in range(4)}
    back_at, live, count = dict.fromkeys(contexts, 0.0), dict[str, str](), 0

    def step() -> None:
        nonlocal count
        for job, at in list(back_at.items()):
            if at <= rig.now:
                count += 1
                live[job] = f"{job}.{count}"
                rig.add(live[job], contexts[job], max_tokens=8, params={"job_id": job})
                del back_at[job]
        rig.step()
        rig.wait_for_worker()
        rig.now += STEP_S
        for job, name in list(live.items()):
            if name in rig.finished:
                contexts[job] = (contexts[job][:100] + text(8, seed=count))[:110]
                back_at[job] = rig.now + 0.1
                del live[job]

    for _ in range(200):
        step()
    rig.add("newcomer", text(200, seed=99), max_tokens=4, params={"job_id": "newcomer"})
    began = rig.now
    while "newcomer" not in rig.finished and rig.now - began < 10 * LIMIT_S:
        step()
    assert rig.now - began < 1.2 * LIMIT_S


def test_one_job_id_for_all_of_a_clients_requests_takes_its_share_of_the_seats(
    make_rig: MakeRig,
) -> None:
    rig = limited(make_rig, in_job_order=True)
    live, count = set[str](), 0

    def step() -> None:
        nonlocal count
        while len(live) < 5:
            count += 1
            live.add(f"r{count}")
            rig.add(f"r{count}", text(30, seed=count), max_tokens=4, params={"job_id": "one"})
        rig.step()
        rig.wait_for_worker()
        rig.now += STEP_S
        live.difference_update(rig.finished)

    for _ in range(60):
        step()
    assert wait_of(rig, step, params={"job_id": "newcomer"}) < 0.1 * LIMIT_S


def test_a_higher_priority_goes_before_an_overdue_request_and_an_equal_one_does_not(
    make_rig: MakeRig,
) -> None:
    rig = limited(make_rig, max_num_seqs=1, policy="priority")
    rig.add("running", text(20, seed=1), max_tokens=40, priority=0)
    rig.step()
    rig.add("overdue", text(20, seed=2), max_tokens=2, priority=5)
    rig.now += LIMIT_S
    rig.add("equal", text(20, seed=3), max_tokens=2, priority=5)
    rig.add("higher", text(20, seed=4), max_tokens=2, priority=1)
    rig.run()
    assert list(rig.finished) == ["running", "higher", "overdue", "equal"]


def test_an_overdue_request_waits_for_a_tier_only_a_little_longer(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """The SSD hangs, and recomputing the context is expensive. Once the request is overdue, later
    arrivals are no longer admitted before it, and after a short grace period its context is
    recomputed."""
    limit_s = 5.0
    extra = {"admission": "off", "admission_max_wait_s": limit_s, **tiers(tmp_path)}
    rig = limited(make_rig, max_num_seqs=8, extra=extra)
    context = text(320, seed=1)
    rig.ask("first", context)
    push_out(rig)
    prefills_take(rig, 1e3)
    disk, get = threading.Event(), store(rig).get
    store(rig).get = lambda pages: (disk.wait(60), get(pages))[1]
    try:
        rig.add("waits", context, max_tokens=2)
        rig.step()
        rig.step()
        assert "waits" not in rig.running(), "its pages are promoted first"
        rig.add("later", text(20, seed=2), max_tokens=200)
        rig.step()
        assert "later" in rig.running()
        rig.now += limit_s
        rig.add("too late", text(20, seed=3), max_tokens=200)
        rig.step()
        assert "waits" not in rig.running()
        assert "too late" not in rig.running()
        rig.now += limit_s * TIERS_GRACE
        for _ in range(3):
            rig.step()
        assert rig.outputs["waits"] == expected(context, 2)
        assert "too late" in rig.running()
    finally:
        disk.set()
    rig.run()
    assert rig.outputs["waits"] == expected(context, 2)


def test_a_request_that_waits_for_its_grammar_keeps_no_other_waiting(make_rig: MakeRig) -> None:
    rig = limited(make_rig)
    rig.add("running", text(20, seed=1), max_tokens=100)
    rig.step()
    request = rig.add("compiles", text(20, seed=2))
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None)
    rig.now += 2 * LIMIT_S
    rig.add("later", text(20, seed=3), max_tokens=2)
    for _ in range(4):
        rig.step()
    assert "later" in rig.finished
    assert "compiles" not in rig.finished
    request.status, request.structured_output_request = RequestStatus.WAITING, None
    rig.run()


def test_a_request_that_an_idle_engine_refuses_keeps_others_waiting_for_a_while_only(
    make_rig: MakeRig,
) -> None:
    """vLLM does not admit the request, for a reason that this connector does not know. A later
    request waits behind it for ``IDLE_STEPS`` steps, and is then admitted."""
    rig = limited(make_rig)
    match = rig.half.match
    rig.half.match = lambda name, found: (None, False) if name == "never" else match(name, found)
    rig.add("never", text(20, seed=1))
    rig.now += LIMIT_S
    rig.add("later", text(20, seed=2), max_tokens=2)
    watched = rig.half.on_allocated
    rig.half.on_allocated = lambda *args: watched(*args) if args[0] != "later" else None
    for _ in range(IDLE_STEPS):
        rig.step()
    assert "later" not in rig.running()
    for _ in range(3):
        rig.step()
    assert "later" in rig.finished
    rig.abort("never")


def test_a_client_that_fills_the_pool_leaves_others_their_share(make_rig: MakeRig) -> None:
    """One client always has twelve requests, each of which needs a fifth of the pool. Another
    client's requests wait only briefly."""
    rig = limited(
        make_rig,
        blocks=64,
        max_num_seqs=64,
        in_job_order=True,
        # Without CPU memory, no save holds blocks for longer than the request does.
        extra={"admission": "off", "cpu_gib": 0.0},
    )
    live, count = set[str](), 0

    def step() -> None:
        nonlocal count
        while len(live) < 12:
            count += 1
            live.add(f"a{count}")
            prompt = text(190, seed=count)
            rig.add(f"a{count}", prompt, 8, params={"job_id": f"a{count % 12}"}, salt="a")
        rig.step()
        rig.now += STEP_S
        live.difference_update(rig.finished)

    for _ in range(40):
        step()
    waits = [
        wait_of(rig, step, name, params={"job_id": "b"}, salt="b") for name in ("b1", "b2", "b3")
    ]
    assert max(waits) < 0.1 * LIMIT_S


def test_pins_of_a_client_over_its_share_give_way_to_others(make_rig: MakeRig) -> None:
    rig = limited(
        make_rig,
        blocks=64,
        max_num_seqs=64,
        in_job_order=True,
        extra={"cpu_gib": 0.0, "pin_fraction": 1.0, "admission": "off"},
    )
    for n in range(3):
        params = {"job_id": f"a{n}"}
        rig.ask(f"a{n}", text(230, seed=n), max_tokens=4, params=params, salt="a")
        worth_every_wait = PinValue(PinState.HELD, 100.0, 100.0)
        rig.pins.revise(JobKey("a", f"a{n}"), rig.now + 3600, worth_every_wait)
    rig.add("busy", text(20, seed=8), max_tokens=100, params={"job_id": "busy"}, salt="a")
    rig.step()
    assert rig.pins.held_blocks > 40
    rig.add("own", text(400, seed=9), max_tokens=2, params={"job_id": "a9"}, salt="a")
    rig.step()
    rig.step()
    assert "own" not in rig.running(), "its client's own pins are worth its wait"
    rig.abort("own")
    rig.add("other", text(400, seed=9), max_tokens=2, params={"job_id": "b"}, salt="b")
    rig.step()
    rig.step()
    assert "other" in rig.finished or "other" in rig.running()
    assert len(rig.pins), "more pins were released than it needs"
    rig.run()


def test_new_jobs_of_a_client_that_has_many_wait_behind_those_of_others(make_rig: MakeRig) -> None:
    rig = holding_rig(make_rig, in_job_order=True)
    for n in range(12):
        params = {"job_id": f"a{n}", "is_last_step": True}
        rig.add(f"a{n}", text(TOKENS, seed=n), max_tokens=40, params=params, salt="a")
    rig.step()
    assert len(rig.held()) == 9
    for n in range(2):
        params = {"job_id": f"b{n}", "is_last_step": True}
        rig.add(f"b{n}", text(TOKENS, seed=50 + n), max_tokens=40, params=params, salt="b")
    rig.step()
    assert rig.held()[0] == "b0"
    assert rig.held().index("b1") < rig.held().index("a5")
    rig.run()
    finished = list(rig.finished)
    assert finished.index("b0") < finished.index("a4")
