"""Findings of the doctor, and the examination of this machine in a separate process, which is
killed if it hangs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue

from tiered_kv.json_fields import JsonObject


class Verdict(Enum):
    """Verdict of a check."""

    OK = "ok"
    """Success: the check found no problem."""
    WARN = "warn"
    """Warning: the checked part works, but not as well as it could, or perhaps not as intended."""
    FAIL = "fail"
    """Failure: the server does not start, or the checked part has no effect."""


@dataclass(frozen=True, slots=True)
class Finding(JsonObject):
    """Result of a check.

    Attributes:
        check: name of the check.
        seen: observed state.
        advice: recommended change; empty if there is none.
    """

    check: str
    verdict: Verdict
    seen: str
    advice: str = ""


FAIL, WARN = Verdict.FAIL, Verdict.WARN


def ok(check: str, seen: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Verdict.OK, seen)


def warn(check: str, seen: str, advice: str) -> Finding:
    """Return a finding about a possible improvement."""
    return Finding(check, Verdict.WARN, seen, advice)


def fail(check: str, seen: str, advice: str) -> Finding:
    """Return a finding about a failure."""
    return Finding(check, Verdict.FAIL, seen, advice)


def judge(check: str, seen: str, *rules: tuple[object, Verdict, str]) -> Finding:
    """Return the finding of the first rule that applies. If no rule applies, the finding is OK.

    Args:
        rules: condition, verdict and advice of each rule.
    """
    for applies, verdict, advice in rules:
        if applies:
            return Finding(check, verdict, seen, advice)
    return ok(check, seen)


COMMAND = (sys.executable, "-P", "-m", "tiered_kv.doctor")
HOME = Path(__file__).resolve().parents[2]
"""Folder from which this package is imported, which may be a checkout."""
BESIDE = "--beside"
"""Command line option for a machine on which a server is already running."""
SILENCE_S = 30.0
"""Time without a finding after which a check counts as hanging, seconds. The longest check, which
measures the disk, takes half a second on a slow disk."""


def examine(
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    silence_s: float = SILENCE_S,
    *,
    beside: bool = False,
) -> Generator[Finding, None, None]:
    """Check this machine in a separate process. Yields each finding as soon as its check has
    finished. If a check hangs or the process fails, the last finding reports this as a failure.

    Args:
        env: environment that a server would have; None for this process's environment.
        command: command that runs the checks, with the output of ``python -m tiered_kv.doctor``.
        silence_s: time without a finding after which the remaining checks are abandoned, seconds.
        beside: True if a server is already running on this machine, and uses its memory.
    """
    variables = dict(os.environ if env is None else env)
    paths = (str(HOME), variables.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    child = subprocess.Popen(
        [*command, *([BESIDE] if beside else [])],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: SimpleQueue[str | None] = SimpleQueue()
    reader = threading.Thread(target=_read, args=(child, lines), name="doctor", daemon=True)
    reader.start()
    at = "the first check"
    try:
        while (line := lines.get(timeout=silence_s)) is not None:
            found = json.loads(line)
            if "begins" in found:
                at = found["begins"]
            else:
                yield Finding.from_json(found)
        _, said = child.communicate(timeout=silence_s)
        if child.returncode:
            last = (said.strip() or f"status {child.returncode}").splitlines()[-1]
            yield fail(
                at, f"the check ended with an error: {last}", "Report this error with this output."
            )
    except (Empty, subprocess.TimeoutExpired):
        advice = "Check the disk or mount that this check uses: a call to it did not return."
        yield fail(at, f"no answer within {silence_s:g} s", advice)
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # the process may wait for a failed disk
            child.wait(timeout=1.0)
            reader.join()
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()


def _read(child: subprocess.Popen[str], lines: SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)
