"""Client hints are validated when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.jobs import hints as module
from tiered_kv.policies.jobs.hints import (
    MAX_EXPECTED_S,
    MAX_TOOL_COMMAND_CHARS,
    MAX_TOOL_NAME_CHARS,
    TurnHints,
)
from tiered_kv.policies.jobs.identity import INFERRED_PREFIX, MAX_JOB_ID_CHARS, NOBODY

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
NAMES = ["job_id", "is_last_step", "tool_name", "tool_command", "expected_tool_s"]
HINTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON_LIKE))
ANYTHING = JSON_LIKE | HINTS | st.dictionaries(st.text() | st.integers() | st.none(), JSON_LIKE)


def read_hints(params: object, xargs: object = None, session_id: object = None) -> TurnHints:
    """Return the hints without the job's session and parent, which test_identity.py tests."""
    return module.read_hints(params, xargs, session_id)._replace(who=NOBODY)


def test_a_client_without_hints_is_not_an_error() -> None:
    assert read_hints(None) == read_hints({}) == read_hints({}, {}, None) == TurnHints(ignored=0)


def test_a_job_and_its_last_step_are_read() -> None:
    assert read_hints({"job_id": "swe-1", "is_last_step": True}) == TurnHints("swe-1", True)
    assert read_hints({"job_id": "swe-1", "is_last_step": False}) == TurnHints("swe-1", False)
    assert read_hints({"job_id": None, "is_last_step": None}) == TurnHints()


def test_a_client_may_announce_the_next_tool_call() -> None:
    said = {"tool_name": "bash", "tool_command": "make -j8", "expected_tool_s": 40}
    assert read_hints(said) == TurnHints(
        tool_name="bash", tool_command="make -j8", expected_s=40.0, ignored=0
    )


# -- sources of hints -------------------------------------------------------------


def test_the_first_usable_hint_counts() -> None:
    params = {"job_id": "params", "is_last_step": False, "tool_name": "", "expected_tool_s": None}
    xargs = {"job_id": "xargs", "is_last_step": 1, "tool_name": "bash", "expected_tool_s": 2}
    assert read_hints(params, xargs, "session") == TurnHints(
        "params", False, tool_name="bash", expected_s=2.0, ignored=1
    )
    assert read_hints(None, xargs, "session").job_id == "xargs"
    assert read_hints({}, {}, "session") == TurnHints("session")


def test_xargs_for_other_components_are_not_counted() -> None:
    """vLLM's ``extra_args`` also contain parameters of logits processors and
    ``kv_transfer_params``. These do not count as ignored hints."""
    xargs = {"kv_transfer_params": {"job_id": "p"}, "my_processor": [1, 2], "job_id": "x"}
    assert read_hints({"job_id": "p"}, xargs) == TurnHints("p", ignored=0)


def test_a_session_id_is_used_only_if_there_is_no_job_id() -> None:
    too_long = "s" * (MAX_JOB_ID_CHARS + 1)
    assert read_hints({"job_id": "j"}, None, too_long) == TurnHints("j", ignored=0)
    assert read_hints({"job_id": ""}, None, "s") == TurnHints("s", ignored=1)
    assert read_hints(None, None, too_long) == TurnHints(ignored=1)


def test_an_answers_parameters_may_be_sent_back() -> None:
    answered = {"tiered_kv": {"prompt_tokens": 7}, "job_id": "j"}
    assert read_hints(answered) == TurnHints("j", ignored=0)


# -- values -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 7, -7, 2**64 - 1])
def test_a_job_may_be_a_number(number: int) -> None:
    """A number is accepted as a job id, because Continuum's clients number their jobs."""
    assert read_hints({"job_id": number}) == TurnHints(str(number))


@pytest.mark.parametrize(("said", "meant"), [(0, False), (1, True)])
def test_a_last_step_may_be_zero_or_one(said: int, meant: bool) -> None:
    """0 and 1 are accepted, because vLLM converts the booleans in ``vllm_xargs`` to numbers."""
    assert read_hints(None, {"is_last_step": said}) == TurnHints(None, meant)


@pytest.mark.parametrize(
    "job_id",
    ["", True, False, 1.5, float("nan"), [], ["a"], {"a": 1}, b"job", 2**64, -(2**64), 10**4000],
)
def test_an_invalid_job_id_is_counted(job_id: object) -> None:
    assert read_hints({"job_id": job_id, "is_last_step": True}) == TurnHints(None, True, ignored=1)


@pytest.mark.parametrize(
    "said", ["yes", "true", "", 2, -1, 1.0, 0.0, [], {}, float("nan"), 10**400]
)
def test_an_invalid_last_step_is_counted_and_ignored(said: object) -> None:
    assert read_hints({"job_id": "j", "is_last_step": said}) == TurnHints("j", False, ignored=1)


@pytest.mark.parametrize("said", [0, 0.0, 1, 2.5, 1e-300, MAX_EXPECTED_S])
def test_a_time_is_a_number_of_seconds(said: float) -> None:
    assert read_hints({"expected_tool_s": said}) == TurnHints(expected_s=float(said))


@pytest.mark.parametrize(
    "said",
    [
        -1,
        -1e-9,
        float("nan"),
        float("inf"),
        -float("inf"),
        MAX_EXPECTED_S + 1,
        10**4000,
        True,
        "3",
        [3],
        {},
        3j,
    ],
)
def test_an_invalid_time_is_counted(said: object) -> None:
    assert read_hints({"expected_tool_s": said}) == TurnHints(ignored=1)


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("job_id", MAX_JOB_ID_CHARS),
        ("tool_name", MAX_TOOL_NAME_CHARS),
        ("tool_command", MAX_TOOL_COMMAND_CHARS),
    ],
)
def test_strings_have_a_length_limit(key: str, most: int) -> None:
    longest = "x" * most
    assert getattr(read_hints({key: longest}), key) == longest
    for said in (longest + "x", "x" * 10_000_000, "", 3.5, ["x"], b"x"):
        assert read_hints({key: said}) == TurnHints(ignored=1)


def test_names_may_be_any_string() -> None:
    for name in ("ünïcode", " ", "a/b\\c", "\x00", "\ud800", "👩🏽‍💻", "'; DROP TABLE jobs"):
        assert read_hints({"job_id": name}).job_id == name


def test_clients_cannot_use_the_names_of_inferred_jobs() -> None:
    name = f"{INFERRED_PREFIX}7"
    assert read_hints({"job_id": name}, {"job_id": name}, name) == TurnHints(ignored=3)


@pytest.mark.parametrize(
    "params", ["text", 3, 3.5, True, [], [{"job_id": "j"}], ("job_id", "j"), b"{}", object()]
)
def test_hints_that_are_not_an_object_are_counted_once(params: object) -> None:
    assert read_hints(params) == read_hints(None, params) == TurnHints(ignored=1)


def test_unknown_keys_are_counted_and_the_known_ones_used() -> None:
    """Unknown keys count as ignored, for example a TTL, which clients cannot set. The known keys
    next to them are used."""
    params = {"ttl": -5, "ttl_s": "abc", "job_id": "j", "is_last_step": True, 7: None}
    assert read_hints(params) == TurnHints("j", True, ignored=3)


def test_any_mapping_is_accepted() -> None:
    assert read_hints(MappingProxyType({"job_id": "j"})) == TurnHints("j")


# -- arbitrary input --------------------------------------------------------------


@given(ANYTHING, ANYTHING, JSON_LIKE)
def test_no_hints_raise_an_exception(params: object, xargs: object, session: object) -> None:
    hints = read_hints(params, xargs, session)
    for text, limit in (
        (hints.job_id, MAX_JOB_ID_CHARS),
        (hints.tool_name, MAX_TOOL_NAME_CHARS),
        (hints.tool_command, MAX_TOOL_COMMAND_CHARS),
    ):
        assert text is None or 0 < len(text) <= limit
    assert isinstance(hints.is_last_step, bool)
    assert hints.expected_s is None or 0 <= hints.expected_s <= MAX_EXPECTED_S
    most = sum(len(said) if isinstance(said, Mapping) else 1 for said in (params, xargs))
    assert 0 <= hints.ignored <= 2 * most + 1


@given(HINTS)
def test_every_value_is_used_or_counted(params: dict[str, object]) -> None:
    hints = read_hints(params)
    used = {
        "job_id": hints.job_id is not None,
        "is_last_step": isinstance(params.get("is_last_step"), int)
        and params["is_last_step"] in (0, 1),
        "tool_name": hints.tool_name is not None,
        "tool_command": hints.tool_command is not None,
        "expected_tool_s": hints.expected_s is not None,
    }
    said = {key for key, value in params.items() if value is not None}
    assert hints.ignored == sum(not used[key] for key in said)
