"""The HTML report of a trace is one file of bounded size, and is safe whatever the trace
contains."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from tests.trace.headless import dom_of
from tests.trace.records import HEADER, record, records
from tiered_kv.cli.app import app
from tiered_kv.trace.page.charts import histograms
from tiered_kv.trace.turn_record import (
    GapStory,
    PinEnd,
    PinStory,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
)
from tiered_kv.trace.turn_table import TurnTable

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
LINK = '<a href="javascript:alert(1)">%{y}</a><b>\u202e"\'&'


class Parsed(HTMLParser):
    """The elements of a page as a browser parses it: texts, table rows, links and charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.data: list[str] = []
        self._in = ""
        self._kind = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.links += [str(named[name]) for name in ("src", "href") if name in named]
        self._in, self._kind = tag, str(named.get("type", ""))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("td", "th") and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()
        elif self._in == "script" and self._kind == "application/json":
            self.data.append(data)
        elif self._in not in ("script", "style") and data.strip():
            self.texts.append(data.strip())


def turns(jobs: int = 3, each: int = 4, **fields: Any) -> list[TurnRecord]:
    """Return turns of jobs that wait, are restored, compute and decode, and whose KV is found in
    all tiers."""
    return [
        record(
            **{
                "job": f"j{job}",
                "turn": number,
                "request": f"j{job}.{number}",
                "arrived": 1e9 + 3 * job + 30 * number,
                "tool": ("bash", "bash ls"),
                "times": TurnTimes(0.25, 0.5, 1.0 + job, 2.0 + job, 3.0 + job, 6.0 + job),
                "tokens": TurnTokens(1000, 400, 300, 200, 100, 50, 60, 20),
                "decision": PricedDecision("cpu", "fast", q50_s=20.0, q90_s=40.0),
                "pin": PinStory(8, 5.0, PinEnd.EXPIRED),
                "gap": GapStory(StoryEnd.RETURNED, 24.0 - job % 8)
                if number < each
                else GapStory(StoryEnd.OVER),
                **fields,
            }
        )
        for job in range(jobs)
        for number in range(1, each + 1)
    ]


def write(path: Path, records: list[TurnRecord], header: str = HEADER.to_line()) -> Path:
    path.write_text("".join(f"{line}\n" for line in [header, *[one.to_line() for one in records]]))
    return path


def run(*arguments: object) -> Result:
    wide = {"COLUMNS": "400"}  # no line is wrapped, however long the path of the trace
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env=wide)


def report(path: Path, out: Path) -> str:
    result = run("report", path, "-o", out)
    assert result.exit_code == 0, result.output
    return out.read_text(encoding="utf-8")


def test_the_page_is_self_contained_and_private(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", turns())
    page = Parsed(report(path, tmp_path / "report.html"))
    assert page.links == []
    assert page.tags.count("script") == 2 + len(page.data), "plotly, ours, and the charts' data"
    assert len(page.data) == 8
    assert not {"link", "img", "iframe", "object", "form"} & {*page.tags}
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600


def test_the_figures_are_those_of_analyze(tmp_path: Path) -> None:
    """Every table row of the page is also a line of the output of ``trace analyze``."""
    path = write(tmp_path / "trace.jsonl", turns())
    page = Parsed(report(path, tmp_path / "report.html"))
    lines = [" ".join(line.split()) for line in run("analyze", path).stdout.splitlines()]
    # The command prints the whole path instead.
    rows = [row for row in page.rows if path.name not in row]
    bodies = [" ".join(" ".join(row).split()) for row in rows]
    assert len(bodies) > 10
    assert [row for row in bodies if row not in " ".join(lines)] == []
    found = json.loads(run("analyze", path, "--json").stdout)
    completion = found["jobs"]["completion_s"]
    assert ["job completion", *[f"{one:,.3f}" for one in completion.values()]] in page.rows
    assert f"{100 * found['prompts']['vram']:.1f}%" in page.texts


@pytest.mark.slow
def test_a_browser_renders_the_page_with_the_figures_of_analyze(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", turns())
    report(path, tmp_path / "report.html")
    page = Parsed(dom_of(tmp_path / "report.html", tmp_path))
    assert page.tags.count("svg") >= 8, "charts are drawn"
    found = json.loads(run("analyze", path, "--json").stdout)
    completion, queue = found["jobs"]["completion_s"], found["waits"]["queue_s"]
    assert ["job completion", *[f"{one:,.3f}" for one in completion.values()]] in page.rows
    assert ["wait for admission", *[f"{one:,.3f}" for one in queue.values()]] in page.rows
    assert f"P50 {completion['p50']:,.3g} s" in page.texts, "said by a chart"
    assert {"j0", "j1", "j2"} <= {*page.texts}, "lanes have labels"
    assert page.links == []


@pytest.mark.slow
def test_a_browser_does_not_interpret_strings_of_a_trace_as_html(tmp_path: Path) -> None:
    hostile = list[TurnRecord]()
    for one in (HOSTILE, LINK, HOSTILE.replace("</", "<!--")):
        said = PricedDecision(one, one, tiers_s={one: 1.0})
        hostile += turns(
            job=one, request=one, tool=(one, one), client=one, finish=one, decision=said
        )
    header = HEADER.to_line().replace("/models/small", HOSTILE.replace('"', "'"))
    path = write(tmp_path / "<b>trace.jsonl", hostile, header)
    written = Parsed(report(path, tmp_path / "report.html"))
    assert not {"img", "a", "b"} & {*written.tags}
    assert len(written.data) == 8
    page = Parsed(dom_of(tmp_path / "report.html", tmp_path))
    assert "Trace <b>trace.jsonl" in page.texts
    assert "owned" not in page.texts
    assert not {"img", "a", "b"} & {*page.tags}
    assert page.tags.count("script") == 2 + len(page.data)
    assert page.tags.count("svg") >= 8, "charts are drawn"
    for one in (HOSTILE, LINK):
        assert any(text.startswith(one[:10]) for text in page.texts), "lanes have labels"


def test_a_page_of_many_jobs_is_hardly_larger_than_a_page_of_few(tmp_path: Path) -> None:
    few = report(write(tmp_path / "few.jsonl", turns(40)), tmp_path / "few.html")
    many = report(write(tmp_path / "many.jsonl", turns(2_000)), tmp_path / "many.html")
    assert len(many) < len(few) + 200_000
    (said,) = [text for text in Parsed(many).texts if text.startswith("Each lane is a job.")]
    assert "Of 2,000 jobs, 40 are drawn: the 20 that took longest" in said
    assert "1,960 are left out" in said
    assert not any("are left out" in text for text in Parsed(few).texts)


def test_what_is_not_in_a_trace_is_not_on_its_page(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", turns(times=TurnTimes(end_s=2.0)))
    page = Parsed(report(path, tmp_path / "report.html"))
    assert any(
        "The trace has no data for: wait for admission, time to the first token." in text
        for text in page.texts
    )
    assert "Time to the first token" not in page.texts
    alone = Parsed(
        report(write(tmp_path / "alone.jsonl", turns(job=None)), tmp_path / "alone.html")
    )
    assert "No turn of this trace belongs to a job." in alone.texts
    (tmp_path / "empty.jsonl").touch()
    empty = Parsed(report(tmp_path / "empty.jsonl", tmp_path / "empty.html"))
    assert "This trace has no turns whose gap has ended." in empty.texts


def test_mistakes_are_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    result = run("report", tmp_path / "nowhere", "-o", out)
    assert (result.exit_code, "there is no trace" in result.stderr) == (2, True)
    path = write(tmp_path / "trace.jsonl", turns())
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = run("report", path, "-o", out)
    assert result.exit_code == 2
    assert "pip install 'tiered-kv[report]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()


def test_invalid_lines_are_counted_on_the_page(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", turns())
    with path.open("a") as file:
        file.write("{}\n")
    result = run("report", path, "-o", tmp_path / "report.html")
    assert result.exit_code == 1
    assert "Ignored 1 line of the trace that cannot be read." in (
        Parsed((tmp_path / "report.html").read_text()).texts
    )


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_records=st.lists(records, max_size=8))
def test_any_trace_has_a_page(given_records: list[TurnRecord], tmp_path: Path) -> None:
    page = report(write(tmp_path / "trace.jsonl", given_records), tmp_path / "report.html")
    parsed = Parsed(page)
    assert parsed.tags.count("script") == 2 + len(parsed.data)
    for data in parsed.data:
        assert json.loads(data)["data"]


def test_histograms_count_every_value() -> None:
    table = TurnTable(turns())
    found = histograms({"turns": table["times.admitted_s"], "none": table["decision.back_s"]}, 1e-3)
    assert found is not None
    assert list(found[1]) == ["turns"]
    assert found[1]["turns"].sum() == len(table)
