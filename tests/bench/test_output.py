"""Words and exit status of a command, however it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tiered_kv.bench.output import run_benchmark, run_command

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals are handled afterwards as they were before."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def fail() -> int:
    raise LookupError("no [bold] :key: in " + "a" * 200)


def test_a_command_ends_with_its_own_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: 3, (LookupError,), "stopped") == 3
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_one_line_as_it_was_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(fail, (OSError, LookupError), "stopped") == 1
    assert capfd.readouterr() == ("", "error: no [bold] :key: in " + "a" * 200 + "\n")


def test_what_is_no_failure_is_raised() -> None:
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


def test_a_benchmark_that_is_ended_ends_what_it_began() -> None:
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
