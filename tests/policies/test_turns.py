"""What clients say is read without trusting it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.turns import MAX_JOB_ID_CHARS, TurnHints, read_hints

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**310)
    | st.floats()
    | st.text()
    | st.binary()
)
JSON_LIKE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
HINTS = st.fixed_dictionaries({}, optional={"job_id": JSON_LIKE, "is_last_step": JSON_LIKE})


def test_a_client_that_says_nothing_is_no_mistake() -> None:
    assert read_hints(None) == read_hints({}) == TurnHints(None, False, ignored=0)


def test_a_job_and_its_last_step_are_read() -> None:
    assert read_hints({"job_id": "swe-1", "is_last_step": True}) == TurnHints("swe-1", True, 0)
    assert read_hints({"job_id": "swe-1", "is_last_step": False}) == TurnHints("swe-1", False, 0)
    assert read_hints({"job_id": None, "is_last_step": None}) == TurnHints()


@pytest.mark.parametrize("number", [0, 7, -7, 2**64 - 1])
def test_a_job_may_be_a_number(number: int) -> None:
    """Continuum's clients count their jobs."""
    assert read_hints({"job_id": number}) == TurnHints(str(number), False, 0)


@pytest.mark.parametrize(("said", "meant"), [(0, False), (1, True)])
def test_a_last_step_may_be_zero_or_one(said: int, meant: bool) -> None:
    """vLLM turns the booleans of vllm_xargs into numbers."""
    assert read_hints({"is_last_step": said}) == TurnHints(None, meant, 0)


@pytest.mark.parametrize(
    "job_id",
    ["", True, False, 1.5, float("nan"), [], ["a"], {"a": 1}, b"job", 2**64, -(2**64), 10**400],
)
def test_what_is_no_name_for_a_job_is_counted(job_id: object) -> None:
    assert read_hints({"job_id": job_id, "is_last_step": True}) == TurnHints(None, True, 1)


@pytest.mark.parametrize(
    "said", ["yes", "true", "", 2, -1, 1.0, 0.0, [], {}, float("nan"), 10**400]
)
def test_what_is_no_yes_or_no_is_counted_and_not_believed(said: object) -> None:
    assert read_hints({"job_id": "j", "is_last_step": said}) == TurnHints("j", False, 1)


def test_a_name_of_ten_megabytes_is_not_kept() -> None:
    assert read_hints({"job_id": "x" * 10_000_000}) == TurnHints(None, False, 1)
    longest = "x" * MAX_JOB_ID_CHARS
    assert read_hints({"job_id": longest}).job_id == longest
    assert read_hints({"job_id": longest + "x"}).job_id is None


def test_names_are_any_text() -> None:
    for name in ("ünïcode", " ", "a/b\\c", "\x00", "\ud800", "👩🏽‍💻", "'; DROP TABLE jobs"):
        assert read_hints({"job_id": name}).job_id == name


@pytest.mark.parametrize(
    "params", ["text", 3, 3.5, True, [], [{"job_id": "j"}], ("job_id", "j"), b"{}", object()]
)
def test_hints_that_are_no_object_are_counted_once(params: object) -> None:
    assert read_hints(params) == TurnHints(None, False, 1)


def test_unknown_keys_are_counted_and_the_known_ones_used() -> None:
    """A negative TTL, say: there is no such setting for clients."""
    params = {"ttl": -5, "ttl_s": "abc", "job_id": "j", "is_last_step": True, 7: None}
    assert read_hints(params) == TurnHints("j", True, ignored=3)


def test_any_mapping_will_do() -> None:
    assert read_hints(MappingProxyType({"job_id": "j"})) == TurnHints("j", False, 0)


@given(JSON_LIKE | HINTS | st.dictionaries(st.text() | st.integers() | st.none(), JSON_LIKE))
def test_nothing_a_client_sends_raises(params: object) -> None:
    hints = read_hints(params)
    assert hints.job_id is None or 0 < len(hints.job_id) <= MAX_JOB_ID_CHARS
    assert isinstance(hints.is_last_step, bool)
    most = len(params) if isinstance(params, Mapping) else 1
    assert 0 <= hints.ignored <= most


@given(HINTS)
def test_every_value_is_used_or_counted(params: dict[str, object]) -> None:
    hints = read_hints(params)
    said = {key for key, value in params.items() if value is not None}
    used = {"job_id"} if hints.job_id is not None else set()
    if isinstance(params.get("is_last_step"), int) and params["is_last_step"] in (0, 1):
        used.add("is_last_step")
    assert hints.ignored == len(said - used)
