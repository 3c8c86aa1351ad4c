"""The cost of prefilling a token is learned from the engine's own requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.between_turns.cost_model import FEWEST_TOKENS, PrefillTimer
from tiered_kv.connectors.runtime.turn import Source, StartState
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import text


def turn(prompt: int, *, vram: int = 0, cpu: int = 0) -> Any:
    request = SimpleNamespace(
        num_prompt_tokens=prompt,
        num_output_tokens=0,
        num_preemptions=0,
        finished=False,
    )
    source = Source(vram_tokens=vram, cpu_tokens=cpu)
    return SimpleNamespace(request=request, source=source, start=StartState())


def test_nothing_is_known_before_a_prefill_was_seen() -> None:
    clock = PrefillTimer(ahead=False)
    clock.on_started(turn(1000), now=0.0, whole=True)
    clock.poll(now=1.0)
    assert not clock.fit.measured


def test_a_prefill_lasts_until_the_first_token_of_the_answer() -> None:
    clock = PrefillTimer(ahead=False)
    one = turn(1500, vram=300, cpu=200)
    clock.on_started(one, now=10.0, whole=True)
    clock.poll(now=11.0)
    one.request.num_output_tokens = 1
    clock.poll(now=12.0)
    assert clock.fit.seconds(500, 1000) == pytest.approx(2.0)
    clock.poll(now=99.0)
    assert clock.fit.seconds(500, 1000) == pytest.approx(2.0), "it is seen once"


def test_later_prefills_update_the_estimate() -> None:
    clock = PrefillTimer(ahead=False)
    for seconds in (1.0, 3.0):
        one = turn(1000)
        clock.on_started(one, now=0.0, whole=True)
        one.request.num_output_tokens = 1
        clock.poll(now=seconds)
    assert 1.0 < clock.fit.seconds(0, 1000) < 3.0


def test_short_aborted_and_preempted_prefills_are_ignored() -> None:
    clock = PrefillTimer(ahead=False)
    short, aborted, preempted = turn(FEWEST_TOKENS - 1), turn(1000), turn(1000)
    for one in (short, aborted, preempted):
        clock.on_started(one, now=0.0, whole=True)
    short.request.num_output_tokens = preempted.request.num_output_tokens = 1
    preempted.request.num_preemptions = 1
    aborted.request.finished = True
    clock.poll(now=1.0)
    assert not clock.fit.measured
    assert clock.running == []


def test_a_step_scheduled_ahead_starts_when_the_next_one_is_scheduled() -> None:
    """The previous step runs until the next one is scheduled, so a prefill of one step is not timed
    as two."""
    clock = PrefillTimer(ahead=True)
    one = turn(1000)
    clock.on_started(one, now=10.0, whole=True)
    for now in (10.0, 12.0, 14.0):
        one.request.num_output_tokens = int(now == 14.0)
        clock.poll(now)
    assert clock.fit.seconds(0, 1000) == pytest.approx(2.0)


def test_the_time_that_a_restore_takes_is_not_that_of_the_prefill_behind_it(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    start = text(160, seed=1)
    rig.ask("first", start)
    rig.fill()
    rig.add("longer", start + text(200, seed=2), max_tokens=1)
    rig.step()
    rig.now += 60.0
    while "longer" not in rig.finished:
        rig.wait_for_worker()
        rig.step()
    rig.now += 1.0
    rig.ask("next", text(1, seed=3), max_tokens=1)  # a step that polls the timer
    assert rig.count("restores_async") == 1
    assert rig.gaps.prefills.fit.seconds(160, 200) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", RestoreMode)
def test_a_restored_preempted_request_is_not_a_prefill(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, mode: RestoreMode
) -> None:
    """A preempted request already has output, so its second prefill would seem to take no time.
    Only the first prefill of each request is timed."""
    rig = make_rig(blocks=30, max_model_len=400)
    rig.pages.restores.policy = AlwaysRestore(mode)
    seen: list[int] = []
    monkeypatch.setattr(
        rig.gaps.prefills.fit, "observe", lambda behind, tokens, s: seen.append(tokens)
    )
    requests = [rig.add(f"r{i}", text(150, seed=20 + i), max_tokens=200) for i in range(3)]
    rig.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert rig.count("pages_restored") > 0
    assert seen == [150, 150, 150]
