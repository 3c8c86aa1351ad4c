from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.demo.results import turn_result
from tests.bench.servers.test_server import scripted
from tiered_kv.bench.demo.__main__ import main, prepare_model
from tiered_kv.bench.demo.agents import JobPlan, make_jobs
from tiered_kv.bench.demo.report import Comparison, Run
from tiered_kv.bench.demo.stage import DemoError, Place, SoFar, Stage
from tiered_kv.bench.demo.turns import Sources, sources_from_usage
from tiered_kv.bench.output import run_benchmark


@pytest.fixture
def comparison() -> Comparison:
    """Two jobs of two turns; the connector brings the second turns back from CPU and VRAM."""
    stock = [
        turn_result("a", 1, ttft_s=1.0, ended_s=2.0),
        turn_result("b", 1, ttft_s=1.0, ended_s=3.0),
        turn_result("a", 2, ttft_s=4.0, ended_s=8.0, prompt=300, cached=32),
        turn_result("b", 2, ttft_s=2.0, ended_s=10.0, prompt=300),
    ]
    tiered = [replace(result, ttft_s=result.ttft_s / 4, ended_s=4.0) for result in stock]
    sources = {
        ("a", 1): Sources(0, 0, 100),
        ("b", 1): Sources(0, 0, 100),
        ("a", 2): Sources(288, 10, 2),
        ("b", 2): Sources(0, 298, 2),
    }
    return Comparison(
        model="Small",
        jobs=2,
        turns=2,
        pool_tokens=1024,
        dtype="bfloat16",
        stock=Run(
            results=stock, sources=sources_from_usage(stock), wall_s=10.0, reserved_cpus="[]"
        ),
        tiered=Run(results=tiered, sources=sources, wall_s=4.0, reserved_cpus="[]"),
    )


def test_a_line_says_while_it_runs_what_later_turns_gain(comparison: Comparison) -> None:
    line = SoFar(comparison.stock.results)
    said = []
    for result in comparison.tiered.results:
        line.add(replace(result, cached_tokens=result.prompt_tokens // 2))
        said.append(str(line))
    assert said[:2] == ["  the agents' first prompts are computed"] * 2
    assert "first token after 1.0 s (stock: 4.0 s), 50% of prompts computed" in said[2]
    assert "first token after 0.8 s (stock: 3.0 s)" in said[3]
    assert max(map(len, said)) < 80


def test_the_table_has_a_line_a_turn_and_one_for_all(comparison: Comparison) -> None:
    lines = comparison.table().splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    assert len(lines[1]) <= 80
    second = "2 600 288 308 4 0.75 0.97 32 568 3.00 3.90"
    assert lines[3].split() == second.split()
    assert lines[-1].split()[:5] == ["all", "800", "288", "308", "204"]


def test_the_summary_says_what_a_later_turn_gains(comparison: Comparison) -> None:
    summary = comparison.summary()
    assert "\n" not in summary
    assert "after 0.75 s instead of 3.00 s" in summary
    assert "took 4 s instead of 10 s" in summary
    assert "26% of the prompt tokens were computed instead of 96%" in summary


def test_the_notes_say_whether_the_runs_can_be_compared(comparison: Comparison) -> None:
    notes = "\n".join(comparison.notes())
    assert "mean job time 4.0 s, stock 9.0 s" in notes
    assert "the same cores (reserved_cpus=[] in both logs)" in notes
    assert "all 4 answers are the same" in notes

    other = [replace(r, text="other") if r.turn == 2 else r for r in comparison.tiered.results]
    assert "BUSY" not in notes
    unfair = replace(comparison.tiered, results=other, reserved_cpus="[1]", other_cores=0.8)
    notes = "\n".join(replace(comparison, tiered=unfair).notes())
    assert "NOT COMPARABLE" in notes
    assert "used 0.8 cores meanwhile, 0.0 in stock's run" in notes
    assert "2 of 4 answers differ, in 2 of 2 jobs" in notes


def test_answers_that_differ_are_held_against_stock_s_own(comparison: Comparison) -> None:
    other = [replace(r, text="other") if r.turn == 2 else r for r in comparison.tiered.results]
    again = replace(comparison.stock, results=[*comparison.stock.results[:3], other[3]])
    shown = replace(comparison, tiered=replace(comparison.tiered, results=other), control=again)
    notes = "\n".join(shown.notes())
    assert "2 of 4 answers differ, in 2 of 2 jobs; stock vLLM differs from itself in 1" in notes
    assert shown.as_json()["differing_answers_of_stock"] == 1


def test_the_json_object_holds_the_table(comparison: Comparison) -> None:
    data = json.loads(json.dumps(comparison.as_json()))
    assert data["differing_answers"] == 0
    assert data["differing_answers_of_stock"] is None
    assert data["tiered"]["wall_s"] == 4.0
    assert data["stock"]["later_ttft_s"] == 3.0
    second = data["tiered"]["by_turn"][1]
    assert second["sources"] == {"vram": 288, "cpu": 308, "recomputed": 4}


def test_a_model_given_as_a_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    console = Console(quiet=True)
    assert prepare_model("mine", console) == (tmp_path / "mine", "mine")
    assert prepare_model("org/name", console) == ("org/name", "org/name")


def test_impossible_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_benchmark(main, None, ["--jobs", "0"])
    assert ended.value.code == 2
    assert "--jobs" in capsys.readouterr().err


REFUSES = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status):
        self.send_response(status); self.send_header("content-length", "0"); self.end_headers()
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"])); self.answer(500)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIES_OF = "import sys; sys.exit('ValueError: the model does not fit')"
SILENT = REFUSES.replace("self.answer(500)", "import time; time.sleep(600)")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (DIES_OF, "stock vLLM, while its server started: ValueError: the model does not fit."),
        (REFUSES, "stock vLLM, after 0 of 2 turns: agent-1, turn 1 was refused"),
        (SILENT, "agent-1, turn 1 got no answer for longer than a client waits. Run the demo"),
    ],
)
def test_a_run_that_fails_says_in_a_sentence_what_happened_and_where_the_log_is(
    tmp_path: Path, script: str, said: str
) -> None:
    source = tmp_path / "source.py"
    source.write_text("value = compute(1, 2)\n" * 500)
    jobs = make_jobs(JobPlan(jobs=1, turns=2, start_s=0.0), [source])
    place = Place()
    patience_s = 1.0 if script == SILENT else 60.0
    log = tmp_path / "stock.log"
    options = scripted(script)
    stage = Stage("stock vLLM", options, log, Console(quiet=True), place, patience_s)
    with pytest.raises(DemoError) as failed:
        stage.run(jobs, 24)
    message = str(failed.value)
    assert said in message
    assert message.endswith(f"The server's log: {log}")
    assert "\n" not in message


def test_an_interrupt_says_how_far_the_demo_was(tmp_path: Path) -> None:
    place = Place()
    assert place.stopped().startswith("stopped: before a server was started; no server is left")
    place.reached("tiered-kv, after 3 of 64 turns", tmp_path / "tiered.log")
    assert f"3 of 64 turns; no server is left running. Its log: {tmp_path}" in place.stopped()
