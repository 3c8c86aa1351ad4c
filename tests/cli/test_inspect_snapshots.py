"""``tiered-kv inspect`` and ``diff`` show snapshots without a server, and do not trust their
contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.snapshot_calls import HOSTILE, invoke, rows, sentence
from tests.cli.snapshot_disk import make_snapshot
from tests.snapshot.made_snapshots import OPAQUE, PLAIN
from tiered_kv.snapshot.manifest import SnapshotGroup
from tiered_kv.snapshot.pack import pack


def told(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Call a command with ``--json``, and return the object that it prints on one line."""
    text = invoke(*arguments, "--json", code=code).stdout
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(text)
    return found


def spoil(page: Path) -> None:
    """Change the last byte of a page."""
    data = bytearray(page.read_bytes())
    data[-1] ^= 1
    page.chmod(0o600)
    page.write_bytes(data)


def test_a_snapshot_is_described_without_its_secrets(tmp_path: Path) -> None:
    make_snapshot(tmp_path, "s", range(700, 740), ranks=2, cache_salt="secret", parents=("p", "q"))
    pack(tmp_path / "s", tmp_path / "z.zip")
    for path in (tmp_path / "s", tmp_path / "z.zip"):
        result = invoke("inspect", path)
        said = rows(result)
        assert (said["job"], said["from"], said["salted"]) == ("j", "p, q", "yes")
        assert said["tokens"] == "40, 40 of them with KV"
        assert said["last turn"] == "39 of prompt, 1 of answer"
        assert said["made"] == "2023-11-14 22:13:20 UTC"
        assert said["sampling"] == "temperature 0.7"
        assert "secret" not in result.stdout
        assert "701" not in result.stdout
        found = told("inspect", path)
        assert found["path"] == str(path)
        assert (found["tokens"], found["pages"], found["salted"]) == (40, 6, True)
        assert found["raw_bytes"] == 6 * OPAQUE.page_bytes
        assert found["groups"][0]["fingerprint"] == PLAIN[0].fingerprint
        assert "secret" not in json.dumps(found)
        assert "token_ids" not in found
        assert "good" not in found


def test_tokens_are_reported_on_request(tmp_path: Path) -> None:
    make_snapshot(tmp_path, "s", range(700, 740))
    assert told("inspect", tmp_path / "s", "--tokens")["token_ids"] == list(range(700, 740))
    lines = invoke("inspect", tmp_path / "s", "--tokens").stdout.splitlines()
    assert lines[-1].split() == [str(token) for token in range(700, 740)]


def test_a_page_that_is_damaged_is_found(tmp_path: Path) -> None:
    make_snapshot(tmp_path, "s")
    path = tmp_path / "s"
    found = told("inspect", path, "--verify")
    assert (found["good"], found["bad"]) == (True, None)
    assert "all pages good" in invoke("inspect", path, "--verify").stdout
    spoil(next((path / "pages").iterdir()))
    found = told("inspect", path, "--verify", code=1)
    assert not found["good"]
    assert "damaged" in found["bad"]
    result = invoke("inspect", path, "--verify", code=1)
    assert "damaged" in result.stderr
    invoke("inspect", path)


def test_names_from_elsewhere_are_made_harmless(tmp_path: Path) -> None:
    group = SnapshotGroup(0, 16, OPAQUE, {HOSTILE: HOSTILE, "nested": {HOSTILE: 1}})
    names = ("job", "model", "vllm", "tiered_kv", "cache_salt")
    odd: dict[str, Any] = dict.fromkeys(names, HOSTILE)
    make_snapshot(tmp_path, "s", groups=(group,), sampling={HOSTILE: [HOSTILE]}, **odd)
    make_snapshot(tmp_path, "t", parents=(HOSTILE,) * 50)
    for command in (["inspect", tmp_path / "s"], ["inspect", tmp_path / "t"]):
        text = invoke(*command, "--verify").stdout
        assert all(line.isprintable() for line in text.splitlines())
        assert r"\x1b[2J[bold]j[/]" in text
    text = invoke("diff", tmp_path / "s", tmp_path / "t").stdout
    assert all(line.isprintable() for line in text.splitlines())
    assert told("inspect", tmp_path / "s")["job"] == HOSTILE
    assert told("inspect", tmp_path / "t")["parents"] == [HOSTILE] * 50


@pytest.mark.parametrize("kind", ["nothing", "folder", "text", "damaged", "link"])
def test_a_path_that_is_not_a_snapshot_is_refused_in_one_sentence(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "s"
    match kind:
        case "folder":
            path.mkdir()
        case "text":
            path.write_text("no zip")
        case "damaged":
            make_snapshot(tmp_path, "s")
            manifest = path / "manifest.json"
            manifest.write_bytes(manifest.read_bytes().replace(b"org/model", b"org/modem"))
        case "link":
            path.symlink_to("s")
    make_snapshot(tmp_path, "good")
    assert sentence("inspect", path)
    assert sentence("inspect", path, "--json")
    assert sentence("diff", path, tmp_path / "good")
    assert sentence("diff", tmp_path / "good", path, "--json")


def test_two_snapshots_of_a_job_are_compared(tmp_path: Path) -> None:
    make_snapshot(tmp_path, "early", range(32), cache_salt="secret")
    make_snapshot(tmp_path, "late", range(48), turns=4, cache_salt="other")
    found = told("diff", tmp_path / "early", tmp_path / "late")
    assert (found["a"], found["b"]) == (str(tmp_path / "early"), str(tmp_path / "late"))
    assert (found["common_tokens"], found["a_tokens"], found["b_tokens"]) == (32, 0, 16)
    assert (found["common_pages"], found["a_pages"], found["b_pages"]) == (2, 0, 1)
    assert found["fields"]["turns"] == [3, 4]
    text = invoke("diff", tmp_path / "early", tmp_path / "late").stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["tokens", "after", "those", "0", "16"] in lines
    assert ["turns", "3", "4"] in lines
    assert "secret" not in text + json.dumps(found)
    same = told("diff", tmp_path / "late", tmp_path / "late")
    assert (same["fields"], same["a_tokens"], same["a_pages"]) == ({}, 0, 0)
