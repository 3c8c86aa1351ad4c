"""Two hosts with the same model use the same page keys, wherever the model's files are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import json, socket, sys
from pathlib import Path

socket.gethostname = lambda: sys.argv[2]

from tests.runtime.groups.kinds import MODELS, PROMPT, readable
from tiered_kv.testing.vllm.rig import Rig, RigOptions

groups = MODELS["full, window and state"]
options = RigOptions(groups=groups, blocks=200, extra={"cpu_gib": 0.01, "admission": "off"})
rig = Rig(Path(sys.argv[1]), options)
rig.ask("turn", PROMPT, params={"job_id": "job"})
rig.wait_for_worker()
rig.run()
print(json.dumps(sorted(key.hex() for key in readable(rig))))
rig.close()
"""


def keys_on(host: Path, model: str, **environment: str) -> str:
    """Return the page keys of one turn, on a host with its own home folder and environment."""
    folder = host / model
    folder.parent.mkdir(parents=True)
    (host / "tmp").mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(host),
        "TMPDIR": str(host / "tmp"),
        "HOSTNAME": host.name,
        **environment,
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), host.name],
        cwd=host,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


def test_keys_do_not_depend_on_the_host(tmp_path: Path) -> None:
    one = keys_on(tmp_path / "alpha", "models/SmolLM", USER="one", TZ="UTC", OMP_NUM_THREADS="1")
    other = keys_on(
        tmp_path / "beta",
        "weights/v2/smol",
        USER="two",
        TZ="Asia/Tokyo",
        OMP_NUM_THREADS="2",
        VLLM_HOST_IP="127.0.0.1",
        LANG="C.UTF-8",
    )
    assert len(one) > 1000
    assert one == other
    seeded = keys_on(tmp_path / "gamma", "model", PYTHONHASHSEED="1")
    assert seeded != one, "hosts with unlike seeds share nothing"
