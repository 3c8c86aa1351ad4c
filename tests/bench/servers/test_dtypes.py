from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tiered_kv.bench.servers.dtypes import (
    BF16,
    FLOAT32,
    CpuFeatures,
    Dtype,
    DtypeError,
    choose,
    cpu_dtype,
)

ROOT = Path(__file__).resolve().parents[3]
NEITHER = CpuFeatures(avx512=False, avx512_bf16=False, amx=False)
OPEN = CpuFeatures(avx512=True, avx512_bf16=False, amx=False)


def times(**seconds: float) -> Mapping[str, float]:
    return seconds


def test_bf16_is_chosen_where_the_processor_computes_it() -> None:
    def untimed(_: str) -> float:
        raise AssertionError("the features leave no doubt")

    native = CpuFeatures(avx512=True, avx512_bf16=True, amx=False)
    assert choose(native, untimed).name == BF16
    assert "AMX" in choose(CpuFeatures(True, True, True), untimed).reason
    assert choose(NEITHER, untimed) == Dtype(
        FLOAT32, "this CPU has no AVX-512, so bfloat16 is emulated"
    )


def test_where_the_features_leave_doubt_the_faster_is_chosen() -> None:
    slow = choose(OPEN, times(bfloat16=3.0, float32=1.0).__getitem__)
    assert str(slow) == "float32: bfloat16 takes 3.0 times as long as float32 on this CPU"
    assert choose(OPEN, times(bfloat16=1.0, float32=2.0).__getitem__).name == BF16


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cpu_dtype()
    assert found.name in (BF16, FLOAT32)
    assert found.reason
    monkeypatch.setattr(subprocess, "run", None)
    assert cpu_dtype() is found


def test_a_broken_torch_is_an_error_that_shows_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DtypeError, match=r"(?s)features of this CPU.*no such library"):
        cpu_dtype.__wrapped__()


def test_avx512_can_be_hidden_on_any_machine() -> None:
    """Under ``scripts/avx2``, torch and vLLM use AVX2 kernels, and float32 is chosen. This makes it
    possible to test the code path without AVX-512 on a machine that has AVX-512."""
    script = (
        "import torch; from vllm.platforms.cpu import CpuPlatform; CpuPlatform.import_kernels();"
        "print(torch.backends.cpu.get_cpu_capability());"
        "print(any('_C_AVX2' in line for line in open('/proc/self/maps')));"
        "print(any('/_C.abi3' in line for line in open('/proc/self/maps')))"
    )
    avx2 = str(ROOT / "scripts" / "avx2")
    done = subprocess.run(
        [avx2, sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-3:] == ["AVX2", "True", "False"]
    chosen = subprocess.run(
        [avx2, sys.executable, "-m", "tiered_kv.bench.servers.dtypes"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ,
    )
    assert '"float32"' in chosen.stdout
