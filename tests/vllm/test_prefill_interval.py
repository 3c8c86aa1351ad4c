"""``--prefill-schedule-interval N`` (with one engine, since vLLM 0.33): after a step with a
prefill, the next N - 1 steps only decode. Requests then wait although blocks and request slots are
free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.random_scripts import play_each
from tests.runtime.conftest import MakeRig
from tests.runtime.groups.kinds import FULL, STATE, WINDOW
from tests.runtime.test_random_scripts import play_script
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.vllm_versions import parse_version

pytestmark = pytest.mark.skipif(
    (parse_version(vllm.__version__) or (0, 33)) < (0, 33), reason="since vLLM 0.33"
)
INTERVAL = 6
PROMPT = text(200, seed=1)
MORE = PROMPT + text(40, seed=2)
JOB = {"job_id": "job"}
in_job_order = pytest.mark.parametrize("in_job_order", [False, True])


def hold(config: Any) -> None:
    config.scheduler_config.prefill_schedule_interval = INTERVAL


def decode(rig: Rig, max_tokens: int = 100) -> None:
    """Run a request until it decodes. Its prefill starts an interval."""
    rig.add("busy", text(60, seed=9), max_tokens=max_tokens)
    rig.step()
    assert rig.running() == ["busy"]


def steps_until(rig: Rig, request_id: str) -> int:
    """Run steps until a request runs. Returns the number of steps in which it did not run."""
    for waited in range(3 * INTERVAL):
        rig.step()
        if request_id in rig.running():
            return waited
    raise AssertionError(f"{request_id} still waits")


@in_job_order
def test_a_turn_that_waits_for_a_prefill_step_releases_no_pin(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    rig = make_rig(blocks=96, max_model_len=512, in_job_order=in_job_order, configure=hold)
    rig.ask("t1", PROMPT, params=JOB)
    rig.ask("other", text(300, seed=3), params={"job_id": "other"})
    decode(rig)
    rig.add("t2", MORE, params=JOB)
    assert steps_until(rig, "t2") == INTERVAL - 1
    assert JobKey("", "other") in rig.pins
    rig.run()
    assert rig.count("prompt_tokens_vram") == 192
    assert rig.outputs["t2"] == expected(MORE, 4)
    assert rig.count("pins_ended_pressure") == 0
    rig.half.release_all()
    rig.check_clean()


@in_job_order
@pytest.mark.parametrize("mode", RestoreMode)
def test_a_turn_waits_with_its_restore_and_takes_no_pin(
    make_rig: MakeRig, mode: RestoreMode, in_job_order: bool
) -> None:
    """An async restore runs during the steps of the interval. A sync restore is offered again in
    each step. In both cases, no pin is released."""
    rig = make_rig(blocks=96, max_model_len=512, in_job_order=in_job_order, configure=hold)
    rig.pages.restores.policy = AlwaysRestore(mode)
    rig.ask("t1", PROMPT)
    rig.fill()
    rig.ask("other", text(300, seed=3), params={"job_id": "other"})
    decode(rig)
    rig.add("t2", MORE)
    rig.step()
    rig.wait_for_worker()
    assert steps_until(rig, "t2") == INTERVAL - 2
    assert JobKey("", "other") in rig.pins
    rig.run()
    assert rig.count("prompt_tokens_cpu") >= 192
    assert rig.outputs["t2"] == expected(MORE, 4)
    assert rig.outputs["busy"] == expected(text(60, seed=9), 100)
    rig.half.release_all()
    rig.check_clean()


def test_a_prompt_that_is_restored_completely_does_not_wait(make_rig: MakeRig) -> None:
    """If all but the last token of a prompt is restored, the request runs in the next step, because
    only one token is computed, as in a decode step."""
    rig = make_rig(blocks=96, max_model_len=512, configure=hold)
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    rig.ask("t1", PROMPT, max_tokens=1)
    rig.fill()
    decode(rig)
    rig.add("again", PROMPT)
    assert steps_until(rig, "again") == 0
    rig.run()
    assert rig.outputs["again"] == expected(PROMPT, 4)
    rig.check_clean()


@in_job_order
def test_an_overdue_request_that_waits_for_a_prefill_step_runs_first(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    """While an overdue request waits for a step with prefills, later requests wait for it. It is
    the first of them to run."""
    rig = make_rig(
        blocks=96,
        max_model_len=512,
        max_batched_tokens=256,
        in_job_order=in_job_order,
        configure=hold,
        extra={"cpu_gib": 0.001, "admission_max_wait_s": 2},
    )
    decode(rig)
    rig.add("early", MORE)
    rig.step()
    rig.now += 3.0
    rig.add("late", text(30, seed=4))
    rig.add("later", text(250, seed=5))
    first = list[str]()
    while len(first) < 3:
        rig.step()
        first += [one for one in rig.running() if one not in (*first, "busy")]
    assert first[0] == "early"
    rig.run()
    for name, prompt in ("early", MORE), ("late", text(30, seed=4)), ("later", text(250, seed=5)):
        assert rig.outputs[name] == expected(prompt, 4)
    rig.check_clean()


def test_the_steps_that_a_prefill_waits_count_as_its_time(make_rig: MakeRig) -> None:
    """A prefill is timed including the steps in which it waits for the interval. Recomputing a
    context would wait for the same steps."""
    rig = make_rig(blocks=96, max_model_len=512, max_batched_tokens=256, configure=hold)
    decode(rig)
    rig.add("long", text(500, seed=6))
    began = first_token = 0.0
    while not rig.outputs["long"]:
        rig.step()
        rig.now += 0.1
        if "long" in rig.running() and not began:
            began = rig.now - 0.1
        first_token = rig.now
    assert first_token - began > INTERVAL * 0.1, "its second part waits"
    rig.step()
    found = rig.turn("long").start
    assert found.first_token_at == pytest.approx(first_token, abs=0.11)
    rig.run()
    rig.check_clean()


@pytest.mark.scripts(25, nightly=2_000)
@pytest.mark.parametrize(
    "groups", [(), (FULL, WINDOW, STATE)], ids=["full", "full, window and state"]
)
def test_random_scripts_succeed_with_held_prefills(
    tmp_path: Path, seeds: range, groups: tuple[Any, ...]
) -> None:
    def play(folder: Path, seed: int) -> None:
        def configure(config: Any) -> None:
            config.scheduler_config.prefill_schedule_interval = 2 + seed % 7

        play_script(folder, seed, groups, configure)

    play_each(tmp_path, seeds, play)
