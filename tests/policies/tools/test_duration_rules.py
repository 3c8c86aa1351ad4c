"""Rules for tool durations that apply before any observation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.tools import duration_rules as rules
from tiered_kv.policies.tools.calls import name_parts
from tiered_kv.policies.tools.duration_rules import tool_rule
from tiered_kv.policies.tools.known_commands import known_command, split_command

WORDS = st.lists(st.text(max_size=12) | st.sampled_from(["git", "-C", "run", "tar", "-c", "::"]))


def median_s(command: str) -> float:
    rule = known_command(command.split()).rule
    assert rule is not None, command
    return rule.median_s


@pytest.mark.parametrize(
    ("command", "name", "arguments"),
    [
        ("ls -l a", "ls", ["-l", "a"]),
        ("git clone url", "git clone", ["url"]),
        ("git -C repo --no-pager log -p", "git log", ["--no-pager", "-p"]),
        ("git", "git", []),
        ("make", "make", []),
        ("make -C dir -j 4 CC=gcc test", "make test", ["CC=gcc"]),
        ("npm --prefix web run build -- --prod", "npm run build", ["--", "--prod"]),
        ("npm run", "npm run", []),
        ("uv pip install a", "uv pip install", ["a"]),
        ("docker compose -f a.yml up -d", "docker compose up", ["-d"]),
        ("cargo +nightly test", "cargo test", ["+nightly"]),
        ("python -c code", "python -c", ["code"]),
        ("python -u train.py --lr 3", "python <path>", ["train.py", "--lr", "3"]),
        ("python manage.py test polls", "python manage.py test", ["polls"]),
        ("python app/manage.py runserver", "python manage.py runserver", []),
        ("python", "python", []),
        ("node -e code", "node -e", ["code"]),
        ("tar czf a.tgz a", "tar -c", ["czf", "a.tgz", "a"]),
        ("tar -C out -xf a.tgz", "tar -x", ["-C", "out", "-xf", "a.tgz"]),
        ("tar --list -f a.tar", "tar -l", ["--list", "-f", "a.tar"]),
        ("./run.sh a", "./run.sh", ["a"]),
    ],
)  # fmt: skip
def test_a_subcommand_belongs_to_the_name(command: str, name: str, arguments: list[str]) -> None:
    found, rest = split_command(command.split())
    assert (found, list(rest)) == (name, arguments)


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ("git status", "git clone url"),
        ("git log -p", "git gc"),
        ("make clean", "make all"),
        ("make -n", "make"),
        ("grep -rn foo src", "grep -rn foo /"),
        ("find . -name a", "find / -name a"),
        ("pytest a.py::b", "pytest a.py"),
        ("pytest a.py", "pytest"),
        ("pytest -k name", "pytest"),
        ("pytest --collect-only", "pytest"),
        ("pip list", "pip install a"),
        ("pip install --help", "pip install a"),
        ("python --version", "python a.py"),
        ("python -c code", "python a.py"),
        ("ruff check", "mypy ."),
        ("docker ps", "docker build ."),
        ("npm run lint", "npm run build"),
        ("tail -5 log", "tail -f log"),
        ("tar tf a.tar", "tar cf a.tar a"),
        ("tar czf a.tgz a", "tar -c -f a.txz --xz a"),
        ("git clone ../a", "git clone https://a.org/b"),
        ("cargo check", "cargo build"),
        ("pytest", "docker compose up"),
    ],
)
def test_some_commands_are_faster_than_others(faster: str, slower: str) -> None:
    assert median_s(faster) < median_s(slower)


@pytest.mark.parametrize("command", ["ls -la", "cat a", "git status", "sed -n 1,5p a"])
def test_the_most_frequent_commands_take_less_than_a_second(command: str) -> None:
    assert median_s(command) < 1


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("pytest -x", "pytest"),
        ("pytest tests/a.py -x", "pytest <path>"),
        ("pytest -k name tests/a.py", "pytest <path>::<name>"),
        ("grep -rn a /", "grep /"),
        ("tail -f log", "tail -f"),
        ("make -n all", "make all"),
        ("make -n", "make -n"),
        ("git clone ../a", "git clone <path>"),
        ("tar -cJf a.txz a", "tar -cJ"),
        ("tar --gzip --create a", "tar -cz"),
        ("pip install --help", "pip install --help"),
    ],
)
def test_arguments_that_change_the_duration_are_part_of_the_name(command: str, name: str) -> None:
    """Commands with the same name share observations, so arguments that change the duration must
    change the name."""
    assert known_command(command.split()).name == name


def test_no_command_has_two_rules() -> None:
    names = [name.strip() for _, listed in rules.COMMANDS for name in listed.split(",")]
    assert len(names) == len(set(names)) == len(rules.RULES)


@pytest.mark.parametrize("said", ["submit", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"])
def test_an_agent_that_submits_does_not_return_soon(said: str) -> None:
    assert median_s(said) > median_s("pip install a")


def test_unknown_commands_have_no_rule() -> None:
    assert known_command(["frobnicate", "-x"]) == ("frobnicate", None)
    assert known_command(["./frobnicate"]).rule is not None, "some program, at least"


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ("read_file", "web_search"),
        ("Grep", "WebFetch"),
        ("mcp__files__read_text_file", "browser_navigate"),
        ("str_replace_editor", "execute_ipython_cell"),
        ("TodoWrite", "ask_user"),
        ("screenshot", "Task"),
        ("list_dir", "spawn_agent"),
        ("search_dir", "submit"),
    ],
)
def test_some_tools_are_faster_than_others(faster: str, slower: str) -> None:
    rules = [tool_rule(name_parts(name)) for name in (faster, slower)]
    assert rules[0] is not None
    assert rules[1] is not None
    assert rules[0].median_s < rules[1].median_s


def test_an_unknown_tool_has_no_rule() -> None:
    assert tool_rule(name_parts("get_reservation_details")) is None
    assert tool_rule([]) is None


@given(WORDS.filter(bool))
def test_any_words_have_a_name_and_perhaps_a_rule(words: list[str]) -> None:
    name, arguments = split_command(words)
    assert name.split(" ")[0] == words[0][:40].split(" ")[0]
    assert len(arguments) < len(words)
    rule = known_command(words).rule
    assert rule is None or 0 < rule.median_s < math.inf
