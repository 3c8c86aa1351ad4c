"""``tiered-kv plan`` estimates what each tier can hold, and prints the server's flags."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.sizing.published import GEMMA3_12B, LLAMA_8B, NEMOTRON_9B, QWEN3_NEXT_80B, write
from tests.sizing.recorded import answer_recorded
from tiered_kv.cli.app import app
from tiered_kv.config import load_config


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.sizing.model_shape.ask_vllm", answer_recorded)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_a_plan_is_read_by_people(tmp_path: Path) -> None:
    folder = write(tmp_path, GEMMA3_12B)
    result = invoke(folder, "--gpu", "h100", "--jobs", 30, "--ssd-gib", 100)
    assert result.exit_code == 0, result.output
    text = re.sub(r" +", " ", result.output)
    assert "Gemma3ForConditionalGeneration on h100-80" in text
    assert "\nwindow of 1,024 40 320 KiB - 16 5\n" in text
    assert "\nfull attention 8 64.0 KiB - 16 1\n" in text
    for tier in ("VRAM", "CPU memory", "SSD"):
        assert f"\n{tier} " in text
    assert "NVIDIA H100 data sheet" in text
    assert "{" not in text.partition("export")[0]


def test_the_plan_for_machines_has_the_same_figures(tmp_path: Path) -> None:
    found = as_json(write(tmp_path, NEMOTRON_9B), "--gpu", "rtx4090", "--context", 20_000)
    assert found["kv_bytes_per_token"] == 4 * 4096
    assert found["state_bytes_per_context"] == 27 * 5_316_608
    assert found["context"] == 20_000
    assert {group["block_tokens"] for group in found["groups"]} == {1312}
    vram, cpu = found["tiers"]
    assert vram["tokens"] == int(vram["contexts"] * 20_000)
    assert 0 < cpu["restore_s"] < found["compute_s"]


def test_the_flags_are_those_that_the_connector_takes(tmp_path: Path) -> None:
    options = ("--gpu", "h200", "--gpus", 2, "--kv-dtype", "fp8", "--ssd-gib", 200, "--cpu-gib", 32)
    found = as_json(write(tmp_path, LLAMA_8B), *options, "--gpu-memory-utilization", 0.8)
    config = load_config({**found["environment"], "TIERED_KV_SSD_PATH": str(tmp_path)})
    assert (config.cpu_gib, config.ssd_gib) == (32, 200)
    words = found["command"]
    assert words[:5] == ["vllm", "serve", str(tmp_path), "--tensor-parallel-size", "2"]
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.8"
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for option in ("--shutdown-timeout", "--kv-transfer-config", "--scheduler-cls"):
        assert f"{option} {shlex.quote(words[words.index(option) + 1])}" in readme


def test_a_model_whose_longest_context_exceeds_vram_starts_with_a_shorter_one(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, LLAMA_8B)
    short, long = (as_json(folder, "--gpu", gpu)["command"] for gpu in ("rtx4090", "h100"))
    assert short[short.index("--max-model-len") + 1] == "auto"
    assert "--max-model-len" not in long


def test_the_lines_for_a_shell_are_the_command(tmp_path: Path) -> None:
    folder = write(tmp_path / "a model", LLAMA_8B)
    output = invoke(folder, "--gpu", "h100").output
    line = output[output.index("\nvllm serve") :].replace("\\\n", " ")
    assert shlex.split(line) == as_json(folder, "--gpu", "h100")["command"]


def test_the_size_of_weights_may_be_given(tmp_path: Path) -> None:
    found = as_json(write(tmp_path, LLAMA_8B), "--gpu", "h100", "--weights-gib", 8)
    assert found["weights_bytes"] == 8 << 30
    assert found["weights_source"] == "--weights-gib"


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (LLAMA_8B, ["--gpu", "abacus"], "is not a known GPU"),
        (LLAMA_8B, ["--gpu", "h100", "--cpu-gib", 0, "--ssd-gib", 9], "Pages on SSD pass"),
        (LLAMA_8B, ["--gpu", "h100", "--gpus", 3], "must be divisible by tensor parallel size (3)"),
        (QWEN3_NEXT_80B, ["--gpu", "h100"], "use 3 or more"),
        ({"model_type": "rwkv"}, ["--gpu", "h100"], "['RwkvModel'] are not supported"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    tmp_path: Path, config: dict[str, Any], options: list[object], said: str
) -> None:
    result = invoke(write(tmp_path, config), *options, "--json")
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("missing", ["vllm", "torch"])
def test_without_vllm_the_command_says_what_to_install(tmp_path: Path, missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom tiered_kv.cli.app import main; main()"
    )
    command = [sys.executable, "-c", code, "plan", str(write(tmp_path, LLAMA_8B)), "--gpu", "h100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert f"missing packages: {missing}." in done.stderr
    assert "pip install vllm" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command_asks_vllm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    folder = write(tmp_path, LLAMA_8B)
    recorded = as_json(folder, "--gpu", "h100")
    monkeypatch.undo()
    assert as_json(folder, "--gpu", "h100") == recorded
