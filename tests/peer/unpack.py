"""Unpacks the tests of the installed vLLM version from its source package, because no wheel
contains them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
"""Configuration of facebook/opt-125m, which most of vLLM's tests use. The tests find it under that
name in the folder that they run in, and no test loads the weights."""

CONFTEST = '''"""In place of vLLM's own, which starts what these tests do not need."""

import pytest


@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield
'''


def vllm_tests(version: str, cache: Path) -> Path:
    """Return a folder with vLLM's ``tests``, which pip downloads once from its configured index.

    Args:
        version: the vLLM version.
        cache: folder that keeps the tests.

    Raises:
        RuntimeError: pip found no source package.
    """
    whole = cache / f"tests-{version}"
    if whole.is_dir():
        return whole
    part = cache / f"tests-{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    (part / "pip").mkdir(parents=True)
    # pip unpacks a source package to generate its metadata, which fails for vLLM without a
    # compiler. The unpacked tests are all that is needed, and --no-clean keeps them.
    command = "-m pip download --no-clean --no-deps --no-build-isolation --no-binary :all:"
    done = subprocess.run(
        [sys.executable, *command.split(), "--dest", str(part), f"vllm=={version}"],
        env={**os.environ, "TMPDIR": str(part / "pip")},
        capture_output=True,
        text=True,
        check=False,
    )
    found = list((part / "pip").glob("*/vllm*/tests"))
    if not found:
        raise RuntimeError(f"pip has no source package of vLLM {version}: {done.stderr[-2000:]}")
    made = part / "made"
    shutil.copytree(found[0], made / "tests")
    (made / "tests" / "conftest.py").write_text(CONFTEST)
    settings = (found[0].parent / "pyproject.toml").read_text()
    markers = re.search(r"^markers = \[.*?^\]", settings, re.M | re.S)
    options = f"[tool.pytest.ini_options]\n{markers[0] if markers else ''}\n"
    (made / "pyproject.toml").write_text(options)
    model = made / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    made.rename(whole)
    shutil.rmtree(part)
    return whole
