from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tiered_kv.bench.agents.figures import compare
from tiered_kv.bench.agents.results import JobDone, Run, TurnDone
from tiered_kv.bench.replay.agreement import agreement, difference
from tiered_kv.bench.replay.report import closed, ratios, row

TOKENS = 40


def turn(number: int = 1, *, cached: int = 0, **given: object) -> TurnDone:
    base = TurnDone(number, 0.0, 0.5, 1.0, prompt_tokens=100, cached_tokens=cached, output_tokens=4)
    return replace(base, **given)  # type: ignore[arg-type]


def run(
    server: str,
    seconds: Sequence[float],
    *,
    load: str = "pressure",
    number: int = 0,
    failed: Sequence[int] = (),
    turns: tuple[TurnDone, ...] | None = None,
) -> Run:
    """Return a run of jobs job-0, job-1, … that took the given seconds."""
    jobs = tuple(
        JobDone(
            name=f"job-{at}",
            began_s=float(at),
            ended_s=at + s,
            turns=turns if turns is not None else (turn(),),
            error="no answer" if at in failed else None,
        )
        for at, s in enumerate(seconds)
    )
    return Run(server, load, number, 0, 0.5, jobs, (), {}, cpu_s=10.0, rss_bytes=1 << 30)


def spoken(server: str, noise: float, *, seed: int, load: str = "pressure", turns: int = 60) -> Run:
    """Return a run of one job whose logprobs differ from the model's true logprobs by about
    ``noise`` nats."""
    truth = np.random.default_rng(0).exponential(2.0, (turns, TOKENS))
    heard = truth + np.random.default_rng(seed).normal(0, noise, truth.shape)
    done = tuple(
        turn(at + 1, tokens=tuple(range(TOKENS)), logprobs=tuple((-line).tolist()))
        for at, line in enumerate(heard)
    )
    return run(server, [5.0], load=load, turns=done)


def with_wrong_page(right: Run, at: int) -> Run:
    """Return the run as if one turn had read a page of another context. The logprobs of that turn
    are replaced by unrelated ones."""
    (job,) = right.jobs
    wrong = np.random.default_rng(9).exponential(2.0, TOKENS)
    turns = list(job.turns)
    turns[at] = replace(turns[at], logprobs=tuple((-wrong).tolist()))
    return replace(right, jobs=(replace(job, turns=tuple(turns)),))


def with_a_page_that_matters_little(right: Run, at: int) -> Run:
    """Return the run as if one turn had read a page of zeros in the middle of its context.

    On SmolLM2, such a page raised the mean of a turn's logprob differences from 0.02 to 0.23 nats,
    but their median only to 0.06.
    """
    (job,) = right.jobs
    moved = np.random.default_rng(9).weibull(0.5, TOKENS) * 0.11
    turns = list(job.turns)
    heard = tuple((np.array(turns[at].logprobs) - moved).tolist())
    turns[at] = replace(turns[at], logprobs=heard)
    return replace(right, jobs=(replace(job, turns=tuple(turns)),))


def test_a_row_has_the_times_of_jobs_that_finished_and_names_the_others() -> None:
    found = row("stock", "pressure", [run("stock", [2, 4, 6, 100], failed=[3])], forced=True)
    assert (found["mean_s"], found["p50_s"]) == (4.0, 4.0)
    assert found["p95_s"] == pytest.approx(5.8)
    assert found["jobs"] == 3
    assert found["unfinished"] == ["job-3 (round 1)"]
    assert found["done_per_s"] == pytest.approx(3 / 103)


def test_what_was_recomputed_is_what_no_tier_had_and_the_turn_before_did() -> None:
    told = {"vram": 30, "cpu": 30, "recomputed": 40}
    first, second = turn(1, prompt_tokens=60, output_tokens=15), turn(2, sources=told)
    runs = [run("tiered", [1.0], turns=(first, second))]
    found = row("tiered", "pressure", runs, forced=True)
    assert found["recomputed_fraction"] == (40 - (100 - 60 - 15)) / 160


def test_closed_is_the_part_of_the_gap_between_stock_and_the_bound() -> None:
    runs = [run("stock", [10, 10]), run("tiered", [7, 5]), run("bound", [5, 5])]
    assert closed(runs) == pytest.approx(0.8)
    assert closed(runs, 100) == pytest.approx(0.6)
    assert closed(runs[:2]) is None
    assert closed([run("stock", [5]), run("tiered", [5]), run("bound", [6])]) is None


def test_a_round_counts_with_the_jobs_that_finished_on_both_servers() -> None:
    runs = [
        run("reach", [10, 90], failed=[1]),
        run("tiered", [11, 11]),
        run("tiered", [99, 99], number=1),
        run("reach", [99, 99], number=2),
    ]
    found = compare(runs, "tiered", "reach")
    assert found is not None
    assert found.rounds == pytest.approx((1.1,))
    assert found.mean.value == pytest.approx(1.1)
    assert found.mean.low is None
    assert found.jobs == 1
    assert compare(runs, "tiered", "bound") is None
    assert compare([run("reach", [9], failed=[0]), run("tiered", [9])], "tiered", "reach") is None


def test_tiered_kv_is_compared_with_each_server_under_each_load_but_idle() -> None:
    names = ("stock", "tiered", "reach", "bound", "control")
    runs = [run(name, [2.0, 4.0], load=load) for load in ("idle", "beyond") for name in names]
    runs += [run(name, [3.0, 9.0], load="beyond", number=1) for name in ("stock", "tiered")]
    found = ratios(runs)
    assert [(one["load"], one["server"]) for one in found] == [
        ("beyond", "stock"),
        ("beyond", "reach"),
        ("beyond", "bound"),
    ]
    assert found[0]["rounds"] == [1.0, 1.0]
    assert found[0]["mean"] == found[0]["p90"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert found[1]["mean"]["low"] is None, "one round has no interval"


def test_the_interval_is_that_of_pairs_and_not_of_the_times_themselves() -> None:
    """tiered-kv takes 10% less time than stock for each job, and jobs take from 1 s to 128 s. The
    confidence intervals of the ratios have no width, although the times differ."""
    times = [float(2**at) for at in range(8)]
    runs = []
    for number in range(3):
        runs.append(run("stock", times, number=number))
        runs.append(run("tiered", [0.9 * time for time in times], number=number))
    found = compare(runs, "tiered", "stock")
    assert found is not None
    for one in (found.mean, found.p90, found.p95):
        assert (one.value, one.low, one.high) == pytest.approx((0.9, 0.9, 0.9))


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_another_run_with_as_much_noise_agrees(noise: float) -> None:
    runs = [spoken("stock", noise, seed=1), spoken("stock", noise, seed=2, load="beyond")]
    ours = spoken("tiered", noise, seed=3)
    assert agreement(ours, [*runs, ours]) is True


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("at", [0, 31, 59])
def test_one_wrong_page_in_sixty_turns_does_not_agree(noise: float, at: int) -> None:
    runs = [spoken("stock", noise, seed=1), spoken("stock", noise, seed=2, load="beyond")]
    ours = with_wrong_page(spoken("tiered", noise, seed=3), at)
    assert agreement(ours, [*runs, ours]) is False


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_a_wrong_page_that_most_tokens_ignore_does_not_agree(noise: float) -> None:
    runs = [spoken("stock", noise, seed=1), spoken("stock", noise, seed=2, load="beyond")]
    ours = with_a_page_that_matters_little(spoken("tiered", noise, seed=3), 17)
    assert agreement(ours, [*runs, ours]) is False


def test_the_yardstick_is_stocks_own_widest_difference() -> None:
    """At idle, stock repeats its answers bit for bit, so a noisy run of tiered-kv does not agree
    with them. It agrees if a busy run of stock or stock_dense is as noisy. A busy run of the bound
    does not count."""
    idle = [replace(spoken("stock", 0.0, seed=1, load="idle"), round=at) for at in range(2)]
    busy = spoken("stock", 0.1, seed=2)
    ours = spoken("tiered", 0.1, seed=3, load="idle")
    assert agreement(ours, [*idle, ours]) is False
    assert agreement(ours, [*idle, busy, ours]) is True
    assert agreement(ours, [*idle, replace(busy, server="stock_dense"), ours]) is True
    assert agreement(ours, [*idle, replace(busy, server="bound"), ours]) is False


def test_a_different_answer_does_not_agree() -> None:
    one = spoken("stock", 0.0, seed=1)
    (job,) = one.jobs
    said = replace(job.turns[0], tokens=(7,) * TOKENS)
    other = replace(one, server="tiered", jobs=(replace(job, turns=(said, *job.turns[1:])),))
    found = difference(other, one)
    assert found is not None
    assert found.other_answers == 1
    assert agreement(other, [one, replace(one, load="idle"), other]) is False


def test_without_a_second_run_of_stock_there_is_no_verdict() -> None:
    one, ours = spoken("stock", 0.0, seed=1), spoken("tiered", 0.0, seed=2)
    assert agreement(ours, [one, ours]) is None
    assert row("tiered", "pressure", [one, ours], forced=True)["agrees"] is None


def test_idle_plays_fewer_jobs_and_is_still_compared() -> None:
    many = run("stock", [5.0, 5.0], turns=spoken("stock", 0.0, seed=1).jobs[0].turns)
    few = replace(many, load="idle", jobs=many.jobs[:1])
    found = difference(few, many)
    assert found is not None
    assert (found.other_answers, found.tokens) == (0, 60 * TOKENS)
