"""Pin every turn that is not the last."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.fixed_pin import FixedPin
from tiered_kv.policies.signals import Decision, JobKey, Tier, TurnEnd

TURN = TurnEnd(
    job=JobKey("", "job"), turn=1, is_last_step=False, aborted=False, context_tokens=3000
)


def test_a_turn_that_is_not_the_last_is_pinned_for_two_seconds() -> None:
    assert FixedPin().decide(TURN) == Decision(Tier.PIN, 2.0)
    assert FixedPin(ttl_s=7.5).decide(TURN) == Decision(Tier.PIN, 7.5)


@pytest.mark.parametrize("job", [TURN.job, None])
@pytest.mark.parametrize("aborted", [True, False])
def test_after_the_last_turn_nothing_is_kept(job: JobKey | None, aborted: bool) -> None:
    last = dataclasses.replace(TURN, is_last_step=True, job=job, aborted=aborted)
    assert FixedPin().decide(last) == Decision(Tier.DROP)


def test_who_names_no_job_pins_nothing() -> None:
    """Nothing would tell which request returns to the pin."""
    assert FixedPin().decide(dataclasses.replace(TURN, job=None)) == Decision(Tier.CPU)


def test_a_client_that_went_away_pins_nothing() -> None:
    assert FixedPin().decide(dataclasses.replace(TURN, aborted=True)) == Decision(Tier.CPU)


@given(
    st.builds(
        TurnEnd,
        job=st.none() | st.builds(JobKey, st.text(), st.text()),
        turn=st.integers(1, 10**6),
        is_last_step=st.booleans(),
        aborted=st.booleans(),
        context_tokens=st.integers(0, 10**7),
    )
)
def test_only_a_pin_has_a_deadline(turn: TurnEnd) -> None:
    decision = FixedPin().decide(turn)
    assert (decision.ttl_s > 0) is (decision.tier is Tier.PIN)
    assert FixedPin().decide(turn) == decision, "the same answer to the same question"
