"""A fold tells how ours does against the best of the others, and how sure that is."""

from __future__ import annotations

import pytest

from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.study.cells import Bench, Place, Source
from tiered_kv.bench.sim.study.folds import Fold, every_fold, run_folds


def test_there_are_at_most_eight_folds_of_both_kinds_of_jobs_with_and_without_tiers() -> None:
    folds = every_fold("recording")
    assert len(folds) <= 8
    assert {fold.source.workload for fold in folds} == {"coding-agents", "swe-agent"}
    for workload in ("coding-agents", "swe-agent"):
        tiers = {bool(fold.tiers) for fold in folds if fold.source.workload == workload}
        assert tiers == {False, True}


def test_every_other_server_has_the_same_tiers_but_for_the_bound() -> None:
    for fold in every_fold("recording"):
        *compared, bound = map(server, fold.servers())
        assert {(one.cpu, one.ssd) for one in compared} == {
            ("cpu" in fold.tiers, "ssd" in fold.tiers)
        }
        assert bound.infinite


def test_a_small_fold_is_run_and_told(bench: Bench) -> None:
    """Ours and the others on jobs of a few turns; the best of the others is named."""
    fold = Fold(Place("rtx4090-24", "llama-3.1-8b", pool_tokens=16_000), Source("original", 40), "")
    result = run_folds([fold], bench, lambda _: None, seeds=[0, 1])
    (row,) = result["folds"]
    assert set(row["mean_s"]) == set(fold.servers())
    assert row["best_other"] in fold.servers()[2:-1]
    assert row["mean_s"][row["best_other"]] == min(
        row["mean_s"][name] for name in fold.servers()[2:-1]
    )
    assert result["geomean_over_best"] == pytest.approx(row["over_best"]["value"])
