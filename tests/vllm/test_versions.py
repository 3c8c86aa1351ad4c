"""The contract tests, repeated with the other supported versions of vLLM.

``scripts/test`` unpacks these versions next to the environment. The tests of each run in a process
of their own. vLLM 0.33 has no CPU build, so its Python sources run with the compiled modules of the
environment's vLLM. These are sufficient for schedulers, KV cache managers, servers and the models
below.
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
    "runtime/test_kv_events.py",
    "runtime/test_weights.py",
    "vllm/test_hooks.py",
    "runtime/admission/test_gate.py",
    "vllm/test_other_connectors.py",
    "runtime/pins/test_preemption.py",
    "runtime/groups/test_turns.py",
    "vllm/test_kv_reach.py",
    "vllm/routes/test_core_method.py",
    "vllm/routes/test_endpoints.py",
    "vllm/routes/test_stream_reports.py",
    "testing/vllm/test_group_rigs.py",
    "vllm/test_refused_requests.py",
    "vllm/test_worker_reports.py",
]


NEWEST = [
    *CONTRACT,
    "vllm/test_prefill_interval.py",
    "vllm/test_cut_restores.py",
    "vllm/test_speculation.py",
    "vllm/test_sleep.py",
    "vllm/test_block_pool.py",
    "vllm/test_engine_config.py",
]
"""Test files that also run on vLLM 0.33. Most of them test features that are new in that
version."""


ENGINES = ["e2e/models/test_models.py", "e2e/served/test_server.py", "e2e/served/test_streams.py"]
"""Tests of tiny models and of a server with a real model, for vLLM 0.33."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "names"),
    [("0.30.0", CONTRACT), ("0.31.0", CONTRACT), ("0.33.0", NEWEST)],
    ids=["0.30", "0.31", "0.33"],
)
def test_the_contract_holds_on_other_versions(version: str, names: list[str]) -> None:
    run_tests(version, names)


@pytest.mark.slow
@pytest.mark.e2e
def test_engines_and_servers_run_on_the_newest_version() -> None:
    run_tests("0.33.0", ENGINES)


def run_tests(version: str, names: list[str]) -> None:
    """Run test files with a version of vLLM in a separate process."""
    if (ROOT / ".venv" / ".tiered-kv-kind").read_text().strip() != "cpu":
        pytest.skip("the environment is the system's: only its own vLLM is tested")
    other = ROOT / ".venv" / "other" / f"vllm-{version}"
    if not other.is_dir():
        pytest.fail(f"vLLM {version} is not unpacked in {other}: run scripts/test once")
    files = [str(ROOT / "tests" / name) for name in names]
    code = (
        f"import vllm, sys, pytest; assert vllm.__version__ == {version!r}, vllm.__version__;"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    # vLLM's source package does not record the device that it is built for.
    env = {"PYTHONPATH": f"{other}{os.pathsep}{ROOT}", "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
