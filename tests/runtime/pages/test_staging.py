"""Contexts are promoted from SSD in the order in which their turns are admitted, as far as CPU
memory has space."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import store, tiers
from tests.runtime.stories.test_tiers import CONTEXT, push_out
from tiered_kv.connectors.runtime.pages import promotions
from tiered_kv.keys import PageKey
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.vllm.rig import Rig

OTHER = text(320, seed=2)
"""A second context of the same length. Half of the 64 slots in CPU memory are for promotions, so
one of the two contexts fits."""


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """A rig on which both contexts are only on SSD."""
    made = make_rig(extra=tiers(tmp_path), blocks=40, max_batched_tokens=64)
    for context in (CONTEXT, OTHER):
        made.ask(f"first {context[0]}", context)
        made.wait_for_worker()
    push_out(made)
    return made


@pytest.fixture
def reads(rig: Rig) -> Iterator[threading.Event]:
    """Event that blocks all reads of the store until it is set."""
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
    """Finish all turns, check the output of ``name``, and return how many prompt tokens of all
    turns came from SSD."""
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
    assert rig.count("pages_promoted_used") == rig.count("pages_promoted") > 0
    assert rig.count("pages_promoted_wasted") == 0
    promoted = rig.half.stats.totals()
    assert promoted["bytes_promoted_used"] == promoted["bytes_promoted"] > 0
    assert promoted["promotion_seconds"] > 0
    rig.check_clean()


def test_turns_wait_a_step_for_their_search_if_many_pages_were_searched_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotions, "SEARCHED_A_STEP", 1)
    for name, context in (("a", CONTEXT), ("b", OTHER)):
        rig.add(name, context)
    rig.step()
    looked_at = [rig.turn(name).tiers.looked_at for name in "ab"]
    assert looked_at[0] is not None
    assert looked_at[1] is None
    assert rig.turn("b").tiers.waits_since is not None
    assert from_ssd(rig, "b", OTHER) > 319, "both contexts came from SSD, at least in part"
    rig.check_clean()


def test_turns_do_not_wait_for_a_search_of_empty_tiers(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(promotions, "SEARCHED_A_STEP", 1)
    rig = make_rig(extra=tiers(tmp_path), blocks=100, max_batched_tokens=1024)
    for name, context in (("a", CONTEXT), ("b", OTHER)):
        rig.add(name, context)
    rig.step()
    assert len(rig.scheduler.running) == 2


def test_turns_compute_pages_that_take_longer_than_computing(
    rig: Rig, reads: threading.Event
) -> None:
    """The SSD does not answer. One turn waits for its pages and another for slots in CPU memory.
    After the time that computing takes, both compute their prompts."""
    rig.gaps.prefills.fit.observe(0, 1000, 1.0)
    rig.add("a", CONTEXT)
    rig.add("b", OTHER)
    rig.step()
    rig.now += 60.0
    for _ in range(30):
        rig.step()
    assert rig.outputs["a"] == expected(CONTEXT, 4)
    assert rig.outputs["b"] == expected(OTHER, 4)
    assert rig.count("promotions_overdue") == 2
    reads.set()
    rig.wait_for_worker()
    rig.step()
    rig.run()
    push_out(rig)
    assert rig.count("pages_promoted_wasted") == rig.count("pages_promoted") > 0
    rig.check_clean()


def wait_for_vram(rig: Rig) -> None:
    """Run a request that occupies most of VRAM, and add a turn that must wait for its blocks."""
    rig.add("busy", text(400, seed=3), max_tokens=60)
    while not rig.outputs["busy"]:
        rig.step()
    rig.add("a", CONTEXT)


def test_pages_are_promoted_while_their_turn_waits_for_vram(
    rig: Rig, reads: threading.Event
) -> None:
    """While the turn waits for VRAM, waiting for its pages costs no time. It therefore waits as
    long as necessary, and no later request overtakes it."""
    wait_for_vram(rig)
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


def test_a_wait_does_not_count_while_another_request_has_the_space(
    rig: Rig, reads: threading.Event
) -> None:
    rig.gaps.prefills.fit.observe(0, 1000, 1.0)
    rig.add("a", CONTEXT)
    rig.step()
    assert rig.turn("a").tiers.wait_until is not None
    rig.add("busy", text(400, seed=3), max_tokens=60)
    while not rig.outputs["busy"]:
        rig.step()
    rig.now += 3600.0
    for _ in range(10):
        rig.step()
    reads.set()
    rig.wait_for_worker()
    assert "busy" not in rig.finished
    assert from_ssd(rig, "a", CONTEXT) == 319
    assert rig.count("promotions_overdue") == 0
    rig.check_clean()


def test_pages_promoted_for_a_turn_are_not_evicted_before_it_uses_them(
    rig: Rig, reads: threading.Event
) -> None:
    """While the turn waits, more pages are saved than CPU memory can hold. The pages promoted for
    the turn stay."""
    wait_for_vram(rig)
    rig.step()
    reads.set()
    rig.wait_for_worker()
    for _ in range(3):
        rig.step()
    held = set(rig.turn("a").tiers.held)
    assert len(held) >= 20
    index = rig.index
    rivals = [PageKey(n.to_bytes(48, "little")) for n in range(300)]
    for rival in rivals:
        index.commit_all([rival], index.reserve_all([rival]))
    assert all(map(index.readable, held))
    assert from_ssd(rig, "a", CONTEXT) == 319
    rig.check_clean()


@pytest.mark.parametrize("with_ssd", [True, False])
def test_a_copy_of_vrams_pages_is_evicted_first_if_a_lower_tier_has_them(
    make_rig: MakeRig, tmp_path: Path, with_ssd: bool
) -> None:
    """VRAM and CPU memory both have the pages of a running job. If SSD has them too, the CPU copy
    is evicted before the pages of a waiting job. Otherwise it is evicted later, because it is all
    that remains once VRAM evicts the context."""
    below = tiers(tmp_path, slots=200)
    rig = make_rig(extra=below if with_ssd else {"cpu_gib": below["cpu_gib"]}, blocks=80)
    rig.policy = Always(Decision(Tier.CPU, forecast=Forecast(np.linspace(0.0, 1.0, len(GRID)))))
    pages = dict[str, set[PageKey]]()
    for name, prompt in (("waits", OTHER), ("runs", CONTEXT)):
        before = set(rig.index.least_valuable(200))
        rig.ask(f"{name} 1", prompt, params={"job_id": name})
        rig.wait_for_worker()
        rig.run()
        pages[name] = set(rig.index.least_valuable(200)) - before
    longer = CONTEXT + rig.outputs["runs 1"] + text(9, seed=5)
    rig.add("runs 2", longer, max_tokens=40, params={"job_id": "runs"})
    while not rig.outputs["runs 2"]:
        rig.step()
    rig.now += 60.0
    either = pages["runs"] | pages["waits"]
    order = [key for key in rig.index.least_valuable(200) if key in either]
    assert set(order[:20]) < pages["runs" if with_ssd else "waits"]
    rig.run()
    rig.half.release_all()
    rig.check_clean()
