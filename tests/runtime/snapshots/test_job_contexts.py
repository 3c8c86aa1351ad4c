"""The contexts of waiting jobs are kept, limited by memory and by the number of jobs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from tests.runtime.snapshots.asking import fork, result, step, take
from tiered_kv.connectors.runtime import job_table
from tiered_kv.connectors.runtime.snapshots import context_pages
from tiered_kv.connectors.runtime.snapshots.context_pages import (
    MOST_PARENTS,
    MOST_TOKENS,
    TOKEN_BYTES,
    Context,
    Contexts,
)
from tiered_kv.policies.base import JobKey
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig


def job(name: object) -> JobKey:
    return JobKey("", str(name))


def context(tokens: Sequence[int], **more: object) -> Context:
    return Context(tokens, len(tokens) - 1, len(tokens), None, 1, (), {"temperature": 0.0, **more})


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_contexts_take_no_more_memory_than_documented(tokens: int) -> None:
    contexts, many = Contexts(), MOST_TOKENS // (tokens + 100)
    tracemalloc.start()
    for i in range(many):
        own = [1000 + i + at for at in range(tokens)]
        contexts.remember(job(f"job {i}"), context(own, seed=i))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(contexts) < many, "the oldest are forgotten"
    assert used < MOST_TOKENS * TOKEN_BYTES


def test_long_names_and_parameters_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_pages, "MOST_TOKENS", 10_000)
    contexts = Contexts()
    for i in range(100):
        contexts.remember(job(i), context([1], stop=["x" * 36_000]))
    assert len(contexts) < 10
    contexts.clear()
    for i in range(100):
        contexts.remember(job(f"{i}" + "x" * 36_000), context([1]))
    assert len(contexts) < 10


def test_tokens_that_forks_share_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_pages, "MOST_TOKENS", 50_000)
    contexts, shared = Contexts(), list(range(20_000))
    contexts.remember(job("other"), context(list(range(10_000))))
    for i in range(64):
        contexts.remember(job(f"fork {i}"), context(shared))
    assert contexts.get(job("other")) is not None
    for i in range(63):
        contexts.forget(job(f"fork {i}"))
    contexts.remember(job("fork 63"), context(shared))  # the same context again
    contexts.remember(job("late"), context(list(range(15_000))))
    assert contexts.get(job("other")) is not None
    contexts.remember(job("later"), context(list(range(15_000))))
    assert contexts.get(job("other")) is None, "the tokens of the last fork still count"
    contexts.forget(job("fork 63"))
    contexts.remember(job("last"), context(list(range(15_000))))
    assert contexts.get(job("late")) is not None, "and no longer once it is forgotten"


@pytest.fixture
def rig(tmp_path_factory: pytest.TempPathFactory) -> object:
    root = tmp_path_factory.mktemp("root") / "snapshots"
    extra = {"cpu_gib": 0.001, "admission": "off", "snapshot_path": str(root)}
    with SecondRig(RigOptions(extra=extra)) as made:
        yield made


def test_contexts_of_forgotten_jobs_are_forgotten(
    rig: SecondRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_table, "MAX_JOBS", 5)
    prompt = text(40, seed=1)
    for i in range(9):
        rig.ask(f"r{i}", prompt, params={"job_id": f"job{i}"})
    rig.add("slow", prompt, max_tokens=60, params={"job_id": "slow"})
    step(rig)
    for i in range(9, 18):
        rig.ask(f"r{i}", prompt, params={"job_id": f"job{i}"})
    assert "slow" in rig.finished, "a turn whose job was forgotten meanwhile"

    contexts = rig.half.snapshots.contexts
    assert len(contexts) == len(rig.gaps.manager.jobs) == 5
    assert contexts.get(job("job17")) is not None
    rig.ask("last", prompt, params={"job_id": "job17", "is_last_step": True})
    assert len(contexts) == 4


def test_a_long_chain_of_forks_lists_its_last_parents(rig: SecondRig) -> None:
    rig.ask("r", text(40, seed=1), params={"job_id": "fork 0"})
    for i in range(MOST_PARENTS + 5):
        result(rig, fork(rig, f"fork {i}", f"fork {i + 1}"))
    last = rig.half.snapshots.contexts.get(job(f"fork {MOST_PARENTS + 5}"))
    assert last is not None
    assert last.parents == tuple(f"fork {i}" for i in range(5, MOST_PARENTS + 5))
    result(rig, take(rig, f"fork {MOST_PARENTS + 5}", "last"))
