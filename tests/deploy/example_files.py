"""The servers that the files in ``examples/`` start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMPOSE, KUBERNETES, SCRIPT = (
    EXAMPLES / name for name in ("compose.yaml", "kubernetes.yaml", "two_engines.sh")
)
DEFAULTED = re.compile(r"\$\{\w+:-([^}]*)\}")
"""Matches a variable with a default in Compose's syntax."""

STUB = """#!/usr/bin/env python3
import json, os, pathlib, signal, sys
calls = pathlib.Path(os.environ["CALLS"])
said = {"program": pathlib.Path(sys.argv[0]).name, "words": sys.argv[1:], "env": dict(os.environ)}
part = calls / f"{os.getpid()}.part"
part.write_text(json.dumps(said))
part.rename(part.with_suffix(".json"))
if said["program"] != "vllm-router":
    signal.pause()
"""
"""Stub program that records its arguments and environment. As a server, it then runs until it is
killed."""

CURL = r"""#!/usr/bin/env bash
url="${!#}" port="${url%/health}"
grep -q "\"--port\", \"${port##*:}\"" "$CALLS"/*.json && grep -q valkey-server "$CALLS"/*.json
"""
"""Stub of curl that succeeds once the store and the server on the given port have recorded their
calls."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that an example starts.

    Attributes:
        words: arguments after ``vllm serve``.
        env: environment variables that the example sets.
    """

    words: Sequence[str]
    env: Mapping[str, str]

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables of tiered-kv."""
        return {name: value for name, value in self.env.items() if name.startswith("TIERED_KV_")}

    @property
    def line(self) -> str:
        """The command line."""
        return shlex.join(["vllm", "serve", *self.words])


def compose() -> dict[str, Any]:
    """Return ``compose.yaml``, with its variables replaced by their defaults."""
    found: dict[str, Any] = yaml.safe_load(DEFAULTED.sub(r"\1", COMPOSE.read_text()))
    return found


def compose_server() -> Started:
    """Return the server of ``compose.yaml``."""
    service = compose()["services"]["vllm"]
    return Started(service["command"], service["environment"])


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects of ``kubernetes.yaml``, by kind and name."""
    found = yaml.safe_load_all(KUBERNETES.read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def kubernetes_pod() -> dict[str, Any]:
    """Return the pod's specification."""
    spec: dict[str, Any] = kubernetes()["StatefulSet", "tiered-kv"]["spec"]["template"]["spec"]
    return spec


def kubernetes_server() -> Started:
    """Return the server of ``kubernetes.yaml``, without the values of secrets."""
    (container,) = kubernetes_pod()["containers"]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return Started(container["args"], env)


@cache
def calls_of_script() -> list[dict[str, Any]]:
    """Run ``two_engines.sh`` with stub programs, and return their recorded calls."""
    with tempfile.TemporaryDirectory() as folder:
        calls, programs = Path(folder, "calls"), Path(folder, "bin")
        calls.mkdir()
        programs.mkdir()
        stubs = dict.fromkeys(("vllm", "valkey-server", "vllm-router"), STUB)
        for name, text in {**stubs, "curl": CURL}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CALLS": str(calls)}
        done = subprocess.run(
            [SCRIPT, "MODEL"], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(path.read_text()) for path in calls.glob("*.json")]


def engines_of_script() -> list[Started]:
    """Return the engines that ``two_engines.sh`` starts."""
    found = [one for one in calls_of_script() if one["program"] == "vllm"]
    return [Started(one["words"][1:], one["env"]) for one in found]
