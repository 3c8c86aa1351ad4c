"""``tiered-kv top`` in a real terminal, with recorded answers of a real engine's routes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.top.recorded import busy_rig, record
from tests.top.route_server import Answer, Answers, RouteServer, refusal
from tests.top.terminal import LOOK_EVERY_S, PATIENCE_S, has_ended, top_in

pytestmark = pytest.mark.slow

STATUS, FIRST_PAGE = "/tiered_kv/status", "/tiered_kv/jobs?limit=1000&after=0.0"


@pytest.fixture
def answers(make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return record(monkeypatch, busy_rig(make_rig, tmp_path))


def with_jobs(answers: Answers, count: int) -> Answers:
    """Return the recorded answers with ``count`` jobs, all copies of the first recorded job."""
    page: dict[str, Any] = json.loads(answers[FIRST_PAGE].body)
    first = page["jobs"][0]
    jobs = [
        {**first, "id": f"job-{n}", "number": n, "context_tokens": n} for n in range(1, count + 1)
    ]
    return {**answers, FIRST_PAGE: Answer(json.dumps({**page, "known": count, "jobs": jobs}))}


def first_job(lines: list[str]) -> str:
    """Return the name of the job in the first row, or an empty string if there is none."""
    titles = [at for at, line in enumerate(lines[:-1]) if line.startswith("job, by")]
    return lines[titles[0] + 1].split(" ")[0] if titles else ""


def test_an_operator_looks_sorts_pages_resizes_and_quits(answers: Answers, tmp_path: Path) -> None:
    with (
        RouteServer(answers).running() as server,
        top_in(tmp_path, server.url, "--every", "0.2") as terminal,
    ):
        lines = terminal.wait_for_text("job, by state")
        assert len(lines) == 24
        assert lines[0].startswith(f"{server.url}  tiered-kv ")
        assert any(line.startswith("pinned ") and "VRAM pin" in line for line in lines)
        assert any(line.startswith("away ") and "SSD" in line for line in lines)
        assert any(line.startswith("\\x1b[31mred") for line in lines)
        assert lines[-1].startswith("1-4 of 4 ")
        assert terminal.settings() != terminal.settings_before

        server.answers = with_jobs(answers, 500)
        terminal.wait_for_text(" of 500 ")
        terminal.type("c")
        terminal.wait_for(lambda lines: first_job(lines) == "job-500")
        terminal.type("c")
        terminal.wait_for(lambda lines: first_job(lines) == "job-1")
        terminal.type("Down", "Down", "Up")
        terminal.wait_for(lambda lines: first_job(lines) == "job-2")
        terminal.type("End")
        terminal.wait_for_text("-500 of 500 ")
        terminal.type("Home")
        terminal.wait_for(lambda lines: first_job(lines) == "job-1")
        terminal.type("PageDown")
        lines = terminal.wait_for(lambda lines: first_job(lines) not in ("", "job-1"))
        page = int(first_job(lines).removeprefix("job-")) - 1
        assert page > 3

        terminal.resize(60, 16)
        lines = terminal.wait_for(
            lambda lines: len(lines) == 16 and " of 500  q quit  s c p" in lines[-1]
        )
        assert max(map(len, lines)) <= 60
        assert first_job(lines) == f"job-{page + 1}", "the same job is the first"
        terminal.resize(200, 50)
        lines = terminal.wait_for(lambda lines: len(lines) == 50 and "pin's end" in lines[-1])
        assert any("gap q50, q90" in line for line in lines)
        assert any("since start" in line for line in lines), "there is room for panels"

        terminal.type("q")
        assert terminal.code() == 0


def test_a_restarted_server_is_shown_again(answers: Answers, tmp_path: Path) -> None:
    server = RouteServer(answers)
    with server.running(), top_in(tmp_path, server.url, "--every", "0.2") as terminal:
        terminal.wait_for_text("job, by state")
        server.answers = {STATUS: refusal(503, "The engine does not respond.")}
        terminal.wait_for_text("The engine does not respond. The last known state follows.")
        assert any(line.startswith("pinned ") for line in terminal.lines())
        server.answers = answers
        terminal.wait_for(lambda lines: not any("does not respond" in line for line in lines))
        terminal.type("C-c")
        assert terminal.code() == 128 + signal.SIGINT


def test_a_signal_leaves_the_terminal_as_it_was(answers: Answers, tmp_path: Path) -> None:
    with RouteServer(answers).running() as server, top_in(tmp_path, server.url) as terminal:
        terminal.wait_for_text("job, by state")
        terminal.type("C-z")
        terminal.wait_for(lambda _: terminal.is_stopped())
        assert terminal.settings() == terminal.settings_before
        assert not any("job, by" in line for line in terminal.lines())
        os.kill(terminal.pid, signal.SIGCONT)
        terminal.wait_for_text("job, by state")
        assert terminal.settings() != terminal.settings_before
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.code() == 128 + signal.SIGTERM


def test_a_terminal_that_is_closed_ends_the_command(answers: Answers, tmp_path: Path) -> None:
    with RouteServer(answers).running() as server, top_in(tmp_path, server.url) as terminal:
        terminal.wait_for_text("job, by state")
        pid = terminal.pid
        assert not has_ended(pid)
        terminal.end()
        deadline = time.monotonic() + PATIENCE_S
        while not has_ended(pid):
            assert time.monotonic() < deadline
            time.sleep(LOOK_EVERY_S)
