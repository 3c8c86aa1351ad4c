"""The doctor runs checks one by one, and skips a check that hangs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.doctor.told import by_check
from tiered_kv.doctor.finding import examine, ok

BASE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("TIERED_KV_") and name != "PYTHONPATH"
}


def script(*lines: str) -> tuple[str, ...]:
    """Return the command of a process that runs these lines of Python."""
    return (sys.executable, "-c", "\n".join(("import json, time", *lines)))


def says(**found: str) -> str:
    return f"print({json.dumps(json.dumps(found))}, flush=True)"


GOOD = ok("disk", "fast")


def children() -> set[str]:
    """Return the ids of this process's running children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_this_machine_is_examined_with_the_server_s_environment(tmp_path: Path) -> None:
    env = {**BASE, "TIERED_KV_SSD_PATH": str(tmp_path), "TIERED_KV_SSD_GIB": "0.01"}
    found = by_check(examine({**env, "LMCACHE_CHUNK_SIZE": "256"}))
    assert {"python", "vllm", "settings", "cores", "CPU memory", "SSD speed"} <= set(found)
    assert found["LMCACHE_CHUNK_SIZE"].verdict.value == "warn"
    assert str(tmp_path) in found["settings"].seen
    assert list(tmp_path.iterdir()) == []


def test_next_to_a_running_server_available_memory_does_not_count() -> None:
    found = by_check(examine(BASE, beside=True))
    assert found["CPU memory"].seen.endswith("GiB in total")


def test_modules_of_the_present_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert "cores" in by_check(examine(BASE))


def test_a_check_that_hangs_is_named_and_its_process_ended() -> None:
    before = children()
    command = script(says(begins="SSD"), says(**GOOD.to_json()), "time.sleep(600)")
    findings = list(examine(BASE, command, silence_s=5))
    assert findings[0] == GOOD
    assert (findings[1].check, findings[1].verdict.value) == ("SSD", "fail")
    assert findings[1].seen == "no answer within 5 s"
    assert children() <= before


def test_a_check_that_ends_with_an_error_is_named() -> None:
    command = script(says(begins="SSD"), "raise OSError('the disk is on fire')")
    (found,) = examine(BASE, command)
    assert (found.check, found.verdict.value) == ("SSD", "fail")
    assert "the disk is on fire" in found.seen


def test_a_reader_that_stops_early_leaves_no_process() -> None:
    before = children()
    findings = examine(BASE, script(says(**GOOD.to_json()), "time.sleep(600)"))
    assert next(findings) == GOOD
    findings.close()
    assert children() <= before
