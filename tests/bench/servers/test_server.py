from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tiered_kv.bench.servers import service as server_module
from tiered_kv.bench.servers.load import group_seconds, read_clock
from tiered_kv.bench.servers.service import ServerError, error_in
from tiered_kv.bench.servers.vllm_server import ServerOptions, VllmServer, all_cores

HEALTHY = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"up 1\\n")
print("reserved_cpus=[3]", flush=True)
child = subprocess.Popen([sys.executable, "-c", CHILD])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LEAVES = """
import pathlib, tempfile
scratch = pathlib.Path(tempfile.gettempdir())
(scratch / "vllm_dist").write_text("")
print("scratch", scratch, flush=True)
"""
"""Script that leaves a file in the temporary folder, as vLLM does."""
PLAIN_CHILD = "import time; time.sleep(600)"
STUBBORN_CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PLAIN_CHILD
DIES = "print('line one'); print('no such model'); raise SystemExit(3)"
NEVER_ANSWERS = "import time; time.sleep(600)"


class Scripted(ServerOptions):
    """Options that run a Python script, with the port as its argument, in place of vLLM."""

    script = ""

    def command(self, port: int, *, on_cpu: bool) -> list[str]:
        return [sys.executable, "-c", self.script, str(port)]


def scripted(text: str) -> ServerOptions:
    options: ServerOptions = type("Script", (Scripted,), {"script": text})(model="none")
    return options


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(server: VllmServer) -> int:
    return int(server.log_text().split("child ")[1].split()[0])


def test_the_command_line_matches_the_options() -> None:
    options = ServerOptions(
        model="/models/small",
        kv_blocks=220,
        max_model_len=2048,
        kv_transfer_config={"kv_connector": "X", "kv_role": "kv_both"},
        extra_args=("--seed", "1"),
    )
    command = options.command(8123, on_cpu=True)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = " ".join(command)
    for part in (
        "--host 127.0.0.1 --port 8123",
        "--model /models/small",
        "--block-size 32",
        "--num-gpu-blocks-override 220",
        "--max-model-len 2048",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
    ):
        assert part in flags
    given = command[command.index("--kv-transfer-config") + 1]
    assert json.loads(given) == {"kv_connector": "X", "kv_role": "kv_both"}
    assert command[-2:] == ["--seed", "1"]

    stock = ServerOptions(model="m", enforce_eager=False)
    flags = " ".join(stock.command(1, on_cpu=False)[3:])
    address = "--host 127.0.0.1 --port 1"
    assert flags == f"{address} --model m --served-model-name model --enable-prompt-tokens-details"


def test_every_cpu_server_is_bound_to_all_cores(tmp_path: Path) -> None:
    stock = ServerOptions(model=tmp_path)
    tiered = ServerOptions(model=tmp_path, kv_transfer_config={}, env={"TIERED_KV_CPU_GIB": "2"})
    base = {"PATH": "/bin", "TIERED_KV_TRACE": "left over from a shell"}
    stock_env = stock.environment(base, on_cpu=True)
    tiered_env = tiered.environment(base, on_cpu=True)
    assert stock_env["VLLM_CPU_OMP_THREADS_BIND"] == all_cores()
    assert tiered_env == stock_env | {"TIERED_KV_CPU_GIB": "2"}
    assert stock_env["HF_HUB_OFFLINE"] == "1"
    assert "TIERED_KV_TRACE" not in stock_env


def test_env_of_the_options_wins() -> None:
    options = ServerOptions(model="org/name", env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    env = options.environment({}, on_cpu=True)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "HF_HUB_OFFLINE" not in env
    assert "VLLM_CPU_OMP_THREADS_BIND" not in ServerOptions(model="m").environment({}, on_cpu=False)


@pytest.mark.parametrize(
    ("cores", "text"),
    [([0, 1], "0-1"), ([5], "5"), ([3, 0, 1, 7, 2, 8], "0-3,7-8"), ([0, 2], "0,2")],
)
def test_cores_are_written_as_ranges(cores: list[int], text: str) -> None:
    assert all_cores(cores) == text


def test_a_server_runs_inside_the_block_and_leaves_nothing_after_it(tmp_path: Path) -> None:
    waits: list[float] = []
    options = scripted(f"CHILD = {PLAIN_CHILD!r}\n{LEAVES}{HEALTHY}")
    with VllmServer(options, tmp_path / "a.log", on_wait=waits.append) as server:
        server.check()
        with pytest.raises(RuntimeError, match="is already running"):
            server.start()
        assert server.metrics_text() == "up 1\n"
        assert server.reserved_cpus == "[3]"
        pid, child = server.pid, child_of(server)
        assert pid is not None
        assert running(pid)
        assert running(child)
        assert os.getsid(child) == os.getsid(0), "a busy session of its own would starve others"
        assert os.getpgid(child) != os.getpgid(0)
        scratch = Path(server.log_text().split("scratch ")[1].split()[0])
        assert (scratch / "vllm_dist").exists()
    assert server.pid is None
    assert not running(pid)
    assert not running(child)
    assert not scratch.exists()
    assert waits == sorted(waits)
    with pytest.raises(ServerError, match="not running"):
        server.check()
    server.stop()
    kept = Path(options.environment({}, on_cpu=True)["TORCHINDUCTOR_CACHE_DIR"])
    assert kept.is_relative_to(tempfile.gettempdir()), "compiled code outlives the server"
    assert not kept.is_relative_to(scratch)


def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.5)
    options = scripted(f"CHILD = {STUBBORN_CHILD!r}\n{HEALTHY}")
    with VllmServer(options, tmp_path / "a.log") as server:
        child = child_of(server)
    deadline = time.monotonic() + 120
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def test_a_death_at_start_shows_the_log(tmp_path: Path) -> None:
    server = VllmServer(scripted(DIES), tmp_path / "logs" / "a.log")
    with pytest.raises(ServerError, match=r"(?s)status 3.*logs/a\.log.*no such model"):
        server.start()
    assert server.pid is None


def test_a_server_that_never_answers_is_an_error(tmp_path: Path) -> None:
    server = VllmServer(scripted(NEVER_ANSWERS), tmp_path / "a.log", start_timeout_s=0.5)
    with pytest.raises(ServerError, match="did not answer within"):
        server.start()
    assert server.pid is None


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv on this machine")
def test_a_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    parent = f"""
import os, signal
from pathlib import Path
from tests.bench.servers.test_server import scripted, VllmServer, HEALTHY, PLAIN_CHILD
server = VllmServer(scripted(f"CHILD = {{PLAIN_CHILD!r}}\\n{{HEALTHY}}"), Path({str(log)!r}))
server.start()
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", parent], env=env, capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 120
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pid)
    # A real engine notices that its server is gone. This test's child process does not.
    child = int(log.read_text().split("child ")[1].split()[0])
    os.kill(child, 9)


def test_the_first_error_of_a_log_is_the_error_in() -> None:
    log = """INFO all is well
(APIServer pid=1) WARNING [utils.py:2] This can cause errors like `OSError: [Errno 24] Too many`
(Worker pid=3) ERROR [executor.py:1063]     raise Exception(
(Worker pid=3) ERROR [executor.py:1063] Exception: only supported on CUDA-alike and XPU GPUs
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert error_in(log) == "Exception: only supported on CUDA-alike and XPU GPUs"
    assert error_in("Traceback:\nOSError: [Errno 5] no disk") == "OSError: [Errno 5] no disk"
    assert error_in("INFO all is well") is None


def test_the_time_of_a_stopped_server_s_engine_does_not_count_as_other_programs(
    tmp_path: Path,
) -> None:
    """A server has a child process that it never waits for, like vLLM's engine. After the server
    has stopped, the CPU time of the child still counts as this process's own."""
    burns = "for _ in range(20_000_000): pass\nprint('burnt', flush=True)\n" + PLAIN_CHILD
    before = read_clock()
    with VllmServer(scripted(HEALTHY.replace("CHILD", repr(burns))), tmp_path / "log") as server:
        while "burnt" not in server.log_text():
            server.check()
            time.sleep(0.01)
        used_s = group_seconds(server.pid or 0)
    after = read_clock()
    assert before is not None
    assert after is not None
    assert after.own - before.own >= used_s > 0.2
