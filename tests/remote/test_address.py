"""Addresses are parsed in every usual form, and error messages never show a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.config import load_config
from tiered_kv.doctor.variables import check_variables
from tiered_kv.errors import ConfigError
from tiered_kv.remote.address import DEFAULT_PORT, Server, parse_address

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("valkey://kv", [Server("kv", DEFAULT_PORT)]),
        ("valkey://kv:7000/", [Server("kv", 7000)]),
        ("valkeys://a:1,b:2", [Server("a", 1), Server("b", 2)]),
        ("valkey://[::1]:7000", [Server("::1", 7000)]),
        ("valkey://me:pass@10.0.0.5:6380", [Server("10.0.0.5", 6380)]),
    ],
)
def test_servers_are_read(text: str, servers: list[Server]) -> None:
    address = parse_address(text)
    assert list(address.servers) == servers
    assert address.tls == text.startswith("valkeys")
    assert list(parse_address(str(address)).servers) == servers


def test_folders_are_read() -> None:
    address = parse_address("file:///mnt/shared/my%20kv?gib=0.5")
    assert address.folder == Path("/mnt/shared/my kv")
    assert (address.most_bytes, address.servers) == (1 << 29, ())
    assert parse_address(str(address)) == address
    assert parse_address("file:///mnt/kv").most_bytes == 32 << 30


def test_user_and_password_are_read() -> None:
    address = parse_address(f"valkey://agent:p%40{SECRET}@kv:1")
    assert (address.user, address.password) == ("agent", f"p@{SECRET}")
    assert parse_address(f"valkey://:{SECRET}@kv").password == SECRET
    assert SECRET not in f"{address} {address!r}"


@pytest.mark.parametrize(
    "text",
    [
        "kv:6379",
        "redis://kv",
        "valkey://",
        "valkey://kv:port",
        "valkey://kv:70000",
        "valkey://kv:0",
        "valkey://a,,b",
        "valkey://a/0",
        "valkey://a,a",
        f"valkey://:{SECRET}@kv:x",
        "file://mnt/shared",
        "file://",
        "file:///",
        "file:///mnt/kv?gib=much",
        "file:///mnt/kv?gib=0",
        "file:///mnt/kv?gib=nan",
        "file:///mnt/kv?size=4",
        "file:///mnt/kv#part",
        "file://[mnt/kv",
        "file:///mnt/a%00b",
    ],
)
def test_an_invalid_address_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="TIERED_KV_REMOTE") as caught:
        load_config({"TIERED_KV_REMOTE": text})
    assert SECRET not in str(caught.value)


def test_the_password_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    told = {"TIERED_KV_REMOTE": "valkey://me@kv"}
    for more in (
        {"TIERED_KV_REMOTE_PASSWORD": SECRET},
        {"TIERED_KV_REMOTE_PASSWORD_FILE": str(file)},
    ):
        config = load_config({**told, **more})
        assert config.remote is not None
        assert config.remote.password == SECRET
        assert SECRET not in repr(config)


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({"TIERED_KV_REMOTE_PASSWORD_FILE": "/nowhere"}, "cannot be read"),
        (
            {"TIERED_KV_REMOTE_PASSWORD_FILE": "f", "TIERED_KV_REMOTE_PASSWORD": "p"},
            "unset one of them",
        ),
        (
            {"TIERED_KV_REMOTE": "valkey://:a@kv", "TIERED_KV_REMOTE_PASSWORD": "p"},
            "Remove the one in TIERED_KV_REMOTE",
        ),
        (
            {"TIERED_KV_REMOTE": "file:///mnt/kv", "TIERED_KV_REMOTE_PASSWORD": "p"},
            "a folder, which needs no password",
        ),
        ({"TIERED_KV_CPU_GIB": "0"}, "TIERED_KV_REMOTE needs CPU memory"),
        ({"TIERED_KV_TIERS": "remote"}, None),
    ],
)
def test_conflicting_settings_are_refused(more: dict[str, str], advice: str | None) -> None:
    told = {"TIERED_KV_REMOTE": "valkey://kv", **more}
    if advice is None:
        assert load_config(told).tier_names == ("remote", "remote"), "refused with the tiers"
        return
    with pytest.raises(ConfigError, match=advice):
        load_config(told)


def test_observe_and_off_modes_use_no_store() -> None:
    told = {"TIERED_KV_REMOTE": "valkey://kv"}
    assert load_config(told).tier_names == ("remote",)
    assert load_config({**told, "TIERED_KV_MODE": "observe"}).tier_names == ()
    assert load_config({**told, "TIERED_KV_POLICY": "none"}).tier_names == ()


def test_the_doctor_shows_no_password() -> None:
    for text in (f"valkey://:{SECRET}@kv", f"redis://:{SECRET}@kv"):
        env = {"TIERED_KV_REMOTE": text, "TIERED_KV_REMOTE_PASSWORD_FILE": "/nowhere"}
        assert SECRET not in str([*check_variables(env)])
        assert SECRET not in str([*check_variables({"TIERED_KV_REMOTE": text})])
