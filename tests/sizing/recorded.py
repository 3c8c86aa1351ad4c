"""Recorded answers of vLLM about models, so that tests do not have to wait minutes for vLLM.

``python -m tests.sizing.recorded`` runs the tests and records missing answers, or all of them with
``--again``. ``test_vllm_kv.py`` and ``test_published.py`` compare the recorded answers with vLLM's.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.sizing.model_shape import ask_vllm
from tiered_kv.sizing.step_cost import GPUS

HERE = Path(__file__).parent
CONFIGS = HERE / "published.tar.xz"
"""Published configurations, from ai-dynamo/aiconfigurator (Apache-2.0) at 095f58a."""
ANSWERS = HERE / "answers.json"
RECORD = "TIERED_KV_RECORD_ANSWERS"
"""Environment variable that is set while answers are recorded."""
AT_A_TIME = 12
"""Number of requests that one process answers."""


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each published model, and the request to vLLM about the model."""
    with tarfile.open(fileobj=io.BytesIO(CONFIGS.read_bytes()), mode="r:xz") as archive:
        files = {
            one.name: json.loads(found.read())
            for one in archive.getmembers()
            if (found := archive.extractfile(one)) is not None
        }
    for name, config in files.items():
        if name.endswith("_hf_quant_config.json"):
            continue
        model = name.removesuffix("_config.json")
        yield model, request(config, files.get(f"{model}_hf_quant_config.json"))


def request(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    *,
    gpu: str = "h200-141",
    **options: Any,
) -> dict[str, Any]:
    """Build a request to vLLM about a configuration."""
    return {
        "config": dict(config),
        "quantization": quantization,
        "capability": list(GPUS[gpu].capability),
        "ranks": 1,
        "dtype": "auto",
        "kv_dtype": "auto",
        **options,
    }


def key_of(asked: Mapping[str, Any]) -> str:
    """Return the key of a request in the file of answers."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def answers() -> dict[str, dict[str, Any]]:
    """Return all recorded answers."""
    found: dict[str, dict[str, Any]] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    return found


def answer_recorded(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the recorded answers to requests. Records missing ones if ``RECORD`` is set."""
    known = answers()
    if missed := [one for one in requests if key_of(one) not in known]:
        assert RECORD in os.environ, "not recorded: run python -m tests.sizing.recorded"
        known = _record(missed)
    return [known[key_of(one)] for one in requests]


def _record(requests: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    known = answers()
    for start in range(0, len(requests), AT_A_TIME):
        some = requests[start : start + AT_A_TIME]
        known |= zip(map(key_of, some), ask_vllm(some), strict=True)
        lines = [f'"{key}": {json.dumps(known[key])}' for key in sorted(known)]
        ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return known


def main() -> int:
    """Record the answers about published models and those that the tests need, unless they are
    already known."""
    if "--again" in sys.argv:
        ANSWERS.unlink()
    answer = answers()
    _record([one for _, one in published() if key_of(one) not in answer])
    tests = ["-q", "-n", "0", "-m", "not e2e", "tests/sizing", "tests/cli/test_plan.py"]
    env = {**os.environ, RECORD: "1"}
    return subprocess.call([sys.executable, "-m", "pytest", *tests], env=env)


if __name__ == "__main__":
    sys.exit(main())
