"""Every architecture that vLLM runs here, restored: equal answers, equal bytes, and controls.

    python -m bench.models --json
    python -m bench.models --only llama --only gemma3

Tiny models with random weights, each in a process of its own. ``rows`` reports what was restored of
each; ``cannot_start`` names the models that stock vLLM does not run on this machine, with its
reason. The checks are those of ``tests/e2e/models``, so this needs a checkout.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.models.catalogue import EVERY, MODELS, VARIANTS, TinyModel
from tiered_kv.bench.output import AsJson, run_benchmark, show
from tiered_kv.bench.paths import needs_checkout

TIMEOUT_S = 600.0


def measure(
    models: Sequence[TinyModel], logs: Path, timeout_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Rows of all models, one after the other."""
    with needs_checkout():
        from tests.e2e.models.rows import run_model
    began, rows = time.monotonic(), dict[str, dict[str, Any]]()
    for number, model in enumerate(models, 1):
        at = f"[{number}/{len(models)}] {model.name}"
        tell(at)
        row = run_model(model, logs / f"{model.name}.log", timeout_s)
        rows[model.name] = row.as_json()
        tell(f"{at}: {row.summary()} ({row.seconds:.0f} s)")
    run = {name: row for name, row in rows.items() if "cannot_start" not in row}
    stopped = {name: row["cannot_start"] for name, row in rows.items() if name not in run}
    of_kind = {
        kind: [run[model.name] for model in variants if model.name in run]
        for kind, variants in VARIANTS.items()
    }
    plain = [run[model.name] for model in MODELS if model.name in run]
    return {
        **verdict(plain),
        "cannot_start": [{"model": name, "why": why} for name, why in stopped.items()],
        "rows": plain,
        **of_kind,
        "seconds": round(time.monotonic() - began, 1),
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Number of models, and of those that pass each check."""
    counted = {
        name: sum(bool(row[name]) for row in rows)
        for name in ("equal", "equal_bytes", "control_differs")
    }
    return {"models": len(rows), **counted}


def chosen(only: Sequence[str]) -> list[TinyModel]:
    """The models of these names; all if there are none.

    Raises:
        typer.BadParameter: no model has such a name.
    """
    names = [model.name for model in EVERY]
    if unknown := [name for name in only if name not in names]:
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(names)}")
    return [model for model in EVERY if not only or model.name in only]


def main(
    only: Annotated[list[str] | None, typer.Option(help="A model; all if none is named.")] = None,
    timeout: Annotated[float, typer.Option(help="Longest time for a model, seconds.")] = TIMEOUT_S,
    logs: Annotated[Path | None, typer.Option(help="Folder in which logs are kept.")] = None,
    as_json: AsJson = False,
) -> None:
    """Restore every architecture."""
    models = chosen(only or ())
    with tempfile.TemporaryDirectory(prefix="models-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(
            models, folder, timeout, lambda said: print(said, file=sys.stderr, flush=True)
        )
    show("Models restored", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
