"""The time from the end of a turn to the job's next turn: provisional pins, decisions, gaps, and
learning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.between_turns.waiting import (
    CONTEXT,
    FAST,
    JOB,
    LONG,
    ByTool,
    pinned,
    policy,
    reader,
    waiting_rig,
)
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.between_turns.open_gaps import LONGEST_S
from tiered_kv.policies.base import NO_TOOL, JobKey, TurnEnd
from tiered_kv.policies.jobs.identity import INFERRED_PREFIX
from tiered_kv.policies.tier_choice import Occupancy
from tiered_kv.policies.tools.calls import ToolCall
from tiered_kv.policies.tools.tool_use import tool_use
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return waiting_rig(make_rig, tmp_path)


# -- provisional pins -------------------------------------------------------------------


def test_a_turn_is_pinned_for_two_seconds_while_its_tool_call_is_read(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    assert reader(rig).asked == {"t1": expected(CONTEXT, 4)}
    assert pinned(rig) == 20
    rig.now += 1.9
    rig.step()
    assert pinned(rig) == 20
    rig.now += 0.2
    rig.step()
    assert pinned(rig) == 0, "the tool call was not read"


def test_a_fast_tool_extends_the_pin(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.now += 29.0
    rig.step()
    assert pinned(rig) == 20
    rig.now += 1.5
    rig.step()
    assert pinned(rig) == 0, "it is counted from the turn's end"


def test_a_verdict_against_the_pin_releases_it(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", NO_TOOL)
    rig.step()
    assert pinned(rig) == 0
    rig.check_clean()


def test_a_verdict_after_the_next_turn_is_ignored(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.ask("t2", CONTEXT + text(20, seed=2), params=JOB)
    reader(rig).says("t1", NO_TOOL)
    reader(rig).says("never heard of", NO_TOOL)
    rig.step()
    assert pinned(rig) > 0, "that is the second turn's"
    reader(rig).says("t2", NO_TOOL)
    rig.step()
    assert pinned(rig) == 0


def test_a_verdict_about_a_released_pin_pins_nothing(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.pins.release_all()
    reader(rig).says("t1", FAST)
    rig.step()
    assert pinned(rig) == 0, "the blocks may belong to another request"


def test_an_unreadable_tool_call_is_decided_immediately(rig: Rig) -> None:
    reader(rig).full = True
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 20.0
    rig.step()
    assert pinned(rig) == 20
    reader(rig).errors = 2
    rig.half.stats.take()
    assert (rig.count("answers_unread"), rig.count("tool_read_errors")) == (1, 2)


def test_a_tool_named_by_the_client_is_used(rig: Rig) -> None:
    hints = {**JOB, "tool_command": "cd /src && timeout 60 pytest -x", "expected_tool_s": 12.5}
    rig.ask("t1", CONTEXT, params=hints)
    assert reader(rig).asked == {}
    (end, _), *_ = policy(rig).asked
    assert end.tool is not None
    assert end.tool.path[:2] == ("bash", "pytest")
    assert (end.tool.expected_s, end.tool.most_s) == (12.5, 60.0)
    assert pinned(rig) == 0, "not a tool that it knows"
    assert rig.count("hints_ignored") == 0


def test_the_last_turn_is_not_read(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params={**JOB, "is_last_step": True})
    assert reader(rig).asked == {}
    assert pinned(rig) == 0


# -- gaps -------------------------------------------------------------------------------


def test_the_gap_is_observed_when_the_next_turn_arrives(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 7.5
    rig.ask("t2", CONTEXT + expected(CONTEXT, 4) + text(50, seed=2), params=JOB)
    rig.now += 1.0
    rig.ask("t3", CONTEXT, params={**JOB, "is_last_step": True})
    assert policy(rig).seen == [(1, 7.5, True), (2, 1.0, True)]
    first, second, third = (end for end, _ in policy(rig).asked)
    assert (first.context_tokens, first.new_tokens, first.output_tokens) == (324, 320, 4)
    assert (second.context_tokens, second.new_tokens) == (378, 50)
    assert third.new_tokens == 0


def test_a_gap_that_does_not_end_is_censored(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += LONGEST_S + 1
    rig.ask("other", text(100, seed=5), max_tokens=20)
    assert policy(rig).seen == [(1, LONGEST_S + 1, False)]
    assert pinned(rig) == 7, "those of the other"


def test_gaps_that_are_open_at_shutdown_are_censored(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 3.0
    rig.close()
    assert policy(rig).seen == [(1, 3.0, False)]


def test_a_client_without_hints_is_recognized_by_its_prompts(rig: Rig) -> None:
    rig.ask("t1", CONTEXT)
    assert pinned(rig) == 20
    rig.now += 1.0
    rig.ask("t2", CONTEXT + expected(CONTEXT, 4) + text(50, seed=2))
    rig.ask("stranger", text(320, seed=9))
    rig.ask("other salt", CONTEXT + text(50, seed=2), salt="other")
    names = [end.job for end, _ in policy(rig).asked]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(name is not None and name.name.startswith(INFERRED_PREFIX) for name in names)
    assert policy(rig).seen == [(1, 1.0, True)]
    assert rig.count("pins_ended_returned") == 1
    assert rig.count("jobs_inferred") == 3


def test_a_continued_response_is_the_next_turn_whatever_its_prompt_is(rig: Rig) -> None:
    """A request that continues a response belongs to that response's job, even if its prompt starts
    differently: a server may rebuild the prompt without the reasoning in the last answer."""
    rig.ask("resp_1-aaaaaaaa", CONTEXT)
    after = {"client": {"follows": "resp_1"}}
    rig.ask("resp_2-bbbbbbbb", text(50, seed=2) + CONTEXT, params=after)
    rig.ask("resp_3-cccccccc", text(60, seed=3), params={"client": {"follows": "resp_2"}})
    rig.ask("resp_4-dddddddd", text(60, seed=4), params=after)
    rig.ask("resp_5-eeeeeeee", text(60, seed=5), params=after, salt="other")
    names = [end.job for end, _ in policy(rig).asked]
    assert names[0] == names[1] == names[2]
    assert len(set(names)) == 3, "a response is continued once, and by its own client"


def test_a_subagent_without_an_id_is_another_job_than_its_session(rig: Rig) -> None:
    main, child = {"session": "S"}, {"session": "S", "subagent": True}
    task = text(320, seed=7)
    rig.ask("m1", CONTEXT, params={"client": main})
    rig.ask("c1", task, params={"client": child})
    rig.ask("c2", task + expected(task, 4) + text(20, seed=8), params={"client": child})
    rig.ask("m2", CONTEXT + expected(CONTEXT, 4), params={"client": main})
    names = [end.job for end, _ in policy(rig).asked]
    assert names[0] == names[3] == JobKey("", "S")
    assert names[1] == names[2] != names[0]
    assert rig.count("ids_carried") == 4
    assert rig.count("turns_unnamed") == 2


def test_a_reset_ends_no_wait(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.now += 5.0
    rig.ask("t2", CONTEXT, params=JOB)
    assert policy(rig).seen == [(1, 5.0, True)]
    assert rig.count("prompt_tokens_recomputed") == 640
    rig.half.release_all()
    rig.check_clean()


def test_a_verdict_that_was_read_while_the_engine_was_idle_counts(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.now += 5.0
    rig.add("t2", CONTEXT, params=JOB)
    assert policy(rig).seen == [(1, 5.0, True)]
    assert policy(rig).asked[-1][0].tool == LONG, "no step came between"
    rig.run()


def test_a_retry_after_an_abort_is_not_observed_as_a_gap(rig: Rig) -> None:
    rig.add("t1", CONTEXT, max_tokens=50, params=JOB)
    for _ in range(10):
        rig.step()
    rig.abort("t1")
    rig.now += 0.2
    rig.ask("t2", CONTEXT, params=JOB)
    assert policy(rig).seen == []


def test_a_request_that_never_ran_leaves_nothing(rig: Rig) -> None:
    for i in range(50):
        rig.add(f"t{i}", text(100, seed=i))
        rig.abort(f"t{i}")
    rig.ask("other", text(17, seed=99))
    assert rig.gaps.manager.open.jobs() == []


def test_a_job_is_away_when_the_last_of_its_turns_has_ended(rig: Rig) -> None:
    rig.add("long", CONTEXT, max_tokens=30, params=JOB)
    rig.add("short", text(100, seed=2), max_tokens=2, params=JOB)
    for _ in range(12):
        rig.step()
    assert set(rig.finished) == {"short"}
    assert pinned(rig) == 0
    assert len(rig.gaps.manager.open) == 0
    rig.run()
    assert pinned(rig) == 21
    assert len(rig.gaps.manager.open) == 1
    assert rig.count("concurrent_turns") == 1


def test_a_straggler_of_a_finished_job_is_not_awaited(rig: Rig) -> None:
    rig.add("long", CONTEXT, max_tokens=30, params=JOB)
    rig.add("last", text(100, seed=2), max_tokens=2, params={**JOB, "is_last_step": True})
    rig.run()
    assert pinned(rig) == 0
    assert len(rig.gaps.manager.open) == 0
    assert len(rig.gaps.manager.jobs) == 0
    rig.check_clean()


def test_a_pin_is_held_while_the_next_turn_queues(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=128, max_model_len=512, max_num_seqs=1)
    rig.policy = ByTool()
    rig.ask("t1", CONTEXT, params=JOB)
    rig.add("rival", text(100, seed=2), max_tokens=30)
    rig.step()
    rig.add("t2", CONTEXT + text(20, seed=3), params=JOB)
    rig.now += 60.0
    for _ in range(5):
        rig.step()
    assert pinned(rig) == 20, "its time is up, but its job has come"
    rig.run()
    assert rig.count("pins_ended_expired") == 0
    assert rig.count("pins_ended_returned") == 1
    rig.half.release_all()
    rig.check_clean()


def test_a_turn_aborted_in_the_queue_releases_its_pin(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=128, max_model_len=512, max_num_seqs=1)
    rig.policy = ByTool()
    rig.ask("t1", CONTEXT, params=JOB)
    rig.add("rival", text(100, seed=2), max_tokens=30, params={"is_last_step": True})
    rig.step()
    rig.add("t2", CONTEXT, params=JOB)
    rig.abort("t2")
    assert pinned(rig) == 0
    rig.run()
    rig.half.release_all()
    rig.check_clean()


# -- learning -----------------------------------------------------------------------------


def test_learned_gaps_outlive_the_engine(make_rig: MakeRig, tmp_path: Path) -> None:
    extra = {
        "cpu_gib": 0.001,
        "ssd_path": str(tmp_path / "ssd"),
        "ssd_gib": 1,
        "codec": "raw",
        "policy": "occupancy",
    }
    tool = {"tool_name": "bash", "tool_command": "make check"}
    end = TurnEnd(None, 1, False, False, 300, tool=tool_use([ToolCall("bash", {}, "make check")]))

    def median_s(rig: Rig) -> float:
        assert isinstance(rig.policy, Occupancy)
        return rig.policy.model.forecast(end).quantile(0.5)

    rig = make_rig(extra=extra)
    before = median_s(rig)
    prompt = text(50, seed=1)
    for turn in range(20):
        rig.ask(f"t{turn}", prompt, params={**JOB, **tool})
        rig.now += 700.0
    assert median_s(rig) > 3 * before
    rig.close()
    again = make_rig(extra=extra)
    assert median_s(again) > 3 * before
