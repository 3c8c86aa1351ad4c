"""The doctor maps LMCache's settings to tiered-kv's equivalents."""

from __future__ import annotations

import pytest

from tests.doctor.told import by_check
from tiered_kv.config import load_config
from tiered_kv.doctor.lmcache import EQUIVALENTS, PREFIX, check_lmcache


def advice(name: str, value: str, ranks: int = 1) -> str:
    (found,) = check_lmcache({name: value, "PATH": "/bin"}, ranks)
    assert (found.check, found.verdict.value) == (name, "warn")
    return found.advice


def test_sizes_are_of_the_whole_engine_and_in_gib() -> None:
    assert advice("LMCACHE_MAX_LOCAL_CPU_SIZE", "20").startswith("Set TIERED_KV_CPU_GIB=18.6 (")
    assert advice("LMCACHE_MAX_LOCAL_CPU_SIZE", "20", 4).startswith("Set TIERED_KV_CPU_GIB=74.5 (")
    assert advice("LMCACHE_MAX_LOCAL_DISK_SIZE", "100").startswith("Set TIERED_KV_SSD_GIB=93.1 (")
    assert advice("LMCACHE_MAX_LOCAL_DISK_SIZE", "much").startswith("Set TIERED_KV_SSD_GIB=GIB (")


@pytest.mark.parametrize("value", ["/nvme/kv", "file:///nvme/kv", '"file:///nvme/kv"'])
def test_lmcaches_folder_is_suggested_as_the_ssd_path(value: str) -> None:
    assert advice("LMCACHE_LOCAL_DISK", value).startswith("Set TIERED_KV_SSD_PATH=/nvme/kv,")


def test_what_lmcache_turns_off_can_be_turned_off() -> None:
    assert "SSD is off" in advice("LMCACHE_LOCAL_DISK", "false")
    assert "TIERED_KV_CPU_GIB=0" in advice("LMCACHE_LOCAL_CPU", "False")
    assert "Nothing to set" in advice("LMCACHE_LOCAL_CPU", "True")


def test_policies_are_mapped_by_name() -> None:
    assert "TIERED_KV_EVICTION=lru" in advice("LMCACHE_CACHE_POLICY", "LRU")
    assert "worth" in advice("LMCACHE_CACHE_POLICY", "LFU")


def test_unknown_jobs_and_pages_change_nothing() -> None:
    assert advice("LMCACHE_NOVELTY", "1") == "tiered-kv has no equivalent."


def test_every_variable_that_is_named_exists() -> None:
    env = {PREFIX + name: "1" for name in EQUIVALENTS}
    for found in by_check(check_lmcache(env, 2)).values():
        for word in found.advice.replace(":", " ").replace(";", " ").split():
            if word.startswith("Set TIERED_KV_"):
                name, _, value = word.partition("=")
                if name != "TIERED_KV_TIERS":
                    load_config({name: value or "1"} if name.endswith("_GIB") else {})
