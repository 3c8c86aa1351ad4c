"""The instructions of the Containerfile, parsed with BuildKit's parser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.unit import FOLDER
from tests.doctor.web import serve, text
from tiered_kv.vllm_versions import NEWEST_TESTED, OLDEST, parse_version

dockerfile = pytest.importorskip("dockerfile")
FILE = FOLDER / "Containerfile"
ROOT = FOLDER.parent


def instructions(name: str) -> list[Any]:
    """Return the instructions of this name, in order."""
    found = dockerfile.parse_file(str(FILE))
    return [one for one in found if one.cmd.upper() == name]


def test_the_image_builds_on_a_tested_version_of_vllm() -> None:
    (base,) = instructions("FROM")
    image, _, tag = base.value[0].partition(":v")
    assert image == "vllm/vllm-openai"
    version = parse_version(tag)
    assert version is not None
    assert OLDEST <= version <= NEWEST_TESTED


def test_all_files_that_a_wheel_is_built_from_are_copied() -> None:
    copied = [name for one in instructions("COPY") for name in one.value[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    tested = ("pyproject.toml", "README.md", "LICENSE", "tiered_kv", "connectors", "policies")
    assert sorted(copied) == sorted((*tested, "bench")), "as tests/test_installing.py builds it"


def test_the_server_is_not_root_and_starts_like_vllms_image() -> None:
    assert instructions("USER")[-1].value == ("10001:0",)
    (entry,) = instructions("ENTRYPOINT")
    assert (entry.json, entry.value) == (True, ("vllm", "serve"))
    assert not instructions("CMD")
    assert not instructions("VOLUME")
    assert [one.value[0] for one in instructions("ENV")] == ["HOME"], "nothing surprising is set"


def test_bash_parses_the_script_of_every_step() -> None:
    for one in instructions("RUN"):
        subprocess.run(["bash", "-n", "-c", one.value[0]], check=True)


def test_the_health_check_distinguishes_a_running_server() -> None:
    (check,) = instructions("HEALTHCHECK")
    found = re.search(r"CMD (\[.*\])\s*$", check.original, re.DOTALL)
    assert found is not None
    program, *arguments = json.loads(found[1])
    assert program == "python3"

    def run(url: str) -> int:
        words = [one.replace("http://127.0.0.1:8000", url) for one in arguments]
        assert words != arguments
        return subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode

    with serve({"/health": text("")}) as url:
        assert run(url) == 0
    assert run(url) != 0
    with serve({}) as url:
        assert run(url) != 0


def test_the_command_in_the_comment_leaves_time_to_stop() -> None:
    words = " ".join(line.strip("# \\") for line in FILE.read_text().splitlines()).split()
    stop = int(words[words.index("--stop-timeout") + 1])
    assert stop >= int(words[words.index("--shutdown-timeout") + 1]) + 20
    assert Path(words[words.index("-f") + 1]) == FILE.relative_to(ROOT)
