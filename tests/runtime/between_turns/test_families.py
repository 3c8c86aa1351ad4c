"""A job with running sub-agents is expected back when they have finished, and not after a forecast
time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.admission.admitting import begin, holding_rig
from tests.runtime.between_turns.waiting import (
    CONTEXT,
    FAST,
    FORECAST,
    LONG,
    ByTool,
    pinned,
    policy,
    reader,
    waiting_rig,
)
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.between_turns.open_gaps import MOST_CHILDREN
from tiered_kv.connectors.runtime.between_turns.turn_ends import CHILDREN_OVER
from tiered_kv.policies.base import NO_TOOL, Costs, Decision, GapClass, JobKey, Tier, TurnEnd
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.stores import SSD
from tiered_kv.testing.vllm.rig import Rig

PARENT = JobKey("", "parent")
OF_PARENT: dict[str, Any] = {"job_id": "parent"}


def of_child(name: str = "child", **more: Any) -> dict[str, Any]:
    return {"job_id": name, "parent_job_id": "parent", **more}


class WaitsForChildren(ByTool):
    """A policy that keeps a job's context on SSD while the job's children run, and pins it once
    they have finished."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        tool = turn.tool
        if tool is not None and tool.path[0] == "(sub-agents)":
            self.asked.append((turn, costs))
            return Decision(Tier.STORE, 0.0, GapClass.SLOW, FORECAST)
        if tool == CHILDREN_OVER:
            self.asked.append((turn, costs))
            return Decision(Tier.PIN, 30.0, GapClass.FAST, FORECAST)
        return super().decide(turn, costs)


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    made = waiting_rig(make_rig, tmp_path)
    made.policy = WaitsForChildren()
    return made


def parent_waits(rig: Rig) -> None:
    """Run a parent's turn whose answer calls the tool that starts the child."""
    rig.ask("p1", CONTEXT, params=OF_PARENT)
    reader(rig).says("p1", FAST)
    rig.step()
    assert pinned(rig) == 20


def asked_tools(rig: Rig, job: JobKey = PARENT) -> list[tuple[str, ...]]:
    """Return the tool path of each decision about the job, in order. Decisions without a known tool
    are left out."""
    asked = [end.tool for end, _ in policy(rig).asked if end.job == job]
    return [tool.path for tool in asked if tool is not None]


def test_the_context_of_a_parent_leaves_vram_while_its_child_runs(rig: Rig) -> None:
    parent_waits(rig)
    rig.add("c1", text(60, seed=5), params=of_child())
    rig.step()
    assert asked_tools(rig) == [("fast",), ("(sub-agents)", "fast")]
    assert pinned(rig) == 0, "it cannot return before its child has ended"
    rig.run()
    assert len(rig.pages.book.stores[SSD].index) >= 20


def test_a_finished_child_brings_its_parent_back(rig: Rig) -> None:
    parent_waits(rig)
    rig.ask("c1", text(60, seed=5), params=of_child())
    rig.run()
    rig.index.clear()  # as if other pages had filled CPU memory in the meantime
    rig.fill()
    reader(rig).says("c1", NO_TOOL)
    rig.now += 40.0
    rig.step()
    assert asked_tools(rig)[-1] == CHILDREN_OVER.path
    rig.wait_for_worker()
    rig.now += 0.5
    rig.ask("else", text(17, seed=3))
    assert rig.count("pages_promoted_ahead") >= 20

    assert rig.ask("p2", CONTEXT + text(9, seed=2), params=OF_PARENT) == expected(
        CONTEXT + text(9, seed=2), 4
    )
    assert rig.count("prompt_tokens_cpu") >= 320
    assert (1, 0.5, True) in policy(rig).seen, "what is learned is the time since the child's end"
    rig.half.release_all()
    rig.check_clean()


def test_the_time_of_children_is_learned_by_the_tool_that_starts_them(rig: Rig) -> None:
    parent_waits(rig)
    rig.ask("c1", text(60, seed=5), params=of_child())
    reader(rig).says("c1", LONG)
    rig.step()
    rig.now += 25.0
    rig.ask("c2", text(90, seed=5), params=of_child(is_last_step=True))
    assert (1, 25.0, True) in policy(rig).seen
    assert asked_tools(rig)[-1] == CHILDREN_OVER.path


def test_the_last_of_several_children_is_waited_for(rig: Rig) -> None:
    parent_waits(rig)
    for name in ("one", "two"):
        rig.ask(f"{name}.1", text(60, seed=5), params=of_child(name))
    reader(rig).says("one.1", NO_TOOL)
    rig.step()
    assert asked_tools(rig)[-1] == ("(sub-agents)", "fast")
    reader(rig).says("two.1", NO_TOOL)
    rig.step()
    assert asked_tools(rig)[-1] == CHILDREN_OVER.path


def test_a_child_that_starts_before_the_call_was_read_counts(rig: Rig) -> None:
    rig.ask("p1", CONTEXT, params=OF_PARENT)
    rig.add("c1", text(60, seed=5), params=of_child())
    rig.step()
    assert pinned(rig) == 20, "provisionally"
    reader(rig).says("p1", FAST)
    rig.run()
    assert asked_tools(rig)[-1] == ("(sub-agents)", "fast")


def test_a_child_that_outlives_its_parents_turn_delays_no_job(rig: Rig) -> None:
    parent_waits(rig)
    rig.ask("c1", text(60, seed=5), params=of_child())
    reader(rig).says("c1", LONG)
    rig.step()
    rig.ask("p2", CONTEXT + text(9, seed=2), params=OF_PARENT)
    reader(rig).says("p2", FAST)
    rig.step()
    rig.ask("c2", text(90, seed=5), params=of_child())
    assert asked_tools(rig)[-1] == ("fast",)
    reader(rig).says("c2", NO_TOOL)
    rig.step()
    assert asked_tools(rig)[-1] == ("fast",)


def test_pages_of_a_finished_child_are_evicted_first(rig: Rig) -> None:
    parent_waits(rig)
    rig.ask("c1", text(60, seed=5), params=of_child())
    rig.ask("c2", text(60, seed=5) + text(100, seed=6), params=of_child())
    own = rig.half.gaps.manager.open[JobKey("", "child")].pages
    reader(rig).says("c2", NO_TOOL)
    rig.step()
    assert JobKey("", "child") not in rig.half.gaps.manager.open.jobs()
    assert set(rig.index.least_valuable(4)) <= set(own)


def test_an_unknown_or_running_parent_waits_for_no_child(rig: Rig) -> None:
    rig.ask("c1", text(60, seed=5), params=of_child())
    rig.add("p1", CONTEXT, max_tokens=8, params=OF_PARENT)
    rig.step()
    rig.ask("b1", text(60, seed=7), params=of_child("background"))
    rig.run()
    reader(rig).says("p1", FAST)
    rig.step()
    assert asked_tools(rig) == [("fast",)]


def test_children_of_a_parent_are_bounded(rig: Rig) -> None:
    parent_waits(rig)
    for n in range(MOST_CHILDREN + 3):
        rig.add(f"c{n}", text(20, seed=n), max_tokens=1, params=of_child(f"child {n}"))
    gap = rig.half.gaps.manager.open[PARENT]
    assert len(gap.children) == MOST_CHILDREN
    rig.run()


def test_a_child_of_a_job_that_has_started_is_not_held_back(make_rig: MakeRig) -> None:
    """A child of a started job is admitted while an unrelated new job is held back. If the child
    were held back, the parent would keep its space while it waits for the child."""
    rig = holding_rig(make_rig, in_job_order=True)
    for name in ("parent", "b", "c"):
        begin(rig, name, last=False)
        rig.step()
    begin(rig, "stranger")
    rig.add("child", text(300, seed=9), max_tokens=40, params=of_child())
    rig.step()
    assert rig.held() == ["stranger"]
    rig.run()


def test_siblings_that_start_together_are_served_from_one_prefill(make_rig: MakeRig) -> None:
    """vLLM finds the blocks of a running request in its prefix cache as soon as they are scheduled,
    so the common start of three children is computed only once."""
    rig = make_rig(blocks=200, max_batched_tokens=64)
    shared = text(256, seed=4)
    for n in range(3):
        rig.add(f"c{n}", shared + text(20, seed=n), params=of_child(f"child {n}"))
    rig.run()
    assert rig.count("prompt_tokens_vram") == 2 * 256
    for n in range(3):
        assert rig.outputs[f"c{n}"] == expected(shared + text(20, seed=n), 4)
