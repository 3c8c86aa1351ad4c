"""An engine in observe mode estimates how many prompt tokens the connector would save. On the same
jobs, the connector then saves about that many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.runtime.observe.agents import Script, play, script
from tiered_kv.cli.app import app
from tiered_kv.connectors.runtime.views.questions import answer
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.engine.model import LAYERS
from tiered_kv.testing.engine.rig import RigOptions, SecondRig
from tiered_kv.testing.policies import FixedPin
from tiered_kv.trace.trace_reader import TraceReader

PAGE_BYTES = 16 * CELL * LAYERS
CLOSE = 0.15
SEEDS = range(3)


def rig(mode: str, slots: int, **settings: Any) -> SecondRig:
    extra = {
        "mode": mode,
        "cpu_gib": slots * PAGE_BYTES / 2**30,
        "policy": "occupancy",
        **settings,
    }
    return SecondRig(RigOptions(blocks=60, max_batched_tokens=64, extra=extra))


def found(one: SecondRig) -> int:
    """Return the number of prompt tokens that were not computed."""
    return one.count("prompt_tokens_vram") + one.count("prompt_tokens_cpu")


def would_have_saved(one: SecondRig) -> dict[str, int]:
    assert one.half.observation is not None
    saved: dict[str, int] = one.half.observation.would_have_saved
    return saved


def both(given: Script, slots: int, **settings: Any) -> tuple[dict[str, int], int]:
    """Play a script in observe mode and in manage mode. Returns the estimate of the first run, and
    the tokens that the second run saves."""
    with rig("observe", slots, **settings) as observed:
        play(observed, given)
        said, alone = dict(would_have_saved(observed)), found(observed)
        assert observed.count("prompt_tokens_cpu") == 0
    with rig("manage", slots, **settings) as managed:
        play(managed, given)
        return said, found(managed) - alone


@pytest.mark.parametrize("seed", SEEDS)
def test_cpu_memory_for_all_jobs(seed: int) -> None:
    said, saved = both(script(seed), slots=300)
    assert saved > 1000, "jobs are under pressure"
    assert sum(said.values()) == pytest.approx(saved, rel=CLOSE)
    assert said["cpu"] > 0
    assert said["vram"] > 0
    assert said["ssd"] == 0


def pinned_beside_rivals(one: SecondRig) -> int:
    """Run a turn whose context is pinned, fill the rest of VRAM with other requests, and run the
    job's next turn. Returns the number of prompt tokens that it finds."""
    one.policy = FixedPin(ttl_s=60.0)
    context = text(240, seed=1)
    one.ask("first", context, params={"job_id": "a"})
    before = found(one)
    for n in range(6):
        one.now += 1.0
        one.ask(f"rival{n}", text(400, seed=100 + n))
    one.ask("second", [*context, *one.outputs["first"], *text(30, seed=2)], params={"job_id": "a"})
    return found(one) - before


def test_a_pin_alone() -> None:
    with rig("observe", 0, admission="off") as observed:
        assert pinned_beside_rivals(observed) == 0, "the rivals took its blocks"
        said = dict(would_have_saved(observed))
    with rig("manage", 0, admission="off") as managed:
        assert pinned_beside_rivals(managed) == said["vram"] == 240
    assert said["cpu"] == said["ssd"] == 0


def test_a_pin_that_would_have_been_released_saves_nothing() -> None:
    def crowded(one: SecondRig) -> int:
        one.policy = FixedPin(ttl_s=60.0)
        context = text(240, seed=1)
        one.ask("first", context, params={"job_id": "a"})
        before = found(one)
        for n in range(2):  # together they need all of VRAM
            one.add(f"rival{n}", text(440, seed=100 + n), max_tokens=30)
        one.run()
        one.ask("second", [*context, *text(30, seed=2)], params={"job_id": "a"})
        return found(one) - before

    with rig("observe", 0, admission="off") as observed:
        alone = crowded(observed)
        assert would_have_saved(observed) == {"vram": 0, "cpu": 0, "ssd": 0}
        assert observed.count("pins_ended_pressure") == 1
    with rig("manage", 0, admission="off") as managed:
        assert crowded(managed) == alone


def test_an_expired_pin_saves_nothing() -> None:
    with rig("observe", 0, admission="off") as observed:
        observed.policy = FixedPin(ttl_s=2.0)
        context = text(240, seed=1)
        observed.ask("first", context, params={"job_id": "a"})
        for n in range(3):
            observed.now += 1.0
            observed.ask(f"rival{n}", text(600, seed=100 + n))
        observed.ask("second", [*context, *text(30, seed=2)], params={"job_id": "a"})
        assert would_have_saved(observed)["vram"] == 0
        assert observed.count("pins_ended_expired") == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ssd_below_a_small_cpu_memory(tmp_path: Path, seed: int) -> None:
    on_disk = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 1, "codec": "raw"}
    said, saved = both(script(seed), slots=90, admission="off", **on_disk)
    assert saved > 1000
    assert sum(said.values()) == pytest.approx(saved, rel=CLOSE)
    assert said["ssd"] > 0


def test_pages_promoted_for_turns_count_as_used(tmp_path: Path) -> None:
    on_disk = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 1, "codec": "raw"}
    with rig("observe", 90, admission="off", **on_disk) as observed:
        play(observed, script(1))
        for _ in range(2):  # the last reports may still be in flight
            observed.now += 1.0
            observed.ask(f"last{observed.now}", text(40, seed=3))
        used = observed.index.promoted.used
        assert used > 0.5 * observed.count("pages_promoted") > 0
        assert observed.count("pages_restored") >= used
        assert not (tmp_path / "ssd").exists()


def test_if_vram_holds_all_jobs_only_partial_blocks_would_be_restored() -> None:
    said, saved = both(script(1, jobs=2), slots=300)
    assert said == {"vram": 0, "cpu": saved, "ssd": 0}
    assert saved < 2 * 5 * 16, "less than a block a turn"


def test_pages_from_before_a_reset_would_not_be_found() -> None:
    with rig("observe", 300) as observed:
        play(observed, script(2, jobs=3))
        before = dict(would_have_saved(observed))
        observed.reset_cache()
        play(observed, script(2, jobs=1, turns=1))
        assert would_have_saved(observed) == before


def test_trace_status_and_stats_report_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with rig("observe", 300, trace=str(path)) as observed:
        play(observed, script(0))
        said = dict(would_have_saved(observed))
        status = answer(observed.half, {"ask": "status"})
        stats = observed.half.stats.take()
        later = observed.half.stats.take()
    assert status["mode"] == "observe"
    assert status["would_have_saved"] == said
    assert {tier: stats[f"would_have_saved_{tier}"] for tier in said} == said
    assert not any(name.startswith("would") for name in later), "told once"

    reader = TraceReader(path)
    records = list(reader)
    assert {header.mode for header in reader.headers} == {"observe"}
    told = {tier: sum(getattr(one.would_have, tier) for one in records) for tier in said}
    assert told == said
    for one in records:
        seen, tokens = one.would_have, one.tokens
        assert tokens.cpu == tokens.ssd == 0
        assert seen.vram + seen.cpu + seen.ssd <= tokens.recomputed

    ran = CliRunner().invoke(app, ["trace", "analyze", str(path), "--json"])
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.output)["would_have_saved"]
    assert {tier: figures[tier] for tier in said} == said
    assert figures["tokens"] == sum(said.values())
    words = CliRunner().invoke(app, ["trace", "analyze", str(path)]).output
    assert f"{sum(said.values()):,} tokens" in words
    assert "would have saved" in words
