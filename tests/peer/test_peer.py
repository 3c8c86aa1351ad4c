"""vLLM's own tests of its scheduler and connectors, run with this project's classes. Every test
that passes on stock vLLM passes, except for differences by design."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.peer.by_design import BY_DESIGN
from tests.peer.peer_plugin import CONNECTOR, SCHEDULER, STOCK
from tests.peer.unpack import vllm_tests

ROOT = Path(__file__).parents[2]
CORE = (
    "scheduler async_scheduler prefix_caching deferred_block_free priority_preemption_bug "
    "swa_inflight_window_free output worker_slot_overflow reset_prefix_cache_e2e scheduler_e2e"
)
UNIT = (
    "error_propagation invalid_blocks_correctness kv_connector_lifecycle "
    "kv_load_failure_recovery cache_pollution_prevention remote_decode_lifecycle "
    "remote_prefill_lifecycle scheduler_kv_connector_override output_aggregator "
    "handshake_pp_aggregation config multi_connector simple_cpu_offload_connector "
    "decode_bench_connector"
)
FILES = [
    *(f"tests/v1/core/test_{name}.py" for name in CORE.split()),
    *(f"tests/v1/kv_connector/unit/test_{name}.py" for name in UNIT.split()),
    "tests/v1/kv_connector/unit/offloading_connector",
]


@pytest.fixture(scope="module")
def tests_of_vllm() -> Path:
    import vllm

    version = vllm.__version__.partition("+")[0]
    return vllm_tests(version, ROOT / ".venv" / "peer")


def passing(folder: Path, mode: str, report: Path) -> set[str]:
    """Run vLLM's tests in this mode, and return the names of the tests that pass. Tests that need
    to download a model fail in every mode."""
    files = [name for name in FILES if (folder / name).exists()]
    assert len(files) > 20, "vLLM has moved its tests"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "peer_plugin", "-p", "no:cacheprovider"),
            *("--numprocesses", "auto", "--timeout", "300", f"--junitxml={report}", *files),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests" / "peer"),
            "HF_HUB_OFFLINE": "1",
            "PEER_MODE": mode,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) > 500, done.stdout[-3000:]
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


@pytest.fixture(scope="module")
def stock(tests_of_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return passing(tests_of_vllm, STOCK, tmp_path_factory.mktemp("stock") / "report.xml")


@pytest.mark.peer
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [SCHEDULER, CONNECTOR])
def test_tests_that_pass_on_stock_pass_with_our_classes(
    tests_of_vllm: Path, stock: set[str], tmp_path: Path, mode: str
) -> None:
    ours = passing(tests_of_vllm, mode, tmp_path / "report.xml")
    assert len(stock) > 900, "stock passes what it always did"
    lost, known = stock - ours, set(BY_DESIGN[mode])
    assert not lost - known, "\n".join(["pass on stock, and not with ours:", *sorted(lost - known)])
    assert not known - lost, "\n".join(["differ no longer:", *sorted(known - lost)])
