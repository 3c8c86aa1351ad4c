"""Answers to what-if questions, computed from a trace alone and compared with a simulated run of
the other server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.sim.what_if.recordings import CPU_BYTES, PLACE, TRUE, jobs, served
from tests.trace.records import HEADER, lines_of, record
from tiered_kv.bench.sim.what_if.answer import WhatIf, what_if
from tiered_kv.bench.sim.what_if.recording import WhatIfError
from tiered_kv.bench.sim.workloads.workload import SimJob
from tiered_kv.errors import ConfigError
from tiered_kv.trace.trace_header import TraceHeader

FEW_PER_CENT = 0.06


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulate the jobs under the ``lru`` policy, with requests served in arrival order. Returns
    the path of the trace."""
    path = tmp_path_factory.mktemp("lru") / "trace.jsonl"
    served("lru", jobs(), path)
    return path


@pytest.fixture(scope="module")
def stock(trace: Path) -> WhatIf:
    return what_if(trace, "stock")


def rewritten(trace: Path, folder: Path, **changes: object) -> Path:
    """Return a copy of the trace with changed header fields. A field that is None is removed."""
    path = folder / "rewritten.jsonl"
    first, *rest = lines_of(trace)
    header = {name: value for name, value in (first | changes).items() if value is not None}
    path.write_text("".join(json.dumps(one) + "\n" for one in (header, *rest)))
    return path


def test_the_recorded_policy_is_simulated_first_and_its_times_match(
    stock: WhatIf,
) -> None:
    assert (stock.recorded_policy, stock.policy) == ("lru", "stock")
    assert (stock.jobs, stock.turns) == (24, 24 * 8)
    for name, ratio in stock.simulated_over_recorded.items():
        assert ratio == pytest.approx(1, abs=FEW_PER_CENT), name
    assert stock.simulated.recomputed == pytest.approx(stock.recorded.recomputed, abs=0.01)
    assert stock.recorded.cpu > 0.2, "CPU memory has no part in this recording"
    assert stock.costs["error"] < 0.05
    assert stock.costs["step_s"] == pytest.approx(TRUE.step + TRUE.weights, rel=0.05)
    assert stock.costs["token_s"] == pytest.approx(TRUE.token, rel=0.05)
    assert stock.costs["copy_bytes_per_s"] == pytest.approx(PLACE.link, rel=0.05)


def test_another_servers_times_are_predicted(stock: WhatIf) -> None:
    truth = served(None, jobs()).summary()
    assert truth["mean_s"] > 2 * stock.recorded.mean_s, "nothing to tell apart"
    assert stock.what_if.mean_s == pytest.approx(truth["mean_s"], rel=FEW_PER_CENT)
    assert stock.what_if.p95_s == pytest.approx(truth["p95_s"], rel=FEW_PER_CENT)
    assert stock.what_if.recomputed == pytest.approx(truth["recomputed"], abs=0.03)
    assert stock.what_if.cpu == stock.what_if.ssd == 0
    assert stock.what_if.again > 10 * max(1, stock.simulated.again)
    ratio = stock.what_if.mean_s / stock.simulated.mean_s
    assert stock.what_if_over_simulated["mean"] == pytest.approx(ratio)
    assert [one.job for one in stock.by_job] == [job.name for job in sorted_jobs()]


def sorted_jobs() -> list[SimJob]:
    return sorted(jobs().jobs, key=lambda job: (round(job.arrives_s, 3), job.name))


def test_the_answer_is_the_same_every_time(trace: Path, stock: WhatIf) -> None:
    assert what_if(trace, "stock") == stock


def test_a_server_without_tiers_in_job_order_predicts_one_in_arrival_order(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    served("occupancy", jobs(), path, cpu_bytes=0, job_order=True)
    found = what_if(path, "continuum-fixed", job_order=False)
    assert found.job_order == (True, False)
    assert found.simulated_over_recorded["mean"] == pytest.approx(1, abs=0.1)
    truth = served("continuum-fixed", jobs(), cpu_bytes=0).summary()
    assert found.what_if.mean_s == pytest.approx(truth["mean_s"], rel=0.1)


def test_a_third_party_policy_is_named_by_its_module(trace: Path) -> None:
    own = what_if(trace, "tiered_kv.policies.baselines.unpinned:Lru")
    assert own.what_if == own.simulated
    assert any("external inputs" in one for one in own.limits)
    with pytest.raises(ConfigError, match="nobody"):
        what_if(trace, "nobody")


def test_a_trace_cannot_make_the_command_import_a_module(trace: Path, tmp_path: Path) -> None:
    own = "tiered_kv.policies.baselines.unpinned:Lru"
    strange = rewritten(trace, tmp_path, policy=own, eviction="no.such:Rule")
    with pytest.raises(WhatIfError, match="pass --recorded to import it"):
        what_if(strange, "stock")
    named = what_if(strange, "stock", recorded=own)
    assert named.recorded_policy == own
    assert named.simulated == what_if(trace, "stock").simulated
    assert any("not by 'no.such:Rule'" in one for one in named.limits)


def test_of_a_long_trace_the_first_turns_are_simulated(trace: Path) -> None:
    found = what_if(trace, "stock", most=60)
    assert found.turns == 60
    assert found.jobs < 24
    assert any(one.startswith("Only the first 60 turns are simulated") for one in found.limits)


def test_a_truncated_trace_is_read_as_far_as_it_goes(trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    whole = trace.read_bytes()
    cut.write_bytes(whole[: 2 * len(whole) // 3])
    found = what_if(cut, "lru")
    assert 60 < found.turns < 24 * 8
    assert found.bad_lines == 0
    assert found.simulated_over_recorded["mean"] == pytest.approx(1, abs=0.15)


def test_a_trace_of_an_earlier_version_is_simulated_with_what_it_lacks_named(
    trace: Path, tmp_path: Path
) -> None:
    new = ("page_bytes", "groups", "step_tokens", "running", "context_tokens", "eviction")
    found = what_if(rewritten(trace, tmp_path, **dict.fromkeys(new)), "stock")
    assert found.what_if.mean_s == pytest.approx(what_if(trace, "stock").what_if.mean_s, rel=0.02)
    assert any("Tiers are assumed to hold everything" in one for one in found.limits)
    assert any("up to 2,048 tokens of 256 requests" in one for one in found.limits)


def test_what_cannot_be_simulated_is_refused_with_the_reason(trace: Path, tmp_path: Path) -> None:
    empty, headless, few, far = (tmp_path / name for name in ("empty", "headless", "few", "far"))
    empty.touch()
    lines = trace.read_text().splitlines(keepends=True)
    headless.write_text("".join(lines[1:]))
    few.write_text("".join([HEADER.to_line() + "\n", record().to_line() + "\n"]))
    later = [json.loads(one) | {"arrived": 1e10, "job": "later"} for one in lines[1:2]]
    far.write_text("".join([*lines, *(json.dumps(one) + "\n" for one in later)]))
    for path, said in (
        (empty, "no turn follows a header"),
        (headless, "no turn follows a header"),
        (few, "record more turns"),
        (far, "more than ten years: shorten the trace"),
        (rewritten(trace, tmp_path, groups=["full", "state"]), "several types of KV"),
    ):
        with pytest.raises(WhatIfError, match=said):
            what_if(path, "stock")
    with pytest.raises(WhatIfError, match="no turn follows a header"):
        what_if(rewritten(trace, tmp_path, vram_blocks=-1), "stock")
    for blocks in (0, 2**50):
        with pytest.raises(WhatIfError, match=f"vram_blocks={blocks} "):
            what_if(rewritten(trace, tmp_path, vram_blocks=blocks), "stock")
    with pytest.raises(WhatIfError, match="no job of"):
        what_if(rewritten(trace, tmp_path, vram_blocks=2), "stock")
    with pytest.raises(FileNotFoundError):
        what_if(tmp_path / "nowhere", "stock")


def test_turns_of_other_engines_are_left_out(trace: Path, tmp_path: Path) -> None:
    other = TraceHeader.from_json(lines_of(trace)[0])
    path = tmp_path / "two.jsonl"
    stray = replace(record(job="stray"), replica=1)
    extra = [replace(other, replica=1).to_line(), stray.to_line()]
    path.write_text(trace.read_text() + "".join(f"{line}\n" for line in extra))
    found = what_if(path, "stock")
    assert found.turns == 24 * 8
    assert any(one.startswith("Turns of other engines are left out: 1.") for one in found.limits)


def test_settings_of_the_operator_stay_out_of_the_simulated_servers(
    trace: Path, stock: WhatIf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.jsonl"
    monkeypatch.setenv("TIERED_KV_TRACE", str(mine))
    monkeypatch.setenv("TIERED_KV_PIN_FRACTION", "0")
    assert what_if(trace, "stock") == stock
    assert not mine.exists()
    assert os.environ["TIERED_KV_TRACE"] == str(mine)


def test_the_trace_describes_the_machine(trace: Path) -> None:
    header = TraceHeader.from_json(lines_of(trace)[0])
    assert (header.page_bytes, header.groups) == (16 * 23_040, ("full",))
    assert (header.step_tokens, header.running) == (2_048, 64)
    assert header.tiers_bytes == {"cpu": CPU_BYTES}
    assert not header.job_order
