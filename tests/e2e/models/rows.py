"""Results of a tiny model's checks, which run in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.models.workers import HARMLESS
from tiered_kv.bench.models.catalogue import TinyModel
from tiered_kv.bench.models.weights import write_torchvision
from tiered_kv.bench.paths import ROOT
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.service import error_in
from tiered_kv.bench.servers.vllm_server import all_cores

ROW, MIXED = "row.json", "mixed.json"
"""Files that ``checks`` writes."""


@dataclass(slots=True)
class Row:
    """Results of one model. False, 0 and None can also mean that the check was not reached.

    Attributes:
        groups: descriptions of the KV groups.
        context: tokens of the aligned context.
        equal: answers after restores from CPU memory, from SSD and after a restart equal the answer
            after a hit in VRAM bit for bit, and each context was really restored.
        equal_bytes: a turn restores exactly the bytes that the previous turn left in VRAM, and two
            restores give the same answer.
        control_differs: zeroing any one group's pages changes the answer.
        pinned_hit: tokens of a pinned job found in VRAM after other requests had filled it.
        cpu_tokens, ssd_tokens, restart_tokens: tokens of the aligned context that were restored.
        answer_recomputed: tokens of the previous turn that had KV, and are recomputed after they
            were evicted from VRAM.
        stock_answer_recomputed: the same on stock vLLM, which evicted nothing.
        stripped_hit: tokens found of a prompt that omits half of the last answer.
        stop_string_hit: tokens found of a prompt after an answer that a stop string ended.
        stop_string_had: tokens of that prompt that had KV.
        acceptance: fraction of draft tokens that are accepted, by the source of the KV.
        notes: failures and omissions, in words.
        cannot_start: reason why stock vLLM does not run the model here; None if it does.
        seconds: duration of all checks.
    """

    model: str
    groups: list[str] = field(default_factory=list)
    context: int = 0
    equal: bool = False
    equal_bytes: bool = False
    control_differs: bool = False
    pinned_hit: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0
    restart_tokens: int = 0
    answer_recomputed: int | None = None
    stock_answer_recomputed: int | None = None
    stripped_hit: int = 0
    stop_string_hit: int = 0
    stop_string_had: int = 0
    acceptance: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cannot_start: str | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name, without fields that do not apply to the model."""
        fields = asdict(self)
        for name in ("acceptance", "cannot_start"):
            if not fields[name]:
                del fields[name]
        return fields

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Turn an exception into a note, so that the other checks continue."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"{what}: {in_a_line(error)}")

    def summary(self) -> str:
        """Return the row as one line of text."""
        if self.cannot_start is not None:
            return f"cannot start: {self.cannot_start}"
        words = [
            f"{'' if getattr(self, name) else 'NOT '}{name}"
            for name in ("equal", "equal_bytes", "control_differs")
        ]
        tokens = f"{self.cpu_tokens}/{self.ssd_tokens}/{self.restart_tokens}"
        words.append(f"restored {tokens} of {self.context}")
        right = [f"{share:.0%} {where}" for where, share in self.acceptance.items() if share]
        words += [f"guesses right: {', '.join(right)}"] if right else []
        return "; ".join([*words, *self.notes])


def in_a_line(error: BaseException) -> str:
    """Return the type of the original error, and the start of its message, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def run_model(model: TinyModel, log: Path, timeout_s: float) -> Row:
    """Run all checks of a model. If its process fails, the row has the results up to then."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{model.name}-", ignore_cleanup_errors=True) as name:
        failed = run_checks(model, Path(name), log, timeout_s)
        written = Path(name, ROW)
        row = Row(**json.loads(written.read_text())) if written.exists() else Row(model.name)
    row.seconds = round(time.monotonic() - began, 1)
    if failed is not None:
        row.notes.append(failed)
        if row.cannot_start is not None:
            row.cannot_start = failed
    return row


def run_checks(
    model: TinyModel, folder: Path, log: Path, timeout_s: float, *options: str
) -> str | None:
    """Run ``checks`` in its own process group, and wait until all of its processes have ended.

    Returns:
        The reason why it failed, or None.
    """
    command = [sys.executable, "-m", "tests.e2e.models.checks", model.name, str(folder), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(os.environ, folder, model),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while group_members(process.pid):
            time.sleep(0.05)
    text = log.read_text(errors="replace")
    return (error_in(text) or f"the process ended with status {status}") if status else None


def environment(base: Mapping[str, str], folder: Path, model: TinyModel) -> dict[str, str]:
    """Return the environment of a model's process."""
    env = {name: value for name, value in base.items() if not name.startswith("TIERED_KV_")}
    cores = sorted(os.sched_getaffinity(0))
    of_ranks = [cores[rank :: model.ranks] for rank in range(model.ranks)]
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(all_cores, of_ranks))
    env["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads make tiny steps several times as long
    env["TIERED_KV_HARMLESS_CALLS"] = HARMLESS
    env["TMPDIR"] = str(folder)  # vLLM leaves sockets there
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    if model.stub_torchvision:
        write_torchvision(folder)
        paths.insert(0, str(folder))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env
