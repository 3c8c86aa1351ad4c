"""Contexts come up from SSD in the order in which turns are let in, as CPU memory has room."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import CONTEXT, push_out, store, tiers
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig

OTHER = text(320, seed=2)
"""As long as the context. CPU memory has 64 slots, half of them for what comes up: one of the two
fits."""


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """Both contexts are on SSD only."""
    made = make_rig(extra=tiers(tmp_path), blocks=40, max_batched_tokens=64)
    for context in (CONTEXT, OTHER):
        made.ask(f"first {context[0]}", context)
        made.wait_for_worker()
    push_out(made)
    return made


@pytest.fixture
def reads(rig: Rig) -> Iterator[threading.Event]:
    """Nothing is read before it is set."""
    may_read, target = threading.Event(), store(rig)
    read = target.get

    def late(pages: Sequence[Any]) -> frozenset[int]:
        assert may_read.wait(300)
        found: frozenset[int] = read(pages)
        return found

    target.get = late
    yield may_read
    may_read.set()


def from_ssd(rig: Rig, name: str, prompt: Sequence[int]) -> int:
    """Tokens of a turn's prompt that have come up once it is over."""
    before = rig.count("prompt_tokens_ssd")
    rig.run()
    assert rig.outputs[name] == expected(prompt, 4)
    return rig.count("prompt_tokens_ssd") - before


def test_a_turn_waits_for_the_slots_of_another_rather_than_compute(
    rig: Rig, reads: threading.Event
) -> None:
    rig.add("a", CONTEXT)
    rig.add("b", OTHER)
    rig.step()
    assert rig.turn("a").tiers.awaits
    assert not rig.turn("b").tiers.keys, "the room is taken"
    reads.set()
    assert from_ssd(rig, "b", OTHER) == 2 * 319
    assert rig.outputs["a"] == expected(CONTEXT, 4)
    rig.check_clean()


def test_a_turn_has_a_part_of_its_pages_once_it_has_waited_for_long(
    rig: Rig, reads: threading.Event
) -> None:
    """The other one waits for as long at most, too, so that its slots come back."""
    rig.gaps.prefills.fit.observe(0, 1000, 1.0)
    rig.add("a", CONTEXT)
    rig.add("b", OTHER)
    rig.step()
    rig.now += 60.0
    for _ in range(30):
        rig.step()
    assert rig.outputs["a"] == expected(CONTEXT, 4)
    assert rig.outputs["b"] == expected(OTHER, 4)
    reads.set()
    rig.run()
    rig.check_clean()


def test_pages_come_up_while_their_turn_waits_for_vram(rig: Rig, reads: threading.Event) -> None:
    """It loses nothing by waiting, so it waits for as long as it takes. Nobody overtakes it."""
    rig.add("busy", text(400, seed=3), max_tokens=60)
    while not rig.outputs["busy"]:
        rig.step()
    rig.add("a", CONTEXT)
    rig.add("small", text(5, seed=4))
    rig.step()
    assert rig.turn("a").tiers.awaits
    rig.now += 3600.0
    for _ in range(10):
        rig.step()
    assert rig.turn("a").tiers.awaits, "no time has run"
    reads.set()
    rig.wait_for_worker()
    assert "busy" not in rig.finished
    assert rig.outputs["small"] == rig.outputs["a"] == []
    assert from_ssd(rig, "a", CONTEXT) == 319
    assert rig.count("promotions_overdue") == 0
    rig.check_clean()
