"""Shell commands are parsed as a shell does, and arbitrary text causes no error."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given

from tests.policies.tools.adversary import MAX_PASSES, SHELL, passes, soups
from tiered_kv.policies.tools.shell import MAX_SEGMENTS, take_apart
from tiered_kv.policies.tools.wrappers import LONGEST_S, SOME_TIMES, program, seconds, unwrap


def programs(command: str) -> list[str]:
    """Return the programs that a command runs, in order."""
    return [segment.words[0] for segment in take_apart(command).segments]


def bounds(command: str) -> tuple[float, float]:
    script = take_apart(command)
    return script.least_s, script.most_s


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("make", ["make"]),
        ("cd /repo && pytest -x", ["pytest"]),
        ("make && make test || echo failed; ls\ngit status", ["make", "make", "echo", "ls", "git"]),
        ("export A=1; source .venv/bin/activate; B=2 C='3 4' pytest", ["pytest"]),
        ("pytest 2>&1 | tail -20 | grep -v ok", ["pytest"]),
        ("cat log | python report.py", ["cat", "python"]),
        ("find . -name '*.py' | xargs grep -n foo | head", ["find", "grep"]),
        ("git commit -m 'a && b; c | d'", ["git"]),
        ('echo "a; $HOME" \\; b', ["echo"]),
        ("ls # && make", ["ls"]),
        ("curl a.org/#b && ls", ["curl", "ls"]),
        ("ls \\\n  -l", ["ls"]),
        ("make > log 2>&1 < in", ["make"]),
        ("(cd a && make) | tee log", ["make"]),
        ("{ make; ls; } > log", ["make", "ls"]),
        ("[[ -f a && -d b ]] && ls", ["[[", "ls"]),
        ("if [ -f a ]; then make; elif true; then ls; else pwd; fi", ["[", "make", "ls", "pwd"]),
        ("case $x in a|b) ls;; *) make;; esac; pwd", ["ls", "make", "pwd"]),
        ("f() { make; }", ["make"]),
        ("a=(1 2 3); ls", ["ls"]),
        ("! make", ["make"]),
    ],
)
def test_segments_are_the_programs_that_run(command: str, runs: list[str]) -> None:
    assert programs(command) == runs


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("cat $(find / -name settings.py)", ["find", "cat"]),
        ('echo "$(git log "a b" | wc -l) files"', ["git", "echo"]),
        ("cat `ls *.py`", ["ls", "cat"]),
        ("diff <(sort a) <(uniq b)", ["sort", "uniq", "diff"]),
        ("x=$(make)", ["make"]),
        ("echo $((1 + (2))) '$(make)'", ["echo"]),
    ],
)
def test_substitutions_run_first(command: str, runs: list[str]) -> None:
    assert programs(command) == runs


def test_a_here_document_is_input_and_not_commands() -> None:
    write = "cat <<'EOF' > a.py && python a.py\nimport os; make\nEOF\nls"
    assert programs(write) == ["cat", "python", "ls"]
    assert programs("cat <<-A <<B\nmake\n\tA\nmake\nB\nls") == ["cat", "ls"]
    assert programs("cat <<EOF\nmake\nmake") == ["cat"], "it does not end"
    assert programs("python - <<EOF\nmake\nEOF") == ["python"]
    assert programs("cat <<< make") == ["cat"]


def test_a_shell_s_here_document_is_its_script() -> None:
    assert programs("bash <<EOF\nmake\nls\nEOF\npwd") == ["make", "ls", "pwd"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sudo -u build env A=b nice -n 5 make -j4", ("make", "-j4")),
        ("time -p stdbuf -oL pytest -x", ("pytest", "-x")),
        ("bash -lc 'cd a && pytest -x'", ("pytest", "-x")),
        ('/bin/sh -c "pytest \\"a b\\""', ("pytest", "a b")),
        ("timeout -k 5 -s KILL 30s pytest", ("pytest",)),
        ("python -m pytest -x", ("pytest", "-x")),
        ("python3.11 -W ignore -m pip install a", ("pip", "install", "a")),
        ("/usr/bin/python3 a.py", ("python", "a.py")),
        (".venv/bin/pytest -x", ("pytest", "-x")),
        ("./run.sh --all", ("./run.sh", "--all")),
        ("scripts/run.sh", ("./run.sh",)),
        ("conda run -n env python -c 1", ("python", "-c", "1")),
        ("uv run --with a pytest", ("pytest",)),
        ("poetry run python -m mypy .", ("mypy", ".")),
        ("docker exec -it -u me box bash -c 'make'", ("make",)),
        ("coverage run -m pytest a", ("pytest", "a")),
        ("eval 'make all'", ("make", "all")),
        ("nohup make", ("make",)),
        ("xargs -n 1 -P4 gcc -c < list", ("gcc", "-c")),
        ("sudo", ("sudo",)),
        ("timeout 5", ("timeout", "5")),
        ("bash run.sh a", ("bash", "run.sh", "a")),
    ],
)
def test_wrappers_are_stripped(command: str, words: tuple[str, ...]) -> None:
    (segment,) = take_apart(command).segments
    assert segment.words == words


@pytest.mark.parametrize(
    ("command", "least_s", "most_s"),
    [
        ("sleep 3", 3, 3),
        ("sleep 0.5m", 30, 30),
        ("sleep 1 2s", 3, 3),
        ("sleep 1h", 3600, 3600),
        ("sleep 2; sleep 3", 5, 5),
        ("sleep 2 && cat log | tail", 2, 2),
        ("sleep 2; make", 2, math.inf),
        ("sleep 2 | sleep 3", 3, 3),
        ("sleep 2 || sleep 3", 2, 5),
        ("if make; then sleep 3; fi", 0, math.inf),
        ("timeout 10 sleep 30", 10, 10),
        ("timeout 10 make", 0, 10),
        ("cd a && timeout 10 make 2>&1 | tail -5; echo $?", 0, 10),
        ("timeout 1m make; timeout 30 pytest", 0, 90),
        ("timeout 10 make && make test", 0, math.inf),
        ("timeout 5 bash -c 'sleep 2; make'", 2, 5),
        ("bash -lc 'cd a && sleep 2 && ls'", 2, 2),
        ("echo $(sleep 2)", 2, 2),
        ("for i in 1 2 3; do sleep 2; done", 6, 6),
        ("for i in {1..5}; do for j in a b; do sleep 1; done; done", 10, 10),
        ("for i in $(seq 3); do sleep 2; done", 0, math.inf),
        ("for i in {1..5}; do timeout 2 make; done", 0, 10),
        ("while true; do sleep 1; done", 0, math.inf),
        ("sleep infinity", LONGEST_S, LONGEST_S),
        ("sleep $N", 0, math.inf),
        ("sleep", 0, math.inf),
        ("timeout 0 make", 0, math.inf),
        ("echo hi", 0, math.inf),
        ("", 0, math.inf),
    ],
)
def test_sleep_is_exact_and_a_timeout_caps(command: str, least_s: float, most_s: float) -> None:
    assert bounds(command) == (least_s, most_s)


@pytest.mark.parametrize(
    ("command", "runs", "least_s"),
    [
        ("python server.py > log 2>&1 &", [], 0),
        ("python server.py & sleep 2; curl localhost", ["sleep", "curl"], 2),
        ("sleep 9 & sleep 1", ["sleep"], 1),
        ("cd a && make && sleep 9 &\nls", ["ls"], 0),
        ("ls; (make; sleep 9) & pwd", ["ls", "pwd"], 0),
        ("for i in 1 2; do sleep 9 & done; ls", ["ls"], 0),
        ("sleep 4 & sleep 3 & ls; wait", ["ls", "sleep", "sleep"], 4),
    ],
)
def test_commands_in_the_background_are_not_waited_for(
    command: str, runs: list[str], least_s: float
) -> None:
    """Commands in the background count only if the command waits for them."""
    assert programs(command) == runs
    assert bounds(command)[0] == least_s


def test_repetitions_of_loops_and_xargs_are_counted() -> None:
    def times(command: str) -> list[int]:
        return [segment.times for segment in take_apart(command).segments]

    assert times("for f in a b c; do make $f; ls; done; pwd") == [3, 3, 1]
    assert times("for f in a b; do for g in {1..3}; do make; done; done") == [6]
    assert times("for f in *.py; do python $f; done") == [SOME_TIMES]
    assert times("until curl a; do sleep 1; done") == [1, SOME_TIMES]
    assert times("for f in; do make; done") == []
    assert times("ls | xargs -n1 make") == times("ls | xargs -I{} make {}") == [1, SOME_TIMES]
    assert times("ls | xargs make") == [1, 1]
    assert times(r"find . -exec wc {} \; -print") == [1, SOME_TIMES]
    assert times("find . -exec wc -l {} +") == [1, 1]
    assert times("find . -exec") == [1]
    assert times("for f in {1..99999}; do for g in {1..99999}; do ls; done; done") == [10_000]


def test_what_timeout_allows_is_known_of_each_segment() -> None:
    segments = take_apart("timeout 9 bash -c 'timeout 3 make; ls' && pwd").segments
    assert [segment.most_s for segment in segments] == [3, 9, math.inf]


def test_durations() -> None:
    assert seconds("1.5") == 1.5
    assert seconds(".5h") == 1800
    assert seconds("9" * 12 + "d") == LONGEST_S
    for odd in ("", "5x", "-1", "nan", "1e3", "m", "$N", "1 2", "9" * 400):
        assert seconds(odd) is None


def test_programs_have_names_without_folders_and_versions() -> None:
    assert [program(name) for name in ("gcc-12", "/usr/bin/g++-13", "pip3", "\\ls", "bzip2")] == [
        "gcc",
        "g++",
        "pip",
        "ls",
        "bzip2",
    ]


def test_a_command_may_run_nothing() -> None:
    assert unwrap([]).words == unwrap(["A=b"]).words == unwrap(["", ""]).words == ()


@pytest.mark.parametrize(
    "wrapper", ["sudo -u", "env -C", "docker exec -w", "timeout -k", "xargs -I", "chrt", "npx -p"]
)
def test_a_wrapper_whose_last_word_is_missing_is_what_runs(wrapper: str) -> None:
    assert unwrap(wrapper.split()).words == tuple(wrapper.split())


def test_a_value_that_looks_like_the_end_of_the_options_is_a_value() -> None:
    assert unwrap(["sudo", "-u", "--", "-E", "make"]).words == ("make",)
    assert unwrap(["sudo", "-E", "--", "make"]).words == ("make",)


@given(soups(SHELL))
@example("$(" * 5000)
@example("${" * 5000)
@example(">{" * 5000)
@example("ls&" * 5000)
@example("`" * 20_000)
@example('"$(' * 5000)
@example("bash -c '" * 5000)
@example("((" * 10_000)
@example("<<a " * 5000 + "\n" + "a\n" * 5000)
@example("cat <<a\na\n" * 100_000)
@example("cat <<a\n" + "b\n" * 400_000)
@example("a;" * 20_000)
@example("for i in 1 2; do " * 3000)
@example("{ " * 20_000)
@example("sudo " * 20_000)
@example("x" * 1_000_000)
@example("echo '" + "a b " * 250_000)
@example("timeout inf sleep 1e400; sleep nan; sleep -5")
def test_no_text_makes_the_parser_raise_or_hang(command: str) -> None:
    assert passes(take_apart, command) < MAX_PASSES


def test_commands_in_the_background_count_towards_the_limit() -> None:
    last = [segment.words for segment in take_apart("make & " * (MAX_SEGMENTS - 1) + "ls").segments]
    assert last == [("ls",)]
    assert not take_apart("make & " * MAX_SEGMENTS + "ls").segments, "as for any longer command"


@given(soups(SHELL))
def test_the_lower_bound_does_not_exceed_the_upper(command: str) -> None:
    script = take_apart(command)
    assert 0 <= script.least_s <= script.most_s
    assert script.least_s <= LONGEST_S
    assert len(script.segments) <= MAX_SEGMENTS
    for segment in script.segments:
        assert segment.words
        assert segment.times > 0
