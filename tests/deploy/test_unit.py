"""The systemd unit is accepted by systemd, sets only known variables, and stops a server in
time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.unit import STATE, UNIT, command, environment, service
from tiered_kv.config import ADMIN_TOKEN, ENV_PREFIX, load_config

HIDES_GPUS = ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock")
END_S = 20
"""Seconds that a server's processes take to exit on a slow machine, once requests have finished and
pages are written."""


def verify(unit: Path) -> str:
    """Return the complaints of ``systemd-analyze verify`` about a unit, or an empty string."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd is not installed")
    done = subprocess.run(
        [tool, "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert bool(done.returncode) == bool(said), said
    return said


def on_this_machine(folder: Path, more: str = "") -> Path:
    """Write the unit with a local program in place of vLLM's, and ``more`` in its service
    section."""
    text = UNIT.read_text().replace("/opt/vllm/bin/vllm", sys.executable)
    unit = folder / UNIT.name
    unit.write_text(text.replace("[Service]\n", f"[Service]\n{more}"))
    return unit


def test_systemd_accepts_every_line(tmp_path: Path) -> None:
    assert verify(on_this_machine(tmp_path)) == ""


def test_a_line_that_systemd_does_not_know_is_found(tmp_path: Path) -> None:
    assert "NoSuchThing" in verify(on_this_machine(tmp_path, "NoSuchThing=yes\n"))


def test_every_variable_is_a_known_setting(tmp_path: Path) -> None:
    for suggested in (False, True):
        found = environment(suggested=suggested)
        here = {name: value.replace(STATE, str(tmp_path)) for name, value in found.items()}
        config = load_config(here)
        assert config.cpu_gib == float(found["TIERED_KV_CPU_GIB"])
        assert config.ssd_path == tmp_path / "pages"
    assert environment(suggested=True).keys() - environment().keys() == {
        "TIERED_KV_TRACE",
        ADMIN_TOKEN,
    }
    others = {name for name in environment() if not name.startswith(ENV_PREFIX)}
    assert others == {"MODEL", "SERVE_ARGS", "VLLM_PLUGINS"}


def test_written_paths_are_in_folders_that_the_service_may_write() -> None:
    found = environment(suggested=True)
    for name in ("TIERED_KV_SSD_PATH", "TIERED_KV_TRACE"):
        assert found[name].startswith(f"{STATE}/")
    assert service()["Environment"] == f"HOME={STATE}"
    assert service()["WorkingDirectory"] == f"/var/lib/{service()['StateDirectory']}" == STATE


def test_a_stop_leaves_time_for_requests_and_pages() -> None:
    words = command()
    allowed = int(words[words.index("--shutdown-timeout") + 1])
    assert int(service()["TimeoutStopSec"]) >= allowed + END_S
    assert service()["KillMode"] == "mixed", "vLLM's first process tells the others"


def test_the_gpu_is_not_hidden_and_kernels_may_be_compiled() -> None:
    assert not set(service()) & {*HIDES_GPUS, "MemoryDenyWriteExecute"}
    assert service()["LimitMEMLOCK"] == "infinity"
