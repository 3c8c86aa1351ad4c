"""The doctor reports whether cores are free to compress pages, and how much compression saves."""

from __future__ import annotations

import pytest

from tests.doctor.told import by_check
from tests.doctor.web import metrics, serve, text
from tiered_kv.config import TierConfig
from tiered_kv.doctor.cold_memory import (
    BIND,
    PAGES_CHECK,
    check_cold_pages,
    check_spare_cores,
)
from tiered_kv.doctor.finding import Finding
from tiered_kv.doctor.running_server import check_server

ON = TierConfig()
FULL = {
    "cpu_slots": 1000,
    "cpu_pages": 1300,
    "cpu_pages_compressed": 900,
    "cpu_slots_compressed": 600,
    "pages_compressed": 5000,
    "pages_evicted": 40,
    "compression_seconds": 12.5,
    "decompression_seconds": 3,
}
NONE_COMPRESSED = {"cpu_pages_compressed": 0, "cpu_slots_compressed": 0, "pages_compressed": 0}


def cores(gpus: int, usable: int, bind: str | None = None, config: TierConfig = ON) -> Finding:
    env = {} if bind is None else {BIND: bind}
    return check_spare_cores(config, env, gpus, usable, frozenset(range(max(usable, 1))))


@pytest.mark.parametrize(
    ("gpus", "usable", "left"), [(1, 2, 1), (1, 1, 0), (8, 8, 0), (8, 4, 0), (4, 16, 12)]
)
def test_each_rank_of_a_gpu_keeps_a_core_busy(gpus: int, usable: int, left: int) -> None:
    found = cores(gpus, usable)
    if left:
        assert found.verdict.value == "ok"
        assert found.seen.startswith(f"{left} of {usable} cores are left")
    else:
        assert found.verdict.value == "warn"
        assert f"container or service {gpus + 1} cores or more" in found.advice


@pytest.mark.parametrize(
    ("usable", "bind", "left"),
    [
        (2, None, 0),  # vLLM then leaves no core free
        (3, "auto", 2),
        (8, "0-7", 0),
        (8, "0-5", 2),
        (8, "0-2|3-5,6", 1),
        (8, "0-63", 0),
        (8, "nobind", 0),
    ],
)
def test_a_model_on_cpus_takes_the_cores_that_it_is_bound_to(
    usable: int, bind: str | None, left: int
) -> None:
    found = cores(0, usable, bind)
    if left:
        assert found.seen.startswith(f"{left} of {usable} cores are left")
    else:
        assert found.verdict.value == "warn"
        assert BIND in found.advice


@pytest.mark.parametrize(
    "config", [TierConfig(cpu_gib=0), TierConfig(codec="raw"), TierConfig(eviction="lru")]
)
def test_what_is_turned_off_needs_no_core(config: TierConfig) -> None:
    assert cores(1, 1, config=config).verdict.value == "ok"


def test_a_container_s_share_counts_and_not_the_machine_s_cores() -> None:
    found = check_spare_cores(ON, {BIND: "0-3"}, 0, 4, frozenset(range(64)))
    assert found.verdict.value == "warn"


def test_the_ratio_and_the_time_are_logged() -> None:
    found = check_cold_pages(FULL)
    assert found.verdict.value == "ok"
    assert found.seen == (
        "900 of 1,300 pages are compressed, 1.50 per slot; 12.5 s to compress, 3.0 s to restore "
        "so far"
    )


def test_a_useless_compression_ratio_is_reported() -> None:
    found = check_cold_pages({**FULL, "cpu_pages_compressed": 620})
    assert found.verdict.value == "warn"
    assert "TIERED_KV_CODEC=raw" in found.advice


def test_free_slots_need_no_compression() -> None:
    fresh = {**FULL, **NONE_COMPRESSED, "cpu_pages": 100, "pages_evicted": 0}
    assert check_cold_pages(fresh).seen == "no pages are compressed yet, because slots are free"
    found = check_cold_pages({**fresh, "pages_compressed": 7})
    assert found.seen.startswith("no pages are compressed now, but 7 were")


def test_full_memory_without_compression_is_asked_about() -> None:
    full = {**FULL, **NONE_COMPRESSED, "cpu_pages": 1000}
    for one in (full, {**full, "pages_evicted": 0}, {**full, "cpu_pages": 100}):
        assert check_cold_pages(one).verdict.value == "warn"
    assert check_cold_pages({**full, "cpu_pages": 100, "pages_evicted": 0}).verdict.value == "ok"


def asked(**values: float) -> dict[str, Finding]:
    """Return the findings about a server with these counters."""
    page = metrics(10, turns=4, pages_saved=9, **values)
    with serve({"/health": text(""), "/metrics": text(page)}) as url:
        return by_check(check_server(url))


def test_a_running_server_is_read_by_the_names_of_its_metrics() -> None:
    found = asked(**FULL, compression_failures=2)
    assert found[PAGES_CHECK] == check_cold_pages(FULL)
    assert found["compression_failures"].seen.startswith("2: ")
    assert "TIERED_KV_CODEC=raw" in found["compression_failures"].advice


def test_a_server_without_cpu_memory_has_nothing_to_compress() -> None:
    assert PAGES_CHECK not in asked(cpu_slots=0)
