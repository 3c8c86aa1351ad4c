"""The example in docs/snapshots.md runs verbatim: an agent is continued in three ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import count
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer
from tiered_kv.snapshot.reader import open_snapshot

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[3] / "docs" / "snapshots.md"
TASK = "You mend a program. " * 60 + "\nThe tests of the parser fail since Monday.\n"


def test_the_example_of_the_documents(
    server: VllmServer, client: httpx.Client, snapshots: Path
) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    found: dict[str, Any] = {"URL": server.url, "MODEL": MODEL_NAME, "TASK": TASK}
    before = count(client, "jobs_forked")

    exec(compile(example[1], str(PAGE), "exec"), found)
    found["server"].close()

    assert count(client, "jobs_forked") == before + 3
    assert found["best"] in found["ways"]
    with open_snapshot(snapshots / "kept") as snapshot:
        snapshot.verify()
        assert snapshot.manifest.job == found["best"]
        assert snapshot.manifest.parents == ("agent",)
