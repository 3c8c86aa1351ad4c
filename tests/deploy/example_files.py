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
"""A variable of Compose with a default."""

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
"""A program that records how it is called. A server then runs until it is killed."""

CURL = r"""#!/usr/bin/env bash
url="${!#}" port="${url%/health}"
grep -q "\"--port\", \"${port##*:}\"" "$CALLS"/*.json && grep -q valkey-server "$CALLS"/*.json
"""
"""Succeeds once the server on that port has recorded its call, and the store too."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that an example starts.

    Attributes:
        words: arguments behind ``vllm serve``.
        env: its environment, as far as the example sets it.
    """

    words: Sequence[str]
    env: Mapping[str, str]

    @property
    def settings(self) -> dict[str, str]:
        """Variables of tiered-kv."""
        return {name: value for name, value in self.env.items() if name.startswith("TIERED_KV_")}

    @property
    def line(self) -> str:
        """The command."""
        return shlex.join(["vllm", "serve", *self.words])


def compose() -> dict[str, Any]:
    """``compose.yaml`` with the defaults of its variables."""
    found: dict[str, Any] = yaml.safe_load(DEFAULTED.sub(r"\1", COMPOSE.read_text()))
    return found


def compose_server() -> Started:
    """The server of ``compose.yaml``."""
    service = compose()["services"]["vllm"]
    return Started(service["command"], service["environment"])


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    """Objects of ``kubernetes.yaml`` by kind and name."""
    found = yaml.safe_load_all(KUBERNETES.read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def kubernetes_pod() -> dict[str, Any]:
    """The pod's specification."""
    spec: dict[str, Any] = kubernetes()["StatefulSet", "tiered-kv"]["spec"]["template"]["spec"]
    return spec


def kubernetes_server() -> Started:
    """The server of ``kubernetes.yaml``; values of secrets are left out."""
    (container,) = kubernetes_pod()["containers"]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return Started(container["args"], env)


@cache
def calls_of_script() -> list[dict[str, Any]]:
    """Run ``two_engines.sh`` with programs that record their calls in place of its own."""
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
    """The engines of ``two_engines.sh``."""
    found = [one for one in calls_of_script() if one["program"] == "vllm"]
    return [Started(one["words"][1:], one["env"]) for one in found]
