"""The doctor checks the remote store: login, writes and speed."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.doctor.finding import Verdict
from tiered_kv.doctor.installation import check_remote
from tiered_kv.remote.address import parse_address
from tiered_kv.testing.valkey import ValkeyServer


def test_a_store_is_measured_and_left_empty(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        (found,) = check_remote(server.address)
        assert (found.verdict, server.talk(b"DBSIZE")) == (Verdict.OK, b":0\r\n")
        assert "MB/s" in found.seen


def test_a_store_that_is_down_or_full_is_a_warning(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, most="1kb", eviction="noeviction")
    (down,) = check_remote(server.address)
    assert down.verdict is Verdict.WARN
    assert "TIERED_KV_REMOTE" in down.advice
    with server:
        (full,) = check_remote(server.address)
    assert full.verdict is Verdict.WARN
    assert "noeviction" in full.advice


def test_a_folder_is_measured_and_left_empty(tmp_path: Path) -> None:
    address = parse_address(f"{tmp_path.as_uri()}/kv")
    (missing,) = check_remote(address)
    assert missing.verdict is Verdict.WARN
    (tmp_path / "kv").mkdir()
    (found,) = check_remote(address)
    assert (found.verdict, list((tmp_path / "kv").iterdir())) == (Verdict.OK, [])


def test_a_password_that_is_refused_is_a_failure(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, password="hunter2") as server:
        (found,) = check_remote(parse_address(f"valkey://:guess@{server.server}"))
    assert found.verdict is Verdict.FAIL
    assert "guess" not in f"{found.seen} {found.advice}"


def test_no_store_is_no_finding() -> None:
    assert not [*check_remote(None)]
