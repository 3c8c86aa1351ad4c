"""vLLM's answers about models, recorded, so that tests of what is made of them take no minutes.

``python -m tests.sizing.recorded`` asks vLLM about the requests that a test run has missed, and
about those that are recorded with ``--again``. ``test_vllm_kv.py`` and ``test_published.py`` ask
vLLM itself and compare.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.sizing.gpus import GPUS
from tiered_kv.sizing.model_shape import ask_vllm

HERE = Path(__file__).parent
CONFIGS = HERE / "published.tar.xz"
"""Published configurations, from ai-dynamo/aiconfigurator (Apache-2.0) at 095f58a."""
ANSWERS = HERE / "answers.json"
MISSED = HERE / "missed.json"
AT_A_TIME = 12
"""Requests of one process."""


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of published models, and what to ask about them."""
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
    """What to ask about a configuration."""
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
    """Key of a request in the file of answers."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def answers() -> dict[str, dict[str, Any]]:
    """The recorded answers."""
    found: dict[str, dict[str, Any]] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    return found


def answer_recorded(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answer as vLLM did when this was recorded."""
    known = answers()
    missed = [one for one in requests if key_of(one) not in known]
    if missed:
        MISSED.write_text(json.dumps(_missed() + missed))
        raise AssertionError("not recorded: run python -m tests.sizing.recorded")
    return [known[key_of(one)] for one in requests]


def _missed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(MISSED.read_text()) if MISSED.exists() else []
    return found


def main() -> None:
    """Record what has been missed, and the published models."""
    known = {} if "--again" in sys.argv else answers()
    every = {key_of(one): one for one in (*_missed(), *(one for _, one in published()))}
    wanted = {key: one for key, one in every.items() if key not in known}
    keys = list(wanted)
    for start in range(0, len(keys), AT_A_TIME):
        some = keys[start : start + AT_A_TIME]
        known |= zip(some, ask_vllm([wanted[key] for key in some]), strict=True)
        lines = [f'"{key}": {json.dumps(known[key])}' for key in sorted(known)]
        ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    MISSED.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
