"""A turn with several calls is described by the call that takes longest."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.policies.tools.adversary import MAX_PASSES, SHELL, passes, soups
from tiered_kv.policies.base import NO_TOOL, ToolUse
from tiered_kv.policies.tools.calls import ToolCall, tool_call
from tiered_kv.policies.tools.duration_rules import OVERHEAD_S
from tiered_kv.policies.tools.known_commands import known_command
from tiered_kv.policies.tools.tool_use import UNKNOWN_S, masked, tool_use

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def shell(command: str, **arguments: object) -> ToolUse:
    return tool_use([tool_call("bash", {"command": command, **arguments})])


def test_without_a_call_there_is_no_tool() -> None:
    assert tool_use([]) == NO_TOOL


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("ls", ("bash", "ls", "ls")),
        ("cd a && ls -la src/b", ("bash", "ls", "ls -la <path>")),
        ("git clone https://a.org/b", ("bash", "git clone", "git clone <url>")),
        ("git -C a log -5 HEAD~3", ("bash", "git log", "git log -<n> <text>")),
        ("grep -rn 'a b' src --include=*.py", ("bash", "grep", "grep -rn <text> --include")),
        ("head -n 50 a.py", ("bash", "head", "head -n <n> <path>")),
        ("cat a.py b.py c.py", ("bash", "cat", "cat <path>")),
        ("sed -n 10,20p a.py", ("bash", "sed", "sed -n <text> <path>")),
        ("pytest -x a.py::b", ("bash", "pytest <path>::<name>", "pytest -x <path>::<name>")),
        ("python reproduce.py --n 3", ("bash", "python <path>", "python reproduce.py --n <n>")),
        ("python -c 'print(1)'", ("bash", "python -c", "python -c <text>")),
        ("sleep 30", ("bash", "sleep", "sleep <n>")),
        ("pip install -r a.txt", ("bash", "pip install", "pip install -r <path>")),
    ],
)
def test_a_path_goes_from_the_tool_to_the_masked_command(
    command: str, path: tuple[str, ...]
) -> None:
    assert shell(command).path == path


@pytest.mark.parametrize("name", ["bash", "execute_bash", "run_command", "terminal"])
def test_shells_are_one_tool(name: str) -> None:
    assert tool_use([tool_call(name, {"command": "ls"})]).path == ("bash", "ls", "ls")


@pytest.mark.parametrize(
    ("command", "decides"),
    [
        ("cd a && pytest", "pytest"),
        ("ls; pip install a; pytest b.py::c", "pip install"),
        ("pytest; ls", "pytest"),
        ("sleep 60; pytest", "sleep"),
        ("sleep 1; pytest", "pytest"),
        ("sleep 9; make; sleep 9", "sleep"),
        ("timeout 1 make; pytest", "pytest"),
        ("for i in {1..500}; do cat a; done; pytest", "cat (repeated)"),
        ("find . -name a -exec python b.py {} \\;", "python <path> (repeated)"),
        ("find . -name a -exec grep b {} +", "find"),
        ("ls | xargs -n1 gcc -c", "gcc (repeated)"),
        ("frobnicate; ls", "frobnicate"),
        ("frobnicate; make", "make"),
        ("cat $(find / -name a)", "find /"),
    ],
)
def test_the_slowest_segment_decides(command: str, decides: str) -> None:
    assert shell(command).path[1] == decides


def test_segments_add_up() -> None:
    one, other = known_command(["pytest"]).rule, known_command(["make"]).rule
    assert one is not None
    assert other is not None
    rule = shell("pytest && make").rule
    assert rule is not None
    assert rule.median_s == pytest.approx(one.median_s + other.median_s - OVERHEAD_S)
    assert rule.sigma == other.sigma
    capped = shell("timeout 2 make").rule
    assert capped is not None
    assert capped.median_s == pytest.approx(2 + OVERHEAD_S)


def test_nothing_is_assumed_about_an_unknown_command() -> None:
    use = shell("frobnicate --all")
    assert use.rule is None
    assert use.path == ("bash", "frobnicate", "frobnicate --all")


def test_the_command_s_own_bounds_are_kept() -> None:
    use = shell("sleep 3 && sleep 2")
    assert (use.least_s, use.most_s) == (5, 5)
    assert use.rule is not None
    assert use.rule.median_s == pytest.approx(5 + OVERHEAD_S)
    use = shell("cd a && timeout 30 pytest | tail")
    assert (use.least_s, use.most_s) == (0, 30)


@pytest.mark.parametrize(
    ("arguments", "most_s"),
    [
        ({"timeout": 60}, 60),
        ({"timeout": "60"}, 60),
        ({"timeout": 120_000}, 120),
        ({"timeout_ms": 5000}, 5),
        ({"yield_time_ms": 1000, "timeout_ms": 5000}, 1),
        ({"timeout": 0}, math.inf),
        ({"timeout": -1}, math.inf),
        ({"timeout": math.nan}, math.inf),
        ({"timeout": True}, math.inf),
        ({"timeout": "soon"}, math.inf),
        ({"timeout": [3]}, math.inf),
        ({"timeout": 10**400}, math.inf),
    ],
)
def test_a_tool_s_own_timeout_caps(arguments: dict[str, object], most_s: float) -> None:
    assert shell("make", **arguments).most_s == most_s
    assert shell("sleep 999", **arguments).least_s == min(999, most_s)


def test_background_commands_return_immediately() -> None:
    for use in (
        shell("python server.py &"),
        shell("make", run_in_background=True),
        shell("make", is_background="true"),
        shell("cd a"),
    ):
        assert use.path == ("bash", "(at once)")
        assert use.rule is not None
        assert use.rule.median_s < UNKNOWN_S


def test_the_command_is_kept_up_to_a_limit() -> None:
    """The whole command is kept, up to a limit, because the forecast learns from its words."""
    assert shell("cd a && pytest | tail").command == "cd a && pytest | tail"
    assert len(shell("echo " + "x" * 100_000).command) == 2_000


def test_of_parallel_calls_the_slowest_decides() -> None:
    read, make = ToolCall("Read", {"path": "a"}), tool_call("bash", {"command": "make"})
    nap = tool_call("bash", {"command": "sleep 5"})
    use = tool_use([read, nap, make])
    assert use.path == ("bash", "make", "make")
    assert (use.least_s, use.most_s) == (5, math.inf)
    assert use.command == "make"
    assert tool_use([nap, tool_call("bash", {"command": "timeout 3 make"})]).most_s == 5


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (ToolCall("get_user"), ("get_user",)),
        (ToolCall("str_replace_editor", {"command": "view", "path": "a"}),
         ("str_replace_editor", "str_replace_editor view")),
        (ToolCall("computer", {"action": "left_click"}), ("computer", "computer left_click")),
        (ToolCall("Task", {"subagent_type": "explorer"}), ("Task", "Task explorer")),
        (ToolCall("editor", {"command": "two words"}), ("editor",)),
        (ToolCall("editor", {"command": 3}), ("editor",)),
    ],
)  # fmt: skip
def test_other_tools_are_classified_by_name_and_action(
    call: ToolCall, path: tuple[str, ...]
) -> None:
    assert tool_use([call]).path == path


def test_the_duration_of_a_wait_is_exact() -> None:
    for call in (
        ToolCall("wait", {"seconds": 3}),
        ToolCall("sleep", {"ms": "3000"}),
        ToolCall("computer", {"action": "wait", "duration": 3.0}),
    ):
        use = tool_use([call])
        assert (use.least_s, use.most_s) == (3, 3)
    assert tool_use([ToolCall("wait", {"for": "build"})]).most_s == math.inf


def test_a_secret_in_a_command_is_masked() -> None:
    """Tool paths are written to disk with the policy's learned state, so they must not contain
    secrets."""
    path = shell("curl -H 'Authorization: Bearer t0k3n' --token=t0k3n -u me:t0k3n a.org/t0k3n").path
    assert not any("t0k3n" in part for part in path)


@given(soups(SHELL))
@example("\\")
@example("'python <path>'")
@example("tar -" + "c" * 100_000)
@example("git " + "-C a " * 50_000)
@example("python " + "-u " * 50_000)
@example("pytest " + "a::b " * 50_000)
@example("make -" + "1" * 200_000)
def test_no_command_makes_it_raise_or_hang(command: str) -> None:
    assert passes(shell, command) < MAX_PASSES
    use = shell(command)
    assert 0 <= use.least_s <= use.most_s
    assert all(0 < len(part) <= 80 for part in use.path)
    assert use.rule is None or (use.rule.median_s > 0 and use.rule.sigma > 0)


@given(st.text(), st.dictionaries(st.text(), JSON, max_size=4))
def test_no_arguments_make_it_raise(name: str, arguments: dict[str, object]) -> None:
    use = tool_use([tool_call(name, arguments), ToolCall(name, arguments, "ls")])
    assert use.least_s <= use.most_s


@given(st.dictionaries(st.sampled_from(["timeout", "seconds", "ms", "command", "action"]), JSON))
def test_no_known_argument_makes_it_raise(arguments: dict[str, object]) -> None:
    for name in ("bash", "wait", "editor"):
        use = tool_use([tool_call(name, arguments)])
        assert 0 <= use.least_s <= use.most_s


@given(st.lists(st.text(max_size=300), min_size=1))
def test_a_masked_command_is_short(words: list[str]) -> None:
    assert len(masked(words)) <= 80
