"""The number of turns and the growth of jobs are learned from earlier jobs, and determine the space
reserved for them."""

from __future__ import annotations

import pytest

from tests.runtime.admission.admitting import BLOCKS, begin
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.admission.active_jobs import ActiveJobs
from tiered_kv.policies.admission.working_set import TurnCadence
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    extra = {"cpu_gib": 0.0, "admission": "auto"}
    return make_rig(blocks=BLOCKS, max_model_len=1024, extra=extra, in_job_order=True)


def jobs(rig: Rig) -> ActiveJobs:
    found: ActiveJobs = rig.gate.jobs
    return found


def turn(rig: Rig, number: int, tokens: int, *, last: bool = False) -> None:
    """Run a turn of one job, whose answer extends the context to ``tokens`` tokens."""
    prompt = text(tokens, seed=1)[: tokens - 4]
    rig.ask(f"t{number}", prompt, params={"job_id": "j", "is_last_step": last})


def test_finished_jobs_show_how_many_turns_jobs_have(rig: Rig) -> None:
    for number in range(3):
        turn(rig, number, 160 + 16 * number, last=number == 2)
    assert len(jobs(rig)) == 0
    assert jobs(rig).job_forecast.lengths.left(1) == 2


def test_an_aborted_job_shows_how_many_turns_jobs_have(rig: Rig) -> None:
    """An aborted job counts as finished, so its number of turns is learned."""
    for number in range(4):
        turn(rig, number, 160 + 16 * number)
    rig.add("t4", text(240, seed=1), max_tokens=50, params={"job_id": "j"})
    rig.step()
    rig.abort("t4")
    assert len(jobs(rig)) == 0
    assert jobs(rig).job_forecast.lengths.left(1) == 4


def test_contexts_grow_by_what_a_turn_adds_and_never_shrink(rig: Rig) -> None:
    """A job's growth is the mean over all its turns, and a truncated history counts as no growth. A
    client that truncates its history does so once, and then continues as before."""
    for number, (tokens, mean) in enumerate([(160, 0.0), (240, 5.0), (80, 2.5), (80, 5 / 3)]):
        turn(rig, number, tokens)
        ((_, member),) = jobs(rig).items()
        assert jobs(rig).job_forecast.growth.mean == pytest.approx(mean, rel=0.03), "of all turns"
        assert member.grown == min(number, 1) * 5.0


def test_intervals_between_turns_measure_how_regular_a_job_is(rig: Rig) -> None:
    for number, later_s in enumerate([0.0, 10.0, 30.0]):
        rig.now += later_s
        turn(rig, number, 160 + 16 * number)
    known = TurnCadence()
    for interval_s in (10.0, 30.0):
        known.observe(interval_s)
    assert jobs(rig).cadence.spread == pytest.approx(known.spread, rel=0.01) != 0


@pytest.mark.parametrize(("tokens", "waiting"), [(31 * 16, []), (31 * 16 + 1, ["b"])])
def test_all_blocks_except_vllms_null_block_can_be_used(
    rig: Rig, tokens: int, waiting: list[str]
) -> None:
    begin(rig, "a", tokens=32 * 16)
    rig.step()
    begin(rig, "b", tokens=tokens)
    assert rig.held() == waiting
    rig.run()
