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
"""A metric in a query; every metric of vLLM and of the connector begins so."""
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$engine": ".*"}
"""Values that Grafana puts in place of the variables of the dashboard."""


def program(name: str) -> str:
    """Path of a program of Debian's package ``prometheus``."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install --no-install-recommends prometheus")
    return found


def promtool(*args: str | Path, text: str | None = None) -> str:
    """Output of promtool, whatever its verdict."""
    command = [program("promtool"), *map(str, args)]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False
    )
    return (
        done.stdout + done.stderr + (f"ended with {done.returncode}\n" if done.returncode else "")
    )


def complaints(page: str) -> list[str]:
    """Complaints of ``promtool check metrics`` about the connector's part of a page.

    vLLM's names begin with ``vllm:``. A colon is for names that recording rules make, so promtool
    complains about each of them; that is left out.
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
    """The dashboard of Grafana."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def panel_queries() -> Iterator[tuple[str, str]]:
    """Queries of the dashboard as Grafana sends them, with their panels' titles."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def rule_queries() -> Iterator[tuple[str, str]]:
    """Queries of the alerts, with their names."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
