"""Restores on each architecture that vLLM runs on this machine: equal answers and bytes, controls.

    python -m bench.models --json
    python -m bench.models --only llama --only gemma3

Each tiny model has random weights, and runs in a separate process. ``rows`` reports what was
restored for each model. ``cannot_start`` lists the models that stock vLLM cannot run on this
machine, with vLLM's reason. The checks are part of ``tests/e2e/models``, so this benchmark needs a
checkout.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.models.catalogue import EVERY, MODELS, VARIANTS, TinyModel
from tiered_kv.bench.output import AsJson, run_benchmark, show
from tiered_kv.bench.paths import needs_checkout

CHECKS = ("equal", "equal_bytes", "control_differs")


def measure(models: Sequence[TinyModel], logs: Path, timeout_s: float) -> dict[str, Any]:
    """Measure all models one after another. Returns their rows, and the number of ``MODELS`` that
    pass each of ``CHECKS``. Progress goes to standard error.

    Args:
        logs: folder for the models' logs.
        timeout_s: time limit per model, seconds.
    """
    with needs_checkout():
        from tests.e2e.models.rows import run_model
    began, rows, stopped = time.monotonic(), dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for number, model in enumerate(models, 1):
        at = f"[{number}/{len(models)}] {model.name}"
        print(at, file=sys.stderr, flush=True)
        row = run_model(model, logs / f"{model.name}.log", timeout_s)
        if row.cannot_start is None:
            rows[model.name] = row.as_json()
        else:
            stopped.append({"model": model.name, "why": row.cannot_start})
        print(f"{at}: {row.summary()} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
    plain, *variants = (
        [rows[model.name] for model in some if model.name in rows]
        for some in (MODELS, *VARIANTS.values())
    )
    return {
        "models": len(plain),
        **{check: sum(bool(row[check]) for row in plain) for check in CHECKS},
        "cannot_start": stopped,
        "rows": plain,
        **dict(zip(VARIANTS, variants, strict=True)),
        "seconds": round(time.monotonic() - began, 1),
    }


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only this model. Repeat to measure several.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit per model, seconds.")] = 600.0,
    logs: Annotated[Path | None, typer.Option(help="Folder for logs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure restores on every architecture."""
    names = [model.name for model in EVERY]
    if unknown := set(only or ()).difference(names):
        raise typer.BadParameter(f"{', '.join(unknown)} is not one of {', '.join(names)}")
    models = [model for model in EVERY if not only or model.name in only]
    with tempfile.TemporaryDirectory(prefix="models-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(models, folder, timeout)
    show("Models restored", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
