"""Output and exit status of a benchmark that succeeds, fails or is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.bench import output
from tiered_kv.bench.output import AsJson, benchmark, run_benchmark, run_command

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers after each test."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def counting(fails: bool = False, as_json: AsJson = False) -> None:
    """Count pages."""
    with benchmark("Pages", 2, as_json=as_json) as run:
        os.write(1, b"a library's words\n")
        run.tick("counting")
        if fails:
            raise RuntimeError("no [bold] page")
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
        run.result = {"pages": 3, "bf16": {"ratio": 1.50612}, "rows": [{"way": "d2h"}]}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        run_benchmark(counting, "Pages that are there.", words)
    return int(stop.value.code or 0)


def test_a_result_is_one_json_object_with_its_provenance(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("--json") == 0
    said = capfd.readouterr()
    result = json.loads(said.out)
    measured = result.pop("measured")
    assert result == {"pages": 3, "bf16": {"ratio": 1.50612}, "rows": [{"way": "d2h"}]}
    assert said.err == "a library's words\n"
    assert measured["cores"] == len(os.sched_getaffinity(0))
    assert measured["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert measured["seconds"] > 0
    assert measured["others_cores"] is None or measured["others_cores"] >= 0
    head = subprocess.run(
        ["git", "-C", str(output.CHECKOUT), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    assert (measured["commit"] or "").removesuffix("-dirty") == head


def test_outside_a_checkout_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "CHECKOUT", tmp_path)
    monkeypatch.setattr(output, "PROC", tmp_path)
    measured = output.measured()
    assert measured["commit"] is None
    assert measured["cpu_flags"] == []


def test_without_json_a_result_is_tables(capfd: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capfd.readouterr().out
    for words in ("Pages: bf16", "1.506", "Pages: rows", "d2h", "Measured in"):
        assert words in out


def test_a_failing_benchmark_gives_the_reason_in_a_sentence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("--fails") == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.endswith("error: no [bold] page\n")


def test_a_terminated_benchmark_stops_its_child_processes() -> None:
    ended = list[str]()

    def command() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append("its servers")

    with pytest.raises(SystemExit) as stop:
        run_benchmark(command, None, [])
    assert stop.value.code not in (0, None)
    assert ended


def fail() -> int:
    raise LookupError("no :key: in " + "a" * 200)


def test_a_command_ends_with_its_own_code_or_reports_what_failed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_command(lambda: 3, (LookupError,), "stopped") == 3
    assert capfd.readouterr() == ("", "")
    assert run_command(fail, (OSError, LookupError), "stopped") == 1
    assert capfd.readouterr() == ("", "error: no :key: in " + "a" * 200 + "\n")
    with pytest.raises(LookupError):
        run_command(fail, (OSError,), "stopped")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_stops_a_command_even_where_it_was_ignored(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        signal.raise_signal(number)
        return 0

    signal.signal(number, signal.SIG_IGN)
    assert run_command(interrupted, (), "stopped; nothing is left") == 130
    assert capfd.readouterr() == ("", "stopped; nothing is left\n")


def test_a_signal_that_is_not_named_stays_as_it_is() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert run_command(lambda: 0, (), "stopped", signals=(signal.SIGTERM,)) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
