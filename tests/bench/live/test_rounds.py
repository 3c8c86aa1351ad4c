"""Prompt texts and job arrivals for measurements of running servers."""

from __future__ import annotations

import pytest

from tests.bench.agents.stub_server import common
from tiered_kv.bench.live.rounds import arrivals_s
from tiered_kv.bench.live.texts import Texts
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn

SIZES = SimJob(
    "made",
    0.0,
    (SimTurn(0, 40, 3, 0.5, tool="ls"), SimTurn(43, 10, 3, 0.0), SimTurn(28, 5, 2, 0.0)),
)


def words(texts: Texts, sizes: SimJob) -> list[str]:
    return texts.job(sizes).turns[0].text.split()


def test_a_job_s_texts_have_its_sizes_and_its_gaps() -> None:
    first, second, third = Texts("n1", 0.5).job(SIZES).turns
    assert [len(turn.text.split()) for turn in (first, second, third)] == [20, 5, 2]
    assert [turn.output for turn in (first, second, third)] == [3, 3, 2]
    assert (first.gap_s, first.tool) == (0.5, "ls")
    assert (first.kept, second.kept) == (1.0, 1.0)
    assert third.kept == pytest.approx(28 / 56), "half of its context was compacted"


def test_no_prompt_of_a_run_starts_as_one_of_another_run() -> None:
    """Prompts of two runs share at most their first word. Otherwise, the second run on a server
    would hit the prefix cache of the first."""
    recorded = {"recorded": ("the same words",)}
    for sizes in (SIZES, SimJob("recorded", 0.0, (SimTurn(0, 9, 1, 0.0),))):
        one, other = (words(Texts(nonce, 1.0, recorded), sizes) for nonce in ("one", "two"))
        assert common(one, other) <= 1


def test_copies_of_a_recorded_job_have_its_texts_under_their_own_name() -> None:
    recorded = {"a": ("first", " second")}
    turns = (SimTurn(0, 5, 1, 0.0), SimTurn(6, 7, 1, 0.0))
    made = Texts("n1", 1.0, recorded).job(SimJob("a-copy1", 0.0, turns))
    assert [turn.text for turn in made.turns] == ["n1 a-copy1 first", " second"]


def test_jobs_that_share_a_prefix_do_so_in_one_run() -> None:
    texts = Texts("n1", 1.0)
    turns = (SimTurn(0, 30, 1, 0.0),)
    first, second = (words(texts, SimJob(name, 0.0, turns, "system", 20)) for name in "ab")
    assert len(first) == len(second) == 30
    assert 20 <= common(first, second) <= 22


def test_one_seed_gives_the_same_arrivals_at_every_rate_only_closer_together() -> None:
    slow, fast = arrivals_s(0.5, 100.0, 3), arrivals_s(1.0, 50.0, 3)
    assert slow == pytest.approx([2 * at for at in fast])
    assert slow[0] == 0.0
    assert max(slow) < 100.0
    assert 30 <= len(slow) <= 75
    assert arrivals_s(0.5, 100.0, 4) != slow
