"""The contract tests again, on the older versions of vLLM that we support.

``scripts/test`` unpacks them beside the environment; each runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = [
    "runtime/pages/test_restores.py",
    "runtime/test_ahead.py",
    "runtime/pins/test_pinning.py",
    "runtime/test_resets.py",
    "runtime/test_weights.py",
    "vllm/test_hooks.py",
    "runtime/admission/test_gate.py",
    "vllm/test_beside.py",
    "runtime/pins/test_preemption.py",
    "runtime/groups/test_turns.py",
    "vllm/test_kv_reach.py",
    "vllm/routes/test_core_method.py",
    "vllm/routes/test_endpoints.py",
    "vllm/routes/test_stream_reports.py",
    "testing/vllm/test_group_rigs.py",
]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0"])
def test_the_contract_holds_on_older_versions(version: str) -> None:
    if (ROOT / ".venv" / ".tiered-kv-kind").read_text().strip() != "cpu":
        pytest.skip("the environment is the system's: only its own vLLM is tested")
    older = ROOT / ".venv" / "older" / f"vllm-{version}"
    if not older.is_dir():
        pytest.fail(f"vLLM {version} is not unpacked in {older}: run scripts/test once")
    files = [str(ROOT / "tests" / name) for name in CONTRACT]
    code = (
        f"import vllm, sys, pytest; assert vllm.__version__ == {version!r}, vllm.__version__;"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "PYTHONPATH": f"{older}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
