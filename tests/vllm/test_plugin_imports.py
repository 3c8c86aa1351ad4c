"""Modules that this package imports before an engine starts."""

from __future__ import annotations

import subprocess
import sys

IMPORTED_FIRST = ("plugin", "connector", "engine_scheduler")


def test_numba_is_not_imported_before_a_worker_starts() -> None:
    """When a CPU worker of vLLM 0.32 starts without Triton, it inspects every attribute of every
    module. The inspection fails at llvmlite's library object, which accepts any attribute name."""
    names = "".join(f"import tiered_kv.connectors.vllm.{name}\n" for name in IMPORTED_FIRST)
    found = subprocess.run(
        [sys.executable, "-c", f"import sys\n{names}print('llvmlite' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split()[-1] == "False"
