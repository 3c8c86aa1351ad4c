"""Checks of environment variables. Each invalid variable is reported, and a misspelt name with the
closest valid name."""

from __future__ import annotations

from pathlib import Path

from tests.doctor.told import by_check, verdicts
from tiered_kv.config import TierConfig
from tiered_kv.doctor.variables import check_hash_seed, check_variables, read_settings


def test_nothing_set_is_fine() -> None:
    found = by_check(check_variables({"PATH": "/bin"}))
    assert found["settings"].seen == "none set: defaults apply"


def test_settings_that_work_are_repeated() -> None:
    found = by_check(check_variables({"TIERED_KV_CPU_GIB": "8", "TIERED_KV_CODEC": "zstd:3"}))
    assert found["settings"].seen == "TIERED_KV_CODEC=zstd:3, TIERED_KV_CPU_GIB=8"


def test_all_errors_are_reported_together() -> None:
    """The doctor reports three invalid variables together. A server, in contrast, stops at the
    first."""
    env = {
        "TIERED_KV_CPU_GIB": "lots",
        "TIERED_KV_SSD_SIZE": "10",
        "TIERED_KV_PIN_FRACTION": "2",
        "TIERED_KV_CODEC": "raw",
    }
    found = by_check(check_variables(env))
    assert {name for name, one in found.items() if one.verdict.value == "fail"} == {
        "TIERED_KV_CPU_GIB",
        "TIERED_KV_SSD_SIZE",
        "TIERED_KV_PIN_FRACTION",
    }
    assert "not a number" in found["TIERED_KV_CPU_GIB"].advice
    assert "did you mean TIERED_KV_SSD_" in found["TIERED_KV_SSD_SIZE"].advice


def test_settings_may_be_wrong_together(tmp_path: Path) -> None:
    env = {"TIERED_KV_CPU_GIB": "0", "TIERED_KV_SSD_PATH": str(tmp_path)}
    found = by_check(check_variables(env))
    assert found["settings"].verdict.value == "fail"
    assert "needs CPU memory" in found["settings"].advice
    assert read_settings(env) == TierConfig()


def test_a_name_that_is_nearly_ours_is_noticed() -> None:
    env = {"TIERD_KV_CPU_GIB": "8", "TIEREDKV_SSD_PATH": "/x", "CPU_GIB": "8", "OTHER": "1"}
    found = by_check(check_variables(env))
    assert verdicts(found.values()) == {
        "TIERD_KV_CPU_GIB": "warn",
        "TIEREDKV_SSD_PATH": "warn",
        "settings": "ok",
    }
    assert found["TIERD_KV_CPU_GIB"].advice == "Did you mean TIERED_KV_CPU_GIB?"


def test_variables_set_by_kubernetes_are_not_errors() -> None:
    env = {"TIERED_KV_SERVICE_HOST": "10.0.0.1", "TIERED_KV_PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    assert verdicts(check_variables(env)) == {"settings": "ok"}


def test_valid_settings_are_used_for_the_other_checks() -> None:
    env = {"TIERED_KV_CPU_GIB": "8", "TIERED_KV_SSD_SIZE": "10"}
    assert read_settings(env).cpu_gib == 8


def test_the_hash_seed_matters_to_pages_that_outlive_the_server(tmp_path: Path) -> None:
    ssd = TierConfig(ssd_path=tmp_path)
    assert "xxhash" in check_hash_seed({}, ssd).seen
    assert "xxhash" in check_hash_seed({}, TierConfig(cpu_path=tmp_path)).seen
    assert "only for pages that outlive the server" in check_hash_seed({}, TierConfig()).seen
    seen = check_hash_seed({"PYTHONHASHSEED": "0"}, ssd).seen
    assert seen.startswith("0: only servers with the same seed")
