"""The code on the extending page passes the conformance suites and runs in an engine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Tiers
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.study.catalogue import TIGHT
from tiered_kv.bench.sim.workloads.generate import generate
from tiered_kv.config import load_config
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig, RigOptions
from tiered_kv.tiers import TierId

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
LONGEST_LINES = 60


def code_blocks() -> dict[str, str]:
    """Return the page's Python blocks, by the path in their first line."""
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return dict(blocks)


def settings() -> dict[str, str]:
    """Return the environment variables that the documentation page exports."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", PAGE, re.MULTILINE))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the page's package to a folder on Python's path, and return the folder."""
    folder = tmp_path / "elsewhere"
    for name, block in code_blocks().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_kv"]:
        del sys.modules[name]


def test_every_block_of_python_is_run_and_none_is_long() -> None:
    blocks = code_blocks()
    assert len(blocks) == PAGE.count("```python")
    assert {
        f"acme_kv/{part}.py" for part in ("policy", "eviction", "codec", "tier")
    } <= blocks.keys()
    for name, block in blocks.items():
        assert block.count("\n") <= LONGEST_LINES, name


def test_all_parts_pass_their_suites(package: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(
        command, cwd=package, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 40, done.stdout


def test_a_server_runs_with_all_parts(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_KV_FOLDER", str(tmp_path / "shared"))
    config = load_config(settings())
    extra = {
        "policy": config.policy,
        "eviction": config.eviction,
        "codec": config.codec,
        "tiers": ",".join(config.tiers),
        "cpu_gib": 40 * 16 * 8 / 2**30,
        "ssd_path": str(tmp_path / "ssd"),
        "ssd_gib": 0.01,
    }
    folder, demoted = tmp_path / "shared" / "0-of-1", list[int]()
    for _ in range(2):  # the second engine finds the pages that the first one stored
        with Rig(tmp_path / "model", RigOptions(blocks=64, extra=extra)) as rig:
            assert type(rig.policy).__name__ == "MeanGap"
            assert type(rig.pages.order).__name__ == "EndedFirst"
            for turn in range(3):
                for job in range(4):
                    params = {"job_id": f"job{job}", "is_last_step": turn == 2}
                    context = text(100 + 100 * turn, seed=job)
                    rig.ask(f"r{turn}{job}", context, max_tokens=4, params=params)
                rig.now += 5.0
                rig.wait_for_worker()
            assert rig.index.evictions
            assert not rig.count("hook_errors")
            rig.check_clean()
            demoted.append(rig.half.counters.of_tier(TierId("folder")).totals["pages_demoted"])
    assert rig.count("pages_promoted"), "the codec reads what it wrote"
    named = [path for path in tmp_path.rglob("*.seg") if config.codec.encode() in path.read_bytes()]
    assert named, "segments say whose pages they hold"
    first, second = demoted
    assert first == len(list(folder.iterdir())), "the second has added none"
    assert 0 < second < first, "what SSD has from before is saved again to free slots only"


def test_the_simulator_runs_the_policy_and_the_eviction_rule(package: Path) -> None:
    command = re.search(r"^python -m bench\.sim (.*)$", PAGE, re.MULTILINE)
    assert command is not None
    words = shlex.split(command.group(1))
    named = server(words[words.index("--policy") + 1])
    assert named.outside == {"acme_kv.policy", "acme_kv.eviction"}
    jobs = generate("original", 6, 0).at(4.0, 0)
    outcome = simulate(TIGHT.machine(), named, jobs, Tiers(cpu=2**30, ssd=2**34))
    assert len(outcome.jobs) == 6
