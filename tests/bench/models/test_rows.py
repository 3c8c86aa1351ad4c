"""A row tells what is wrong, and a process that dies or hangs leaves one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from tiered_kv.bench.models.__main__ import chosen, environment, verdict
from tiered_kv.bench.models.catalogue import EVERY, MODELS
from tiered_kv.bench.models.engine.asking import text
from tiered_kv.bench.models.processes import TimedOut, run_process
from tiered_kv.bench.models.row import Row, in_a_line
from tiered_kv.bench.models.turns import LEAST_BEFORE_STOP, stop_token
from tiered_kv.bench.servers.load import group_members


def test_names_are_unique_and_those_that_are_named_run() -> None:
    names = [model.name for model in EVERY]
    assert len(set(names)) == len(names)
    assert [model.name for model in chosen(["gemma3", "llama"])] == ["llama", "gemma3"]
    assert chosen([]) == list(EVERY)
    with pytest.raises(typer.BadParameter, match="no_such"):
        chosen(["no_such"])


def fail() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise RuntimeError("outer\nmore") from error


def test_an_error_is_a_note_and_the_row_goes_on() -> None:
    row = Row("m", cpu_tokens=768, context=768, equal=True)
    with row.noting("ssd"):
        fail()
    assert row.notes == ["ssd: KeyError: 'inner'"]
    assert row.summary().startswith("equal; NOT equal_bytes")
    assert row.summary().endswith("ssd: KeyError: 'inner'")
    assert Row(**row.as_json()) == row
    assert in_a_line(RuntimeError()) == "RuntimeError"


def test_what_cannot_start_is_no_failure() -> None:
    row = Row("m", cannot_start="no AMX")
    assert row.summary() == "cannot start: no AMX"
    assert verdict([Row("a", equal=True).as_json(), Row("b").as_json()]) == {
        "models": 2,
        "equal": 1,
        "equal_bytes": 0,
        "control_differs": 0,
    }


def test_each_rank_has_cores_of_its_own(tmp_path: Path) -> None:
    one, two = MODELS[0], next(model for model in EVERY if model.ranks == 2)
    base = {"TIERED_KV_CPU_GIB": "3", "PYTHONPATH": "/elsewhere"}
    env = environment(base, tmp_path, one)
    assert "TIERED_KV_CPU_GIB" not in env
    assert env["PYTHONPATH"].endswith(f"{os.pathsep}/elsewhere")
    assert environment(base, tmp_path, two)["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert (tmp_path / "torchvision" / "__init__.py").exists()


def test_texts_are_the_same_every_time() -> None:
    assert text(50, 1, 2048) == text(50, 1, 2048)
    assert text(50, 1, 2048) != text(50, 2, 2048)
    assert min(text(500, 1, 2048)) > 2, "the tokenizer's own"


def test_a_stop_string_is_a_word_that_was_not_said_before() -> None:
    said = [100] * LEAST_BEFORE_STOP
    assert stop_token([*said, 100, 7, 8]) == LEAST_BEFORE_STOP + 1
    assert stop_token([*said, 10, 11]) == LEAST_BEFORE_STOP + 1, "w10 is in w100"
    assert stop_token(said) is None


def test_a_process_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    module = tmp_path / "hangs.py"
    module.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpgid(0), flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    with pytest.raises(TimedOut, match="longer than 2 s"):
        run_process("hangs", [], {**os.environ, "PYTHONPATH": str(tmp_path)}, log, 2.0)
    assert not group_members(int(log.read_text()))


def test_a_process_that_fails_tells_its_status(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys\nprint('said')\nsys.exit(int(sys.argv[1]))\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run_process("fails", ["3"], env, tmp_path / "log", 30.0) == 3
    assert (tmp_path / "log").read_text() == "said\n"
