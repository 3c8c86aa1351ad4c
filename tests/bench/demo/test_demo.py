"""The demo's servers, and the comparison that the demo prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.servers.test_server import scripted
from tests.trace.records import record
from tiered_kv.bench.agents.results import JobDone, Kept, Run, TurnDone
from tiered_kv.bench.demo.__main__ import main, prepare_model, with_all_sources
from tiered_kv.bench.demo.jobs import JobPlan, make_jobs
from tiered_kv.bench.demo.report import Comparison
from tiered_kv.bench.demo.stage import DemoError, Stage, so_far
from tiered_kv.bench.output import run_benchmark
from tiered_kv.trace.turn_record import TurnTokens


def job(name: str, end_s: float, *turns: TurnDone) -> JobDone:
    return JobDone(name, 0.0, end_s, turns)


def turn(
    number: int, ttft_s: float, cached: int = 0, text: str = "yes", **sources: int
) -> TurnDone:
    prompt = 100 if number == 1 else 300
    return TurnDone(number, 0.0, ttft_s, ttft_s + 0.5, prompt, cached, 10, sources, text=text)


def kept(server: str, *jobs: JobDone) -> Kept:
    return Kept(Run(server, "demo", 0, 0, 0.0, jobs), "[]", 0.0)


@pytest.fixture
def comparison() -> Comparison:
    """A comparison of two jobs with two turns each. With the connector, the second turn of one job
    finds most of its prompt in VRAM, and that of the other job in CPU memory."""
    stock = kept(
        "stock",
        job("a", 8.0, turn(1, 1.0), turn(2, 4.0, cached=32)),
        job("b", 10.0, turn(1, 1.0), turn(2, 2.0)),
    )
    tiered = kept(
        "tiered",
        job("a", 4.0, turn(1, 0.25, vram=0), turn(2, 1.0, vram=288, cpu=4, ssd=6)),
        job("b", 4.0, turn(1, 0.25, vram=0), turn(2, 0.5, vram=0, cpu=298, ssd=0)),
    )
    return Comparison(
        model="Small", dtype="bfloat16", turns=2, pool_tokens=1024, stock=stock, tiered=tiered
    )


def with_other_answers(one: Kept, *names: str) -> Kept:
    """Return the run with a different second answer for the named jobs."""
    jobs = [
        replace(done, turns=(done.turns[0], replace(done.turns[1], text="no")))
        if done.name in names
        else done
        for done in one.run.jobs
    ]
    return replace(one, run=replace(one.run, jobs=tuple(jobs)))


def test_a_table_a_line_to_quote_and_notes_are_printed(comparison: Comparison) -> None:
    lines = comparison.table().splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    assert len(lines[1]) <= 80
    assert lines[3].split() == [
        "2",
        "600",
        "288",
        "308",
        "4",
        "0.75",
        "0.97",
        "32",
        "568",
        "3.00",
        "3.90",
    ]
    assert lines[-1].split()[:5] == ["all", "800", "288", "308", "204"]

    summary = comparison.summary()
    assert "\n" not in summary
    assert "2 agents, 2 turns each, Small, KV pool of 1,024 tokens" in summary
    assert "after 0.75 s instead of 3.00 s" in summary
    assert "took 4 s instead of 10 s" in summary
    assert "26% of the prompt tokens were computed instead of 96%" in summary

    notes = "\n".join(comparison.notes())
    assert "mean job time 4.0 s, stock 9.0 s" in notes
    assert "both servers had the same cores" in notes
    assert "all 4 answers are the same" in notes
    assert "BUSY" not in notes


def test_runs_that_cannot_be_compared_are_noted(comparison: Comparison) -> None:
    other = with_other_answers(comparison.tiered, "a", "b")
    unfair = replace(other, reserved_cpus="[1]", other_cores=0.8)
    notes = "\n".join(replace(comparison, tiered=unfair).notes())
    assert "NOT COMPARABLE" in notes
    assert "used 0.8 cores during this run, 0.0 in stock's run" in notes
    assert "2 of 4 answers differ, in 2 of 2 jobs" in notes
    control = with_other_answers(comparison.stock, "b")
    shown = replace(comparison, tiered=other, control=control)
    assert "stock vLLM differs from itself in 1 answers, in 1 jobs" in "\n".join(shown.notes())
    assert shown.as_json()["differing_answers_of_stock"] == 1


def test_the_json_object_holds_the_table(comparison: Comparison) -> None:
    data = json.loads(json.dumps(comparison.as_json()))
    assert data["differing_answers"] == 0
    assert data["differing_answers_of_stock"] is None
    assert data["tiered"]["wall_s"] == 4.0
    assert data["stock"]["later_ttft_s"] == 3.0
    assert data["tiered"]["by_turn"][1] == {
        "turn": 2,
        "requests": 2,
        "sources": {"vram": 288, "cpu": 308, "recomputed": 4},
        "ttft_mean_s": 0.75,
        "ttft_p95_s": pytest.approx(0.975),
    }


def test_a_line_shows_during_a_run_what_later_turns_gain(comparison: Comparison) -> None:
    first, second = ([one.turns[at] for one in comparison.tiered.run.jobs] for at in (0, 1))
    half = [replace(one, cached_tokens=150) for one in second]
    before = [one.turns[at] for at in (0, 1) for one in comparison.stock.run.jobs]
    assert so_far(first, before) == "  computing the agents' first prompts"
    line = so_far([*first, half[0]], before)
    assert "first token after 1.0 s (stock: 4.0 s), 50% of prompts computed" in line
    assert "first token after 0.8 s (stock: 3.0 s)" in so_far([*first, *half], before)
    assert "stock" not in so_far([*first, *half], [])
    assert len(line) < 80


def test_a_trace_must_account_for_every_prompt(comparison: Comparison, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with pytest.raises(DemoError, match="wrote no trace"):
        with_all_sources(comparison.stock, trace)
    lines = [
        record(job=name, turn=at, tokens=tokens).to_line()
        for name in "ab"
        for at, tokens in ((1, TurnTokens(100, 64, 30, 0, 6)), (2, TurnTokens(300, 1, 2, 3, 294)))
    ]
    trace.write_text("\n".join(lines) + "\n")
    found = with_all_sources(comparison.stock, trace).run.turns
    assert found[0].sources == {"vram": 64, "cpu": 30, "ssd": 0, "recomputed": 6}
    trace.write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(DemoError, match=r"turn 2 of b had 300 prompt tokens, but .* reports \{\}"):
        with_all_sources(comparison.stock, trace)


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
    ("script", "message"),
    [
        (DIES_OF, "stock vLLM, while its server started: ValueError: the model does not fit."),
        (REFUSES, "stock vLLM, after 0 of 2 turns: agent-1, turn 1 was refused"),
        (SILENT, "agent-1, turn 1 timed out without an answer. Run the demo"),
    ],
)
def test_a_run_that_fails_is_a_sentence_with_the_reason_and_the_log(
    tmp_path: Path, script: str, message: str
) -> None:
    source = tmp_path / "source.py"
    source.write_text("value = compute(1, 2)\n" * 500)
    arrivals = make_jobs(JobPlan(jobs=1, turns=2, start_s=0.0), [source])
    stage, log = Stage(Console(quiet=True)), tmp_path / "stock.log"
    assert stage.stopped().startswith("stopped: before a server was started; no server is left")
    patience_s = 1.0 if script == SILENT else 60.0
    with pytest.raises(DemoError) as failed:
        stage.run("stock vLLM", scripted(script), log, arrivals, patience_s=patience_s)
    found = str(failed.value)
    assert message in found
    assert found.endswith(f"The server's log: {log}")
    assert "\n" not in found
    assert stage.stopped().endswith(f"no server is left running. Its log: {log}.")
