"""What computing a prompt token costs, learned from the engine's own requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.connectors.vllm.prefills import FEWEST_TOKENS, PrefillClock


def turn(prompt: int, *, vram: int = 0, cpu: int = 0) -> Any:
    request = SimpleNamespace(
        num_prompt_tokens=prompt, num_output_tokens=0, is_finished=lambda: False
    )
    return SimpleNamespace(request=request, vram_tokens=vram, cpu_tokens=cpu)


def test_nothing_is_known_before_a_prefill_was_seen() -> None:
    clock = PrefillClock()
    clock.started(turn(1000), now=0.0)
    clock.look(now=1.0)
    assert not clock.fit.measured


def test_a_prefill_lasts_until_the_first_token_of_the_answer() -> None:
    clock = PrefillClock()
    one = turn(1500, vram=300, cpu=200)
    clock.started(one, now=10.0)
    clock.look(now=11.0)
    one.request.num_output_tokens = 1
    clock.look(now=12.0)
    assert clock.fit.seconds(500, 1000) == pytest.approx(2.0)
    clock.look(now=99.0)
    assert clock.fit.seconds(500, 1000) == pytest.approx(2.0), "it is seen once"


def test_later_prefills_move_what_is_known() -> None:
    clock = PrefillClock()
    for seconds in (1.0, 3.0):
        one = turn(1000)
        clock.started(one, now=0.0)
        one.request.num_output_tokens = 1
        clock.look(now=seconds)
    assert 1.0 < clock.fit.seconds(0, 1000) < 3.0


def test_short_and_aborted_prefills_say_nothing() -> None:
    clock = PrefillClock()
    short, aborted = turn(FEWEST_TOKENS - 1), turn(1000)
    clock.started(short, now=0.0)
    clock.started(aborted, now=0.0)
    short.request.num_output_tokens = 1
    aborted.request.is_finished = lambda: True
    clock.look(now=1.0)
    assert not clock.fit.measured
    assert clock.running == []
