"""Frames for given server states, as they appear in a terminal of a given size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from tests.top.made import NO_LOWER, NOW, engine, job, new_engine, server, shown
from tiered_kv.status import JobState, Quantiles, Where
from tiered_kv.top.safe_text import harmless
from tiered_kv.top.screen import ONCE_ROWS
from tiered_kv.top.view import JobOrder, View

SIZES = [(60, 20), (60, 8), (80, 24), (99, 30), (100, 24), (120, 40), (200, 60), (20, 5), (400, 3)]
HELD = job(2, state=JobState.HELD, since=NOW - 12, where=Where.NOWHERE, until=None, gap=None)
AWAY = job(3, where=Where.STORE, until=None, back_at=NOW + 200, gap=Quantiles(240.0, None))
MANY = [job(n, since=NOW - n / 100, context_tokens=n) for n in range(1, 5001)]


def row(lines: list[str], name: str) -> str:
    """Return the row of a job, with single spaces."""
    (found,) = (line for line in lines if line.startswith(f"{name} "))
    return re.sub(" +", " ", found).strip()


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_fills_the_terminal_and_never_wraps(width: int, height: int, unicode: bool) -> None:
    for seen in (
        server(engines=(new_engine(),)),
        server(job(), HELD, AWAY),
        server(*MANY),
        server(job(), job(1, engine=1), engines=(engine(0), engine(1))),
        server(job(), engines=(engine(tiers=NO_LOWER),)),
        replace(server(job()), problem="The server does not answer: is it up?"),
    ):
        lines = shown(seen, width, height, unicode=unicode)
        assert len(lines) == height
        assert {cell_len(line) for line in lines} <= set(range(width + 1))


def test_a_new_server_is_shown_as_empty() -> None:
    lines = shown(server(engines=(new_engine(),)), 120, 30)
    assert "running 0% pinned 0% cached 0% free 100% of 57.0 GiB" in lines[1]
    assert lines[1].count("·") > 30
    assert "hot 0% compressed 0% free 100% of 32.0 GiB, 0 pages" in lines[2]
    assert "used 0% free 100% of 200 GiB, 0 pages" in lines[3]
    assert "0 running, 0 queued, 0 held; 0 jobs" in lines[4]
    assert lines[-1].startswith("0-0 of 0")


def test_the_first_line_says_that_a_server_only_observes() -> None:
    for mode, says in (("manage", False), ("observe", True)):
        [first, *_] = shown(server(engines=(replace(new_engine(), mode=mode),)), 160, 30)
        assert ("observe mode" in first) is says


def test_bars_are_proportional_to_their_values() -> None:
    for width in (200, 120, 60):
        vram, cpu, ssd = shown(server(job()), width, 20)[1:4]
        cells = [vram.count(cell) for cell in "█▓▒·"]
        assert [share / sum(cells) for share in cells] == pytest.approx(
            [0.4, 0.1, 0.2, 0.3], abs=0.05
        )
        assert cpu.count("█") / sum(map(cpu.count, "█▓·")) == pytest.approx(0.55, abs=0.05)
        assert ssd.count("█") / sum(map(ssd.count, "█·")) == pytest.approx(0.25, abs=0.05)
    vram = shown(server(job()), 60, 20, unicode=False)[1]
    assert vram.isascii()
    assert vram.count("#") > 2 * vram.count("=") > 0


def test_a_row_shows_where_the_job_s_kv_is_and_until_when() -> None:
    lines = shown(server(job(), HELD, AWAY), 200, 30)
    pinned = "job-1 waiting VRAM pin 28 s in 3.0 s 2.0 s 12.3k 3 fast: VRAM - 5.0 s, 30 s"
    assert row(lines, "job-1") == pinned
    assert row(lines, "job-2").startswith("job-2 held nowhere - - 12 s 12.3k 3")
    away = "job-3 waiting SSD - in 4 min 2.0 s 12.3k 3 fast: VRAM 3 min 4 min, more"
    assert row(lines, "job-3") == away
    late = shown(server(job(since=NOW - 65)), 80, 24)
    assert "late 60 s" in row(late, "job-1")


def test_the_panels_show_hits_decisions_and_transfers() -> None:
    text = re.sub(" +", " ", "\n".join(shown(server(job()), 120, 40)))
    for words in (
        "\nprompts 10 s since start 16 decisions in 5 min VRAM CPU SSD transfers",
        "\nVRAM 30% 50% fast 12 - - VRAM to CPU 2 31 -",
        "\nCPU 0% 20% slow - - 3 ",
        "\nSSD 0% 10% no class - 1 - ",
        "\ncomputed 70% 20% SSD to CPU 1 64 -",
        "\ntokens 100 10,000 ",
    ):
        assert words in text


def test_without_space_each_panel_is_one_line() -> None:
    lines = shown(server(job()), 60, 24)
    assert "prompts, 10 s VRAM 30%  CPU 0%  SSD 0%  computed 70%" in lines
    assert "decided fast: VRAM 12  slow: SSD 3  no class: CPU 1" in lines
    assert "moving save 31 pages  promote 64 pages" in lines
    assert [line for line in shown(server(job()), 60, 8) if line.startswith("job-1")]


def test_without_cpu_memory_the_tier_is_shown_as_off_with_the_reason() -> None:
    lines = shown(server(job(), engines=(engine(tiers=NO_LOWER),)), 100, 30)
    assert lines[2].startswith("CPU memory   off: TIERED_KV_CPU_GIB is 0")
    assert lines[3].startswith("SSD          off: TIERED_KV_SSD_PATH is unset")


def test_one_page_of_5000_jobs_is_shown() -> None:
    seen = server(*MANY)
    lines = shown(seen, 80, 30)
    rows = [line for line in lines if line.startswith("job-")]
    assert rows[0].startswith("job-5000 "), "the first to come back"
    assert lines[-1].startswith(f"1-{len(rows)} of 5,000 ")
    last = shown(seen, 80, 30, View(top=10**6))
    assert last[-1].startswith(f"{5001 - len(rows):,}-5,000 of 5,000 ")
    assert any(line.startswith("job-1 ") for line in last)


def test_jobs_are_shown_in_the_selected_order() -> None:
    def first(order: JobOrder, *, backwards: bool = False) -> str:
        lines = shown(server(*jobs), 80, 30, View(order, backwards))
        assert any(line.startswith(f"job, by {order.value}"[:12]) for line in lines)
        return next(line for line in lines if re.match(r"(a|b|c|d)\d? ", line))[:1]

    jobs = (
        job(1, id="b", context_tokens=5),
        job(2, id="c", context_tokens=9, until=NOW + 1),
        job(3, id="a", gap=Quantiles(2.5, 30.0), until=None),
        job(4, id="d", state=JobState.QUEUED, until=None, context_tokens=1, gap=None),
    )
    assert first(JobOrder.STATE) == "d"
    assert first(JobOrder.CONTEXT) == "a"
    assert first(JobOrder.CONTEXT, backwards=True) == "d"
    assert first(JobOrder.UNTIL) == "c"
    assert first(JobOrder.RETURN) == "a"
    assert first(JobOrder.AGE) == "b"
    assert first(JobOrder.AGE, backwards=True) == "d"
    assert first(JobOrder.NAME) == "a"


def test_several_engines_are_shown_added_up_or_one_by_one() -> None:
    both = server(job(1), job(1, engine=1, id="other"), engines=(engine(0), new_engine(1)))
    lines = shown(both, 120, 30)
    assert lines[1] == "Sum of 2 engines. Press e to show the engines one by one."
    assert "running 20% pinned 5% cached 10% free 65% of 114 GiB" in lines[2]
    assert lines[-1].startswith("1-2 of 2 ")
    lines = shown(both, 120, 30, View(engine=1))
    assert lines[1].startswith("Engine 1 of 2. Press e")
    assert "running 0%" in lines[2]
    assert lines[-1].startswith("1-1 of 1 ")
    assert row(lines, "other")
    assert not [line for line in lines if line.startswith("job-1")]


def test_a_problem_is_shown_above_the_last_state() -> None:
    gone = replace(server(job()), problem="It does not answer: is the server up?")
    lines = shown(gone, 60, 24)
    assert " ".join(line.strip() for line in lines[1:3]) == (
        "It does not answer: is the server up? The last known state follows."
    )
    assert row(lines, "job-1")


def test_failures_are_named() -> None:
    broken = engine(counters={**engine().counters, "save_failures": 3})
    lines = shown(server(job(), engines=(broken,)), 100, 30)
    assert "save_failures 3: run tiered-kv doctor URL" in lines
    assert not [line for line in shown(server(job()), 100, 30) if "failures" in line]


def test_hints_are_counted_by_outcome() -> None:
    hints = {"hints_pin_accepted": 3, "hints_release_accepted": 1, "hints_pin_missing": 2}
    busy = server(job(), engines=(engine(counters={**engine().counters, **hints}),))
    assert "4 accepted, 2 missing" in next(ln for ln in shown(busy, 100, 30) if "hints" in ln)
    assert not [line for line in shown(server(job()), 100, 30) if "hints" in line]


def test_jobs_not_yet_read_are_shown() -> None:
    part = replace(server(job()), whole=False)
    assert shown(part, 100, 30)[-1].startswith("1-1 of 1 seen, 12 known ")


def test_a_printed_frame_is_as_long_as_its_jobs_and_ends() -> None:
    lines = shown(server(*MANY), 100, None)
    assert len([line for line in lines if line.startswith("job-")]) == ONCE_ROWS
    shown_jobs = f"Showing the first {ONCE_ROWS} of 5,000 jobs."
    assert lines[-1] == f"{shown_jobs} GET /tiered_kv/jobs lists all jobs."
    assert shown(server(job()), 100, None)[-1].startswith("job-1 ")


HOSTILE = [
    "\x1b[31mred\x1b]0;title\x07\x1b[2J",
    "a\r\nb\tc\x00\x7f\x9b31m",
    "[bold red]markup[/] [link=http://evil]x[/link] :skull:",
    "\u202eevil\u2066 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "z\u0310\u0323a\u0310\u0323lgo" * 50,
    "\ud800\udfff\U000e0041\ufeff\u200b\u2028",
    "x" * 10_000,
    "日本語" * 100,
    "🎉👩\u200d💻" * 40,
    "",
]


@pytest.mark.parametrize("width", [60, 200])
def test_names_from_clients_do_no_harm(width: int) -> None:
    jobs = [job(n, id=harmless(name)) for n, name in enumerate(HOSTILE, 1)]
    lines = shown(server(*jobs), width, 40)
    assert len(lines) == 40
    for line in lines:
        assert cell_len(line) <= width
        assert line.isprintable()
    text = "\n".join(lines)
    assert "[bold red]m" in text, "as it was sent"
    assert "\\x1b[31m" in text
    assert "\\u202eev" in text
    assert not re.search("[\u0590-\u06ff]", text)
    assert len([line for line in lines if " waiting " in line]) == len(HOSTILE)
