"""Contexts that do not fit into CPU memory are promoted from SSD in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import store, tiers
from tests.runtime.stories.test_tiers import CONTEXT
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig

SLOTS = 12
"""Slots in CPU memory. The context has twenty pages."""


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """A rig on which the context is only on SSD, where an engine with more CPU memory has written
    it."""
    first = make_rig(extra=tiers(tmp_path, slots=200))
    first.ask("first", CONTEXT)
    first.close()
    made = make_rig(extra=tiers(tmp_path, slots=SLOTS), blocks=60, max_batched_tokens=64)
    made.ask("other", text(100, seed=3))
    made.wait_for_worker()
    return made


def read_by(rig: Rig, before: Callable[[int], None]) -> None:
    """Call ``before`` before each read of the store, with the number of earlier reads."""
    target = store(rig)
    read, reads = target.get, iter(range(10_000))

    def get(pages: Sequence[Any]) -> frozenset[int]:
        before(next(reads))
        found: frozenset[int] = read(pages)
        return found

    target.get = get


def begin(rig: Rig) -> None:
    """Request the context again, and step until its first pieces have arrived."""
    rig.add("again", CONTEXT)
    while not len(rig.pages.pieces):
        rig.step()
        rig.wait_for_worker()
    assert rig.outputs["again"] == []


def test_a_context_larger_than_cpu_memory_is_restored_completely(rig: Rig) -> None:
    others = set(rig.index.least_valuable(SLOTS))
    assert rig.ask("again", CONTEXT) == expected(CONTEXT, 4)
    assert rig.count("restores_in_pieces") == 1
    assert rig.count("prompt_tokens_ssd") == rig.count("prompt_tokens_cpu") == 319
    assert rig.count("promotions_overdue") == rig.count("restore_failures") == 0
    assert len(rig.pages.pieces) == 0
    assert others & set(rig.index.least_valuable(SLOTS)), "it has not taken all of CPU memory"
    rig.check_clean()


def test_two_turns_promote_the_pages_they_share(rig: Rig) -> None:
    # Pages that one turn has released are ordered again by the other.
    longer = CONTEXT + text(20, seed=7)
    rig.add("a", CONTEXT)
    rig.add("b", longer)
    rig.run()
    assert rig.outputs["a"] == expected(CONTEXT, 4)
    assert rig.outputs["b"] == expected(longer, 4)
    rig.check_clean()


def test_a_turn_that_is_aborted_meanwhile_leaves_nothing(rig: Rig) -> None:
    begin(rig)
    rig.abort("again")
    rig.run()
    rig.wait_for_worker()
    rig.step()
    rig.run()
    assert rig.ask("once more", CONTEXT) == expected(CONTEXT, 4)
    rig.check_clean()


def test_pages_that_cannot_be_read_are_computed(rig: Rig) -> None:
    def fails(number: int) -> None:
        if number == 4:
            raise OSError(5, "injected")

    read_by(rig, fails)
    assert rig.ask("again", CONTEXT) == expected(CONTEXT, 4)
    assert rig.count("restores_in_pieces") == 1
    assert rig.count("promotion_failures") > 0
    rig.check_clean()


def test_pages_that_take_longer_than_computing_are_computed(rig: Rig) -> None:
    rig.gaps.prefills.fit.observe(0, 1000, 1.0)
    begin(rig)
    rig.now += 60.0
    rig.run()
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    assert rig.count("promotions_overdue") == 1
    rig.wait_for_worker()
    rig.step()
    rig.check_clean()


def test_a_reset_meanwhile_ends_the_restore(rig: Rig) -> None:
    begin(rig)
    rig.half.reset()
    assert len(rig.pages.pieces) == 0
    rig.run()
    assert rig.outputs["again"] == expected(CONTEXT, 4)
    rig.wait_for_worker()
    rig.step()
    rig.check_clean()


def test_saving_a_page_that_ssd_has_evicts_no_other(rig: Rig) -> None:
    """A turn fills pages in VRAM that SSD already has. They are not saved to CPU memory, where they
    would evict other pages."""
    rig.ask("one more", text(100, seed=4))
    rig.wait_for_worker()
    rig.step()
    assert rig.index.free_slots <= 1
    saved = rig.count("pages_saved")
    rig.ask("again", CONTEXT)
    assert rig.count("pages_saved") - saved <= 3, "the end of the turn"
    rig.check_clean()
