"""The installed package is complete, and its core imports neither vLLM nor torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS_VLLM = "tiered_kv.connectors.vllm"
WHOLE = (
    "bench",
    "connectors",
    "testing.engine",
    "testing.fairness",
    "testing.rig",
    "testing.vllm",
)
"""Subpackages that run an engine with the connector, and therefore import everything."""
NEEDS_TORCH = {f"tiered_kv.transfer.cuda.{name}" for name in ("backend", "page_views", "staging")}


def modules_on_disk() -> dict[str, bool]:
    """Return every module under tiered_kv by name, and whether it is a package."""
    found = {}
    for folder, subfolders, files in os.walk(ROOT / "tiered_kv", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        package = ".".join(Path(folder).relative_to(ROOT).parts)
        if "__init__.py" not in files:
            assert not any(name.endswith(".py") for name in files), f"{package} is no package"
            continue
        found[package] = True
        for name in files:
            if name.endswith(".py") and name != "__init__.py":
                found[f"{package}.{name.removesuffix('.py')}"] = False
    return found


def test_the_listed_packages_match_those_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = [name for name, is_package in modules_on_disk().items() if is_package]
    assert sorted(listed) == sorted(on_disk)


BLOCKER = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "torch", "transformers"}:
            raise ImportError(f"{name} is imported at import time")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
forbidden = [name for name in sys.modules if name.startswith(sys.argv[1] + ".connectors")]
assert not forbidden, f"the core imports {forbidden}"
"""


@pytest.mark.parametrize("prefix", ["tiered_kv"])
def test_the_core_and_the_policies_import_neither_vllm_nor_torch(prefix: str) -> None:
    """Simulators and tools run without vLLM and torch. The core imports no connector either."""
    core = [
        name
        for name in modules_on_disk()
        if not name.startswith(tuple(f"{prefix}.{whole}" for whole in WHOLE))
        and name not in NEEDS_TORCH
    ]
    assert f"{prefix}.policies.jobs.hints" in core
    run = subprocess.run(
        [sys.executable, "-c", BLOCKER, *sorted(core)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
