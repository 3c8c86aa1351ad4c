"""Every architecture that vLLM runs here, restored: equal answers, equal bytes, and controls.

    python -m bench.models --json
    python -m bench.models --only llama --only gemma3

Tiny models with random weights, each in a process of its own. ``rows`` tells what was restored of
each; ``cannot_start`` names those that stock vLLM does not run on this machine, with its reason.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.bench.models.catalogue import EVERY, MODELS, VARIANTS, TinyModel
from tiered_kv.bench.models.processes import TimedOut, run_process
from tiered_kv.bench.models.row import Row
from tiered_kv.bench.models.stub import write_torchvision
from tiered_kv.bench.output import AsJson, run_benchmark, show
from tiered_kv.bench.servers.service import error_in
from tiered_kv.bench.servers.vllm_server import all_cores

CHILD = "tiered_kv.bench.models.child"
LOOKS = "watch,keep,arm,digests,draft_layers,begin_to_zero,end_zeroing"
"""Functions that look at KV in the workers, or change it: they change no weights."""
TIMEOUT_S = 600.0


def environment(base: Mapping[str, str], scratch: Path, model: TinyModel) -> dict[str, str]:
    """Environment of a model's process."""
    env = {name: value for name, value in base.items() if not name.startswith("TIERED_KV_")}
    cores = sorted(os.sched_getaffinity(0))
    of_ranks = [cores[rank :: model.ranks] for rank in range(model.ranks)]
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(all_cores, of_ranks))
    env["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin make tiny steps several times as long
    env["TIERED_KV_HARMLESS_CALLS"] = LOOKS
    env["TMPDIR"] = str(scratch)  # vLLM leaves sockets there
    paths = [str(Path.cwd()), env.get("PYTHONPATH", "")]
    if model.stub_torchvision:
        write_torchvision(scratch)
        paths.insert(0, str(scratch))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def run_model(model: TinyModel, log: Path, timeout_s: float) -> dict[str, Any]:
    """A model's row, as far as its process came."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{model.name}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = environment(os.environ, folder, model)
        said = None
        try:
            status = run_process(CHILD, [model.name, name], env, log, timeout_s)
            if status:
                text = log.read_text(errors="replace")
                said = error_in(text) or f"the process ended with status {status}"
        except TimedOut as error:
            said = str(error)
        found = folder / "row.json"
        row: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    row = {**Row(model.name).as_json(), **row, "seconds": round(time.monotonic() - began, 1)}
    if said is not None:
        row["notes"].append(said)
        if row.get("cannot_start") is not None:
            row["cannot_start"] = said
    return row


def measure(
    models: Sequence[TinyModel], logs: Path, timeout_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Rows of all models, one after the other."""
    began, rows = time.monotonic(), dict[str, dict[str, Any]]()
    for number, model in enumerate(models, 1):
        at = f"[{number}/{len(models)}]"
        tell(f"{at} {model.name}")
        row = rows[model.name] = run_model(model, logs / f"{model.name}.log", timeout_s)
        tell(f"{at} {model.name}: {Row(**row).summary()} ({row['seconds']:.0f} s)")
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
    """Count the models that pass each test."""
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
    timeout: Annotated[float, typer.Option(help="Seconds that a model may take.")] = TIMEOUT_S,
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
