"""Measures of indirection that may only decrease.

Each test compares a measured figure with the lowest one reached so far. A change that lowers a
figure also lowers the limit here. A change that raises one needs another design, not another limit.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.test_architecture import ROOT, Module, modules
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.engine.rig import RigOptions, SecondRig

CONSTRUCTOR_PARAMETERS = 8
ORDER_TESTS = 10
SMALL_WITH_ONE_IMPORTER = 4
WHOLE_TURN, END_OF_TURN, TURN_FROM_SSD = 67, 41, 73
"""Numbers of product files whose functions run during a turn with every tier and a trace, during
the end of a turn, and during a turn whose context is read from SSD."""
AT_INTERVALS = {
    "connectors/runtime/policy_state.py",
    "connectors/runtime/step_timer.py",
    "tiered_kv/storage/store/folders.py",
}
"""Files that run only at intervals. They do not count in the turn from SSD, because an interval may
or may not end during that turn."""


def product() -> list[Module]:
    others = ("tests.", "tiered_kv.testing.", "tiered_kv.bench.")
    return [module for module in modules() if not module.name.startswith(others)]


def test_no_constructor_has_more_parameters() -> None:
    found = dict[str, int]()
    for module in product():
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                        args = part.args
                        count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1
                        found[f"{module.name}.{node.name}"] = count
    most = max(found.values())
    assert most == CONSTRUCTOR_PARAMETERS, [name for name, n in found.items() if n == most]


def test_types_of_orders_are_not_tested_in_more_places() -> None:
    found = [
        f"{module.name}:{node.lineno}"
        for module in product()
        for node in ast.walk(ast.parse(module.text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and re.search(r"(?<!Job)Order\b", ast.unparse(node.args[1]))
    ]
    assert len(found) == ORDER_TESTS, found


def test_no_more_small_modules_serve_one_importer() -> None:
    importers: dict[str, set[str]] = {}
    for module in product():
        for level, name in module.imports():
            importers.setdefault(f"{module.package}.{name}" if level else name, set()).add(
                module.name
            )
    found = [
        module.name
        for module in product()
        if not module.name.endswith(("__init__", "__main__"))
        and len(importers.get(module.name, ())) == 1
        and module.text.count("\n") < 60
    ]
    assert len(found) == SMALL_WITH_ONE_IMPORTER, found


class Recorder:
    """Records the product files whose functions are called, on this thread and on threads that
    start later."""

    def __init__(self) -> None:
        self.files: set[str] | None = None  # None while recording is off
        self.only: int | None = None  # id of the thread to record; None for all threads

    def __enter__(self) -> Recorder:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def record(
        self, call: Callable[[], Any], *, in_this_thread: bool = False
    ) -> tuple[Any, set[str]]:
        """Return the result of a call, and the product files that ran during it. ``in_this_thread``
        excludes other threads, which may run unrelated code meanwhile."""
        self.files, self.only = set(), threading.get_ident() if in_this_thread else None
        try:
            return call(), self.files
        finally:
            self.files = None

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (files := self.files) is None:
            return
        if self.only not in (None, threading.get_ident()):
            return
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(ROOT) and path.suffix == ".py":
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("tests/", "tiered_kv/testing/", ".venv/")):
                files.add(name)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


def test_a_turn_and_its_end_run_through_no_more_files(recorder: Recorder, tmp_path: Path) -> None:
    extra = {"cpu_gib": 0.001, "ssd_path": str(tmp_path), "ssd_gib": 1}
    with SecondRig(RigOptions(extra={**extra, "trace": str(tmp_path / "trace.jsonl")})) as rig:
        rig.ask("w", text(100, seed=3), params={"job_id": "w"})
        params = {"job_id": "j", "is_last_step": False, "tool_name": "bash"}
        named = {**params, "tool_command": "pytest -q"}
        _, whole = recorder.record(lambda: rig.ask("t0", text(200, seed=1), params=named))
        half = rig.halves.scheduler
        on_finished, ends = half.on_finished, list[set[str]]()

        def finish(request_id: str) -> Any:
            result, files = recorder.record(lambda: on_finished(request_id), in_this_thread=True)
            ends.append(files)
            return result

        half.on_finished = finish
        rig.now += 1
        again = text(200, seed=1) + rig.outputs["t0"] + text(20, seed=5)
        rig.ask("t1", again, params=params)
    assert len(whole) <= WHOLE_TURN, sorted(whole)
    assert len(ends[-1]) <= END_OF_TURN, sorted(ends[-1])


def test_a_turn_from_ssd_runs_through_no_more_files(recorder: Recorder, tmp_path: Path) -> None:
    extra = {"ssd_path": str(tmp_path), "ssd_gib": 1, "admission": "off", "codec": "raw"}
    with SecondRig(RigOptions(extra={"cpu_gib": 2.4e-5, **extra})) as rig:
        prompt = text(300, seed=1)
        rig.ask("first", prompt)
        rig.wait_for_worker()
        rig.run()
        for i in range(40):
            rig.now += 1
            rig.ask(f"r{i}", text(500, seed=1000 + i))
            rig.wait_for_worker()
        found = recorder.record(lambda: (rig.ask("again", prompt), rig.wait_for_worker()))[1]
        found -= AT_INTERVALS
        assert rig.count("prompt_tokens_ssd") > 200
    assert len(found) <= TURN_FROM_SSD, sorted(found)
