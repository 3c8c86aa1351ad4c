"""Environment and arguments that start a server as planned; the README has the same by hand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

TRANSFER = {
    "kv_connector": "TieredContinuumConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""Value of ``--kv-transfer-config``."""
SCHEDULER = "tiered_kv.connectors.vllm.engine_scheduler.ContinuumScheduler"
"""Class that takes requests in the order in which their jobs began."""
SSD_FOLDER = "/nvme/tiered-kv"
"""Folder for pages on SSD, for the operator to replace."""
SHUTDOWN_S = 30
"""Seconds for requests in flight and for the last pages on their way to SSD."""


def environment(cpu_gib: float, ssd_gib: float) -> dict[str, str]:
    """Variables of the server's environment, by name."""
    found = {"TIERED_KV_CPU_GIB": f"{cpu_gib:g}"}
    if ssd_gib > 0:
        found["TIERED_KV_SSD_PATH"] = SSD_FOLDER
        found["TIERED_KV_SSD_GIB"] = f"{ssd_gib:g}"
    return found


def arguments(
    model: Path,
    *,
    ranks: int,
    ssd: bool,
    dtype: str,
    kv_dtype: str,
    utilization: float | None,
) -> list[str]:
    """Words of the command.

    Args:
        ssd: True if there is a folder to flush to at the end.
        dtype, kv_dtype: as they were asked for; vLLM's defaults are left out.
        utilization: share of VRAM; None for vLLM's default.
    """
    folder = model if model.is_dir() else model.parent
    words = ["vllm", "serve", str(folder)]
    if ranks > 1:
        words += ["--tensor-parallel-size", str(ranks)]
    if dtype != "auto":
        words += ["--dtype", dtype]
    if kv_dtype != "auto":
        words += ["--kv-cache-dtype", kv_dtype]
    if utilization is not None:
        words += ["--gpu-memory-utilization", f"{utilization:g}"]
    if ssd:
        words += ["--shutdown-timeout", str(SHUTDOWN_S)]
    words += ["--kv-transfer-config", json.dumps(TRANSFER, separators=(",", ":"))]
    return [*words, "--scheduler-cls", SCHEDULER]


def in_shell(variables: dict[str, str], words: list[str]) -> str:
    """Lines for a shell: one that exports the variables, and one that starts the server, broken
    before its long options."""
    exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    quoted = shlex.join(words)
    for option in (" --kv-transfer-config", " --scheduler-cls"):
        quoted = quoted.replace(option, f" \\\n {option}")
    return f"export {exported}\n{quoted}"
