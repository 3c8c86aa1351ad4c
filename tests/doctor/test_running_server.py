"""The doctor reads a running server's metrics, and explains them."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from tests.doctor.told import by_check, verdicts
from tests.doctor.web import Write, metrics, serve, text
from tiered_kv.doctor.finding import Finding
from tiered_kv.doctor.running_server import (
    FAILURES,
    MAX_BYTES,
    UnreachableError,
    base_of,
    check_server,
    fetch,
    totals,
)
from tiered_kv.metrics import COUNTERS
from tiered_kv.sizing.block_layout import advise_block_size
from tiered_kv.vllm_versions import SPECULATED_STATES

BUSY = {
    "turns": 40,
    "pages_saved": 900,
    "cpu_slots": 1000,
    "cpu_pages": 800,
    "prompt_tokens_vram": 500,
    "prompt_tokens_cpu": 300,
    "prompt_tokens_recomputed": 200,
}


def asked(page: str) -> dict[str, Finding]:
    """Return the findings about a server with this metrics page."""
    with serve({"/health": text(""), "/metrics": text(page)}) as url:
        return by_check(check_server(f"{url}/v1"))


def test_a_busy_server_is_healthy() -> None:
    found = asked(metrics(**BUSY))
    assert verdicts(found.values()) == dict.fromkeys(
        ("server", "connector", "tiers", "cold pages", "failures", "ids"), "ok"
    )
    assert (
        "50% were in VRAM, 30% came from CPU memory and lower tiers, 20% were prefilled"
        in found["connector"].seen
    )
    assert found["tiers"].seen.startswith("800 pages in 1,000 slots")


@pytest.mark.parametrize(
    ("counts", "routes", "verdict"),
    [
        ({"turns_unnamed": 7}, False, "warn"),
        ({"turns_unnamed": 7}, True, "ok"),
        ({"turns_unnamed": 7, "ids_carried": 33}, False, "ok"),
        ({"turns_unnamed": 0}, False, "ok"),
    ],
)
def test_ids_that_nothing_reads_are_reported(
    counts: dict[str, int], routes: bool, verdict: str
) -> None:
    """Requests that name no job cause a warning, unless the server has tiered-kv's routes or has
    read an id. In both cases, the middleware that reads ids is loaded."""
    pages = {"/health": text(""), "/metrics": text(metrics(**BUSY, **counts))}
    if routes:
        pages["/tiered_kv/status"] = text("{}")
    with serve(pages) as url:
        found = by_check(check_server(url))["ids"]
    assert found.seen.startswith(f"{counts['turns_unnamed']} requests named no job")
    assert verdicts([found]) == {"ids": verdict}


def test_observe_mode_is_reported() -> None:
    found = asked(metrics(**BUSY, would_have_saved_vram=5, would_have_saved_cpu=7))
    seen = found["TIERED_KV_MODE"].seen
    assert seen.startswith("observe: the prefill of 12 prompt tokens would have been saved")
    assert "TIERED_KV_MODE" not in asked(metrics(**BUSY))


def test_a_server_that_has_just_started_is_healthy() -> None:
    found = asked(metrics(requests=0, cpu_slots=1000))
    assert found["connector"].seen == "loaded; no request has been answered yet"
    assert {one.verdict.value for one in found.values()} == {"ok"}


def test_a_server_without_the_connector_is_reported_with_instructions() -> None:
    plain = re.sub(r"(?m)^.*tiered_kv.*\n", "", metrics())
    found = asked(plain)["connector"]
    assert (found.verdict.value, found.seen) == ("fail", "vLLM runs without the connector")
    assert "tiered-kv plan" in found.advice


def test_a_server_that_is_not_vllm_is_reported() -> None:
    assert asked("python_info 1.0\n")["connector"].seen == "the page has no vLLM metrics"


def test_a_connector_that_sees_no_turn_is_broken() -> None:
    found = asked(metrics(requests=12, cpu_slots=10))["connector"]
    assert (found.verdict.value, found.seen) == ("fail", "no turns, but 12 answered requests")


def test_a_connector_that_saves_nothing_is_reported() -> None:
    assert asked(metrics(**{**BUSY, "pages_saved": 0}))["connector"].verdict.value == "warn"
    assert asked(metrics(**{**BUSY, "cpu_slots": 0}))["tiers"].verdict.value == "warn"


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_named_with_what_to_do(name: str) -> None:
    assert name in COUNTERS
    found = asked(metrics(**BUSY, **{name: 3}))
    assert found[name].verdict.value == "warn"
    assert found[name].seen.startswith("3: ")
    assert found[name].advice == FAILURES[name]
    assert "failures" not in found


def server(
    *, mode: str, caching: bool = True, speculates: bool = True, with_us: bool = True
) -> str:
    """Return the metrics page of a server with these vLLM cache settings, in vLLM's format."""
    page = metrics(**BUSY)
    if not with_us:
        page = re.sub(r"(?m)^.*tiered_kv.*\n", "", page)
    page += (
        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caching}",engine="0",'
        f'mamba_cache_mode="{mode}"}} 1.0\n'
    )
    if speculates:
        page += 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n'
    return page


@pytest.mark.parametrize("with_us", [True, False])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_speculation_with_prefix_caching_of_states_is_a_defect_of_vllm_itself(
    mode: str, with_us: bool
) -> None:
    found = asked(server(mode=mode, with_us=with_us))["speculation"]
    assert (found.verdict.value, found.advice) == ("warn", SPECULATED_STATES)
    assert mode in found.seen
    assert "vllm#53912" in found.advice
    assert "remove --speculative-config" in found.advice


@pytest.mark.parametrize(
    "other",
    [{"mode": "none"}, {"mode": "align", "speculates": False}, {"mode": "align", "caching": False}],
    ids=str,
)
def test_other_servers_have_no_such_defect(other: dict[str, Any]) -> None:
    assert "speculation" not in asked(server(**other))


def blocks_found(
    models: str | None, *, window: str = "None", with_us: bool = True
) -> list[Finding]:
    """Return the block size findings about two engines with 16-token blocks, given the server's
    list of models."""
    page = metrics(**BUSY)
    if not with_us:
        page = re.sub(r"(?m)^.*tiered_kv.*\n", "", page)
    for engine in range(2):
        page += (
            f'vllm:cache_config_info{{block_size="16",engine="{engine}",'
            f'sliding_window="{window}"}} 1.0\n'
        )
    pages = {"/health": text(""), "/metrics": text(page)}
    if models is not None:
        pages["/v1/models"] = text(models)
    with serve(pages) as url:
        return [one for one in check_server(url) if one.check == "block size"]


LONG = '{"data":[{"id":"m","max_model_len":1048576},{"id":"adapter","max_model_len":null}]}'


def test_longer_blocks_are_advised_to_a_server_of_long_contexts() -> None:
    (found,) = blocks_found(LONG)
    assert (found.verdict.value, found.seen) == (
        "warn",
        "16 tokens, in contexts of up to 1,048,576",
    )
    assert found.advice == advise_block_size(16, 1_048_576)


@pytest.mark.parametrize(
    "models", [None, "", "[]", "{}", '{"data":[]}', '{"data":[{}]}', '{"data":[1]}', "[" * 100_000]
)
def test_a_server_that_does_not_report_its_longest_context_gets_no_advice(
    models: str | None,
) -> None:
    assert blocks_found(models) == []


def test_other_servers_need_no_longer_blocks() -> None:
    assert blocks_found(LONG, window="4096") == [], "a context has the blocks of its window"
    assert blocks_found(LONG, with_us=False) == []
    assert blocks_found('{"data":[{"max_model_len":8192}]}') == []


def test_counters_of_several_engines_add_up() -> None:
    page = 'a_total{engine="0"} 2.0\na_total{engine="1"} 3.0\n'
    assert totals(page) == {"a_total": 5.0}


@pytest.mark.parametrize(
    "odd",
    [
        'vllm:broken{engine="0} 1.0',
        "vllm:x_total one",
        "# TYPE vllm:y",
        "vllm:half",
        "\x1b[2J",
        "vllm:nan_total NaN",
    ],
)
def test_an_unreadable_line_is_skipped_and_reported(odd: str) -> None:
    page = metrics(**BUSY)
    lines = page.splitlines()
    found = asked("\n".join([*lines[:5], odd, *lines[5:], odd]))
    told = found.pop("metrics", None)
    whole = asked(page)
    del found["server"], whole["server"]  # their addresses differ
    assert found == whole, "every other line counts"
    if "nan" in odd:
        assert told is None, "it is a line, of no number"
        return
    assert told is not None
    assert told.verdict.value == "warn"
    assert told.seen.startswith("2 unreadable lines ignored; the first is ")
    assert "\x1b" not in told.seen


def test_a_counter_that_is_no_number_does_not_spoil_the_others() -> None:
    page = 'a_total{engine="0"} 2.0\na_total{engine="1"} NaN\na_total{engine="2"} +Inf\n'
    assert totals(page) == {"a_total": 2.0}


def test_a_missing_server_fails() -> None:
    with serve({}) as url:
        (missing,) = check_server(url)
    assert (missing.verdict.value, missing.seen) == ("fail", f"{url}: 404 Not Found")
    (gone,) = check_server(url)
    assert "refused" in gone.seen


def test_a_router_may_hide_the_metrics() -> None:
    with serve({"/health": text("")}) as url:
        assert verdicts(check_server(url)) == {"server": "ok", "metrics": "fail"}
    with serve({"/health": text(""), "/metrics": text("<html>hello{</html>")}) as url:
        assert verdicts(check_server(url))["metrics"] == "fail"


def test_any_address_that_users_paste_is_accepted() -> None:
    for pasted in ("localhost:8000", "http://localhost:8000/v1/", "http://localhost:8000/metrics"):
        assert base_of(pasted) == "http://localhost:8000"
    for wrong in ("file:///etc/passwd", "http://[", "http://"):
        with pytest.raises(UnreachableError, match=r"not an (HTTP )?address"):
            base_of(wrong)


def test_reading_an_endless_page_is_given_up() -> None:
    def drip(write: Write, ends: threading.Event) -> None:
        while not ends.wait(0.001):
            write(b"x")

    with (
        serve({"/": drip}) as url,
        pytest.raises(UnreachableError, match=r"incomplete after 0\.05"),
    ):
        fetch(f"{url}/", whole_s=0.05)


def test_waiting_for_a_silent_page_is_given_up() -> None:
    def silence(write: Write, ends: threading.Event) -> None:
        ends.wait()

    with serve({"/": silence}) as url, pytest.raises(UnreachableError, match="timed out"):
        fetch(f"{url}/", whole_s=0.05)


def test_reading_a_page_that_is_too_long_is_given_up() -> None:
    def flood(write: Write, ends: threading.Event) -> None:
        for _ in range(2 + (MAX_BYTES >> 20)):
            write(bytes(1 << 20))

    with serve({"/": flood}) as url, pytest.raises(UnreachableError, match="larger than 32 MiB"):
        fetch(f"{url}/")
