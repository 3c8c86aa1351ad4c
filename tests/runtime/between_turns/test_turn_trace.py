"""The trace records every turn once its gap has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.between_turns.waiting import (
    CONTEXT,
    FAST,
    JOB,
    LONG,
    reader,
    traced,
    waiting_rig,
)
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.between_turns.open_gaps import LONGEST_S
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.base import NO_TOOL, Decision, JobKey, Tier
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import (
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    StoryEnd,
    TurnTimes,
    TurnTokens,
)

LAST = {**JOB, "is_last_step": True}


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return waiting_rig(make_rig, tmp_path)


def written(rig: Rig) -> list[str]:
    """Return the requests whose records are in the file while the engine runs."""
    trace = rig.gaps.log.trace
    assert trace._writer.drain()  # type: ignore[union-attr]  # noqa: SLF001
    assert rig.options.extra is not None
    return [one.request for one in TraceReader(Path(rig.options.extra["trace"]))]


# -- a job that returns -----------------------------------------------------------------------


def test_a_turn_is_traced_once_its_jobs_next_turn_arrives(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.now += 4.0
    assert written(rig) == []
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    assert written(rig) == ["t1", "t2"], "the last one ends immediately"

    first, last = traced(rig).values()
    assert (first.job, first.turn, first.client, first.replica) == ("j", 1, "", 0)
    assert first.finish == "FINISHED_LENGTH_CAPPED"
    assert first.tool == ("fast",)
    assert first.tokens == TurnTokens(prompt=320, recomputed=320, new=320, output=4)
    assert first.pin == PinStory(20, 4.0, PinEnd.RETURNED)
    assert first.pages == PageMoves()
    saved_s = first.decision.benefit_s
    assert first.gap == GapStory(StoryEnd.RETURNED, 4.0, in_vram=True, saved_s=saved_s)
    assert (last.turn, last.gap, last.pin) == (2, GapStory(StoryEnd.OVER), PinStory())
    assert last.decision.tier == "drop"
    assert last.tokens == TurnTokens(prompt=329, vram=320, recomputed=9, new=5, output=4)
    assert last.arrived - first.ended == pytest.approx(0.0, abs=60.0), "the wall's clock"


def test_a_decision_is_traced_with_all_its_inputs(rig: Rig) -> None:
    rig.gaps.costs.queue.observe(3.0)
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.now += 4.0
    rig.ask("t2", CONTEXT, params=LAST)
    made = traced(rig)["t1"].decision
    assert (made.tier, made.gap_class, made.ttl_s) == ("pin", "fast", 30)
    assert (made.q50_s, made.q90_s) == (50, 90)
    assert made.queue_s == 3
    assert made.benefit_s == pytest.approx(3.0 + made.restore_s, rel=1e-4)
    assert 0 < made.restore_s <= made.recompute_s
    assert made.cpu_s == made.restore_s
    assert made.tiers_s["ssd"] > made.restore_s
    assert (made.vram_price, made.survival, made.memoryfulness) == (0, 1, 1)
    assert made.cpu_stay_s is None, "nothing is evicted"


def test_the_tool_that_is_parsed_later_is_recorded(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.step()
    rig.now += 4.0
    rig.ask("t2", CONTEXT, params=LAST)
    first = traced(rig)["t1"]
    assert (first.tool, first.decision.tier, first.decision.back_s) == (("long",), "store", 60)
    assert first.pin == PinStory(20, 0.0, PinEnd.REVISED)
    assert not first.gap.in_vram


def test_jobs_with_the_same_name_are_distinguished_by_their_clients(rig: Rig) -> None:
    for salt in (None, "one", "other"):
        rig.ask(f"of {salt}", CONTEXT, params=LAST, salt=salt)
    clients = [one.client for one in traced(rig).values()]
    assert clients[0] == ""
    assert len({*clients}) == 3
    assert not {"one", "other"} & {*clients}, "a salt may be a secret"


# -- how a pin ends ---------------------------------------------------------------------------


def wait_long(rig: Rig) -> None:
    rig.now += 31.0
    rig.step()


def need_everything(rig: Rig) -> None:
    for n in range(4):
        rig.add(f"rival-{n}", text(500, seed=n))
    rig.run()


def read_no_tool(rig: Rig) -> None:
    reader(rig).says("t1", NO_TOOL)
    rig.step()


@pytest.mark.parametrize(
    ("happens", "end"),
    [
        (wait_long, PinEnd.EXPIRED),
        (need_everything, PinEnd.PRESSURE),
        (read_no_tool, PinEnd.REVISED),
        (lambda rig: rig.reset_cache(), PinEnd.RESET),
    ],
    ids=["time", "pressure", "tool", "reset"],
)
def test_a_pin_that_ends_before_the_job_returns_records_the_reason(
    rig: Rig, happens: Callable[[Rig], object], end: PinEnd
) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    if end is not PinEnd.REVISED:
        reader(rig).says("t1", FAST)
        rig.step()
    rig.now += 1.5
    happens(rig)
    held_s = 32.5 if end is PinEnd.EXPIRED else 1.5
    rig.now += 10.0
    rig.ask("t2", CONTEXT, params=LAST)
    first = traced(rig)["t1"]
    assert first.pin == PinStory(20, held_s, end)
    assert first.gap == GapStory(StoryEnd.RETURNED, held_s + 10.0)


def test_the_time_of_a_pin_is_charged_at_the_price_of_the_decision(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.gaps.costs.price, "price", lambda *_, **__: 0.5)
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.now += 40.0
    rig.step()
    rig.now += 10.0
    rig.ask("t2", CONTEXT, params=LAST)
    gap = traced(rig)["t1"].gap
    assert (gap.saved_s, gap.cost_s) == (0.0, 20.0)


# -- how a gap ends ---------------------------------------------------------------------------


def test_an_abandoned_job_records_the_cost_of_its_pin(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", FAST)
    rig.step()
    rig.now += 10.0
    rig.gaps.manager.give_up(JobKey("", "j"))
    first = traced(rig)["t1"]
    assert first.pin == PinStory(20, 10.0, PinEnd.GIVEN_UP)
    assert first.gap == GapStory(StoryEnd.GIVEN_UP, 10.0)


def test_a_job_that_is_silent_for_hours_is_then_traced(rig: Rig) -> None:
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += LONGEST_S + 1
    for i in range(10):
        rig.ask(f"else-{i}", text(17, seed=i), params={"job_id": f"{i}", "is_last_step": True})
    assert "t1" in written(rig)
    assert traced(rig)["t1"].gap.end is StoryEnd.GIVEN_UP


def test_open_records_are_written_as_far_as_known_when_the_engine_stops(
    rig: Rig,
) -> None:
    for n in range(3):
        rig.ask(f"t{n}", text(100, seed=n), params={"job_id": f"j{n}"})
    rig.now += 1.0
    found = traced(rig)
    assert [one.gap for one in found.values()] == [GapStory(StoryEnd.CLOSED, 1.0)] * 3
    assert {one.pin.end for one in found.values()} == {PinEnd.CLOSED}


def test_turns_running_at_shutdown_are_recorded(rig: Rig) -> None:
    rig.add("runs", CONTEXT, params=JOB)
    rig.step()
    rig.add("waits", text(100, seed=1))
    rig.now += 2.0
    found = traced(rig)
    assert (found["runs"].finish, found["waits"].finish) == ("RUNNING", "WAITING")
    assert {one.gap for one in found.values()} == {GapStory(StoryEnd.CLOSED)}
    assert found["runs"].times == TurnTimes(admitted_s=0, scheduled_s=0, end_s=2)
    assert found["waits"].times == TurnTimes(end_s=2)


def test_turns_of_jobs_that_are_not_expected_back_are_recorded_immediately(rig: Rig) -> None:
    rig.add("one", text(100, seed=1), max_tokens=2, params=JOB)
    rig.add("beside", text(100, seed=2), max_tokens=8, params=JOB)
    rig.add("hopeless", text(100, seed=3), params={"job_id": "aborted"})
    rig.abort("hopeless")
    rig.run()
    found = traced(rig)
    assert found["one"].gap == found["hopeless"].gap == GapStory(StoryEnd.NO_GAP)
    assert found["beside"].gap.end is StoryEnd.CLOSED
    hopeless = found["hopeless"]
    assert hopeless.finish == "FINISHED_ABORTED"
    assert hopeless.tokens == TurnTokens(prompt=100, new=100)
    assert hopeless.times == TurnTimes()


# -- times ------------------------------------------------------------------------------------


def test_times_are_reported_as_the_scheduler_observes_them(rig: Rig) -> None:
    """The prompt takes two steps, the answer has three tokens, and steps are a second apart."""
    rig.add("t1", CONTEXT, max_tokens=3, params=LAST)
    rig.now += 2.0
    while "t1" not in rig.finished:
        rig.step()
        rig.now += 1.0
    assert traced(rig)["t1"].times == TurnTimes(
        admitted_s=2, scheduled_s=2, first_token_s=4, end_s=5
    )


def test_an_answer_of_one_token_has_its_first_at_its_end(rig: Rig) -> None:
    rig.add("t1", text(100, seed=1), max_tokens=1, params=LAST)
    rig.now += 2.0
    rig.step()
    times = traced(rig)["t1"].times
    assert (times.first_token_s, times.end_s) == (2, 2)


def test_a_turn_that_is_restored_first_is_scheduled_later(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(extra={"cpu_gib": 0.001, "trace": str(tmp_path / "trace.jsonl")})
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 40.0
    rig.fill()
    rig.add("t2", CONTEXT, params=LAST)
    rig.step()
    rig.now += 3.0
    rig.run()
    found = traced(rig)["t2"]
    assert (found.times.admitted_s, found.times.scheduled_s) == (0, 3)
    assert found.tokens.cpu == 319


def test_a_held_back_job_reports_for_how_long(make_rig: MakeRig, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.jsonl")
    rig = make_rig(
        blocks=32,
        max_model_len=400,
        extra={"cpu_gib": 0.0, "admission": "auto", "trace": trace},
        in_job_order=True,
    )
    vars(rig.gaps.prefills.fit)["seconds"] = lambda behind, tokens: 1e3 * tokens
    for name in ("first", "held"):
        params = {"job_id": name, "is_last_step": True}
        rig.add(name, text(300, seed=len(name)), max_tokens=40, params=params)
    rig.step()
    assert rig.held() == ["held"]
    rig.now += 7.0
    rig.run()
    found = traced(rig)
    assert found["first"].times.held_s == 0
    held = found["held"].times
    assert held.held_s == held.admitted_s == 7
    assert held.pages_s == 0


# -- pages ------------------------------------------------------------------------------------


def gone_to_ssd(rig: Rig) -> None:
    """Create a job whose context is only on SSD, and which is expected back a minute after its
    turn."""
    rig.ask("t1", CONTEXT, params=JOB)
    reader(rig).says("t1", LONG)
    rig.run()
    rig.step()
    rig.run()
    rig.index.clear()
    rig.fill()


def test_pages_promoted_for_a_turn_are_recorded_with_it(rig: Rig) -> None:
    rig.policy = Always(Decision(Tier.STORE))
    gone_to_ssd(rig)
    rig.now += 10.0
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    found = traced(rig)
    assert found["t1"].pages == PageMoves(demoted=21)
    page = rig.half.facts.groups[0].page_bytes
    assert found["t2"].pages == PageMoves(promoted=20, promoted_bytes=20 * page, used=20)
    tokens = found["t2"].tokens
    assert (tokens.vram, tokens.cpu, tokens.ssd, tokens.recomputed) == (0, 0, 320, 9)


def test_pages_promoted_in_advance_are_recorded_with_the_gap(rig: Rig) -> None:
    gone_to_ssd(rig)
    rig.now += 60.5
    rig.wait_for_worker()
    rig.ask("else", text(17, seed=3))
    rig.now += 1.0
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    found = traced(rig)
    assert (found["t1"].pages.demoted, found["t1"].pages.ahead) == (21, 21)
    assert found["t2"].pages == PageMoves(used=20)
    assert found["t2"].tokens.cpu == 320, "they were in CPU memory when it came"


def test_tokens_that_a_job_lost_are_recorded_with_the_turn_that_recomputes_them(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    extra = {"cpu_gib": 0.0, "trace": str(tmp_path / "trace.jsonl")}
    rig = make_rig(blocks=40, max_model_len=512, extra=extra)
    rig.ask("t1", CONTEXT, params=JOB)
    rig.now += 10.0
    rig.fill()
    rig.ask("t2", CONTEXT + text(9, seed=2), params=LAST)
    tokens = traced(rig)["t2"].tokens
    assert (tokens.recomputed, tokens.lost) == (329, 256), "hashes of every eighth block are kept"


# -- every turn, and failures -----------------------------------------------------------------


def test_every_turn_has_one_record_and_counters_agree(rig: Rig) -> None:
    for turn in range(3):
        for job in range(4):
            params = {"job_id": f"j{job}", "is_last_step": turn == 2}
            prompt = text(60 + 40 * turn, seed=job)
            rig.ask(f"j{job}-{turn}", prompt, params=params)
        rig.now += 3.0
        rig.step()
    rig.ask("of no job", [1, 2, 3], salt="alone")
    sums = {
        name: rig.count(f"prompt_tokens_{name}") for name in ("vram", "cpu", "ssd", "recomputed")
    }
    found = traced(rig).values()
    assert len(found) == rig.count("turns") == 13
    assert sum(one.tokens.vram for one in found) == sums["vram"]
    assert sum(one.tokens.cpu + one.tokens.ssd for one in found) == sums["cpu"]
    assert sum(one.tokens.recomputed for one in found) == sums["recomputed"]
    assert sum(one.pin.blocks > 0 for one in found) == rig.count("pins")


def test_a_failing_trace_disturbs_no_request(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").unlink()
    (tmp_path / "trace.jsonl").mkdir()
    rig.ask("t1", CONTEXT, params=LAST)
    rig.ask("t2", CONTEXT, params=LAST)
    rig.close()
    assert rig.gaps.log.trace.dropped == 2
    assert rig.count("hook_errors") == 0
