"""Prometheus's own programs, and the queries in ``deploy/``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES, CONFIG, COMPOSE = (DEPLOY / name for name in ("rules.yml", "prometheus.yml", "compose.yaml"))
SELECTOR = re.compile(r"(?P<name>vllm:\w+)(?:\{(?P<matchers>[^}]*)\})?")
"""Matches a metric in a query. All metric names of vLLM and of the connector start with
``vllm:``."""
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$engine": ".*"}
"""Values that Grafana substitutes for the dashboard's variables."""


def program(name: str) -> str:
    """Return the path of a program of Debian's ``prometheus`` package. Skips the test if it is
    missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install --no-install-recommends prometheus")
    return found


def promtool(*args: str | Path, text: str | None = None) -> str:
    """Run promtool and return its output, followed by its exit code unless that is 0."""
    command = [program("promtool"), *map(str, args)]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False
    )
    return (
        done.stdout + done.stderr + (f"ended with {done.returncode}\n" if done.returncode else "")
    )


def complaints(page: str) -> list[str]:
    """Return the complaints of ``promtool check metrics`` about the connector's part of a page.

    vLLM's names start with ``vllm:``. promtool complains about each of them, because colons are
    reserved for recording rules. These complaints are omitted.
    """
    ours = "".join(f"{line}\n" for line in page.splitlines() if "vllm:tiered_kv_" in line)
    said = promtool("check", "metrics", text=ours)
    assert "ended with 3" in said, f"it did not complain about colons: {said}"
    return [
        line
        for line in said.splitlines()
        if line and "should not contain ':'" not in line and line != "ended with 3"
    ]


def dashboard() -> dict[str, Any]:
    """Return the Grafana dashboard."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel, and its query as Grafana sends it."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def rule_queries() -> Iterator[tuple[str, str]]:
    """Yield the name and the query of each alert."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
