"""Tool calls are parsed in every model's format, and reasoning text is not mistaken for calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.policies.tools.adversary import BAR, MARKERS, MAX_PASSES, SPACE, passes, soups
from tiered_kv.policies.tools.calls import (
    MAX_CHARS,
    ToolCall,
    after_thinking,
    name_parts,
    read_tool_calls,
    tool_call,
)
from tiered_kv.policies.tools.formats import MAX_CALLS

LS = '{"command": "ls -l"}'
CALL = f'{{"name": "bash", "arguments": {LS}}}'
NESTED = json.dumps({"name": "bash", "arguments": LS})
BEGIN = f"<{BAR}tool{SPACE}call{SPACE}begin{BAR}>"
SEP = f"<{BAR}tool{SPACE}sep{BAR}>"
END = f"<{BAR}tool{SPACE}call{SPACE}end{BAR}>"
KIMI_BEGIN, KIMI_SEP, KIMI_END = (
    f"<|tool_call_{word}|>" for word in ("begin", "argument_begin", "end")
)

FORMATS = {
    "mini-swe-agent": "THOUGHT: look around.\n\n```bash\nls -l\n```\n</format_example>",
    "mini-swe-agent 2": "```mswea_bash_command\nls -l\n```<|im_end|>",
    "SWE-agent": "I look.\n<function=bash>\n<parameter=command>ls -l</parameter>\n</function>",
    "Qwen3-coder": "<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>",
    "Llama 3.1": f"<function=bash>{LS}</function>",
    "Hermes": f"I look.\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
    "Hermes, not closed": f"<tool_call>{CALL}",
    "Hermes, JSON in JSON": f"<tool_call>{NESTED}</tool_call>",
    "Llama 3": f'{{"name": "bash", "parameters": {LS}}}<|eot_id|>',
    "Llama 3, tagged": f'<|python_tag|>{{"name": "bash", "parameters": {LS}}}<|eom_id|>',
    "Llama 3.2": '[bash(command="ls -l")]<|eot_id|>',
    "Llama 4": "<|python_start|>[bash(command='ls -l')]<|python_end|>",
    "Mistral": f'[TOOL_CALLS][{{"name": "bash", "arguments": {LS}}}]</s>',
    "Mistral v11": f"[TOOL_CALLS]bash{LS}</s>",
    "Mistral v13": f"[TOOL_CALLS]bash[CALL_ID]a1B2c3D4e[ARGS]{LS}</s>",
    "DeepSeek V3": f"{BEGIN}function{SEP}bash\n```json\n{LS}\n```{END}",
    "DeepSeek V3.1": f"{BEGIN}bash{SEP}{LS}{END}",
    "DeepSeek V3.2": f'<{BAR}DSML{BAR}invoke name="bash">\n<{BAR}DSML{BAR}parameter name="command" '
    f'string="true">ls -l</{BAR}DSML{BAR}parameter>\n</{BAR}DSML{BAR}invoke>',
    "MiniMax-M2": '<minimax:tool_call><invoke name="bash"><parameter name="command">ls -l'
    "</parameter></invoke></minimax:tool_call>",
    "GLM-4.5": "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls -l</arg_value>\n"
    "</tool_call>",
    "Kimi-K2": f"{KIMI_BEGIN}functions.bash:0{KIMI_SEP}{LS}{KIMI_END}",
    "gpt-oss": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{LS}<|call|>",
    "gpt-oss, to before channel": " to=functions.bash<|channel|>commentary json"
    f"<|message|>{LS}<|call|>",
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS.keys())
def test_every_format_is_read(text: str) -> None:
    assert read_tool_calls(text) == (ToolCall("bash", {"command": "ls -l"}, "ls -l"),)


@pytest.mark.parametrize("name", [name for name in FORMATS if "gpt-oss" not in name])
def test_a_call_in_a_thought_is_not_a_call(name: str) -> None:
    text = FORMATS[name]
    assert read_tool_calls(f"<think>{text}</think>All done.") == ()
    assert read_tool_calls(f"{text}</think>All done.") == (), "the thought began before the text"
    assert read_tool_calls(f"Well. <think>{text}") == (), "the thought did not end"
    other = '<tool_call>{"name": "view", "arguments": {}}</tool_call>'
    assert read_tool_calls(f"<think>{text}</think>{other}") == (ToolCall("view"),)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
        ("<reasoning>", "</reasoning>"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>"),
    ],
)
def test_models_mark_thinking_in_their_own_ways(begin: str, end: str) -> None:
    thought = f"{begin}Perhaps ```bash\nrm -r .\n```, or not.{end}"
    assert read_tool_calls(f"{thought}Done.") == ()
    assert read_tool_calls(f"{thought}\n```bash\nls\n```")[0].command == "ls"
    assert read_tool_calls(f"{thought}\n{thought}\n```bash\nls\n```")[0].command == "ls"


def test_a_marker_in_an_argument_does_not_start_a_thought() -> None:
    """The argument of a call may contain a thinking marker, because agents also search and edit
    chat templates."""
    call = f"<tool_call>{CALL}</tool_call>".replace("ls -l", "grep '</think>' a")
    for text in (call, f"<think>Where is it?</think>{call}"):
        assert [c.command for c in read_tool_calls(text)] == ["grep '</think>' a"]
    fence = "```bash\ngrep -n '<think>' template.jinja\n```"
    assert read_tool_calls(fence)[0].command == "grep -n '<think>' template.jinja"


def test_a_call_that_a_thought_only_mentions_does_not_hide_its_end() -> None:
    text = f"<think>I could use <tool_call> now.</think><tool_call>{CALL}</tool_call>"
    assert after_thinking(text) == f"<tool_call>{CALL}</tool_call>"


def test_several_calls_are_returned_in_order() -> None:
    names = ["read", "grep", "bash"]
    calls = [f'{{"name": "{name}", "arguments": {{}}}}' for name in names]
    for text in (
        "".join(f"<tool_call>{call}</tool_call>\n" for call in calls),
        f"[TOOL_CALLS][{', '.join(calls)}]",
        f"<|python_tag|>{'; '.join(calls)}",
        "".join(f"<function={name}></function>" for name in names),
        f"[{', '.join(f'{name}()' for name in names)}]",
        "".join(f"{KIMI_BEGIN}{name}:7{KIMI_SEP}{{}}{KIMI_END}" for name in names),
    ):
        assert [call.name for call in read_tool_calls(text)] == names, text


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "It is done: all tests pass.",
        'The config is {"name": "x", "arguments": {}} by default.',
        '{"is_request_satisfied": {"answer": false}, "next_speaker": "WebSurfer"}',
        "[1, 2, 3]",
        "[see the manual](https://example.org)",
        "Either\n```bash\nmake\n```\nor\n```bash\nninja\n```\nwill do.",
        "```python\nprint(1)\n```",
        "<|channel|>analysis<|message|>```bash\nls\n```<|end|><|start|>assistant"
        "<|channel|>final<|message|>Done.<|return|>",
        "<tool_call>nothing\nto see</tool_call>",
    ],
)
def test_an_answer_without_a_call_has_none(answer: str) -> None:
    assert read_tool_calls(answer) == ()


def test_a_truncated_call_has_its_name_and_complete_strings() -> None:
    cut = '{"name": "bash", "arguments": {"command": "cat > a.py <<EOF\\nimport os\\n'
    command = "cat > a.py <<EOF\nimport os"
    assert read_tool_calls(f"<tool_call>{cut}")[0].command == command
    assert read_tool_calls(f"[TOOL_CALLS][{cut}")[0].command == command
    raw = '<tool_call>{"name": "bash", "arguments": {"command": "ls" "oops"}}</tool_call>'
    assert read_tool_calls(raw) == (ToolCall("bash", {"command": "ls"}, "ls"),)


def test_a_line_break_in_a_json_string_is_accepted() -> None:
    text = '<tool_call>{"name": "bash", "arguments": {"command": "cd a\nmake"}}</tool_call>'
    assert read_tool_calls(text)[0].command == "cd a\nmake"


def test_a_format_inside_another_s_argument_is_text() -> None:
    command = "cat <<EOF\\n[TOOL_CALLS]x{}\\n```bash\\nrm\\n```\\nEOF"
    text = f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'
    (call,) = read_tool_calls(text)
    assert call.command == command.replace("\\n", "\n")


def test_calls_in_python_are_read_and_not_run() -> None:
    shell = r"""bash(command="echo \"a, b\" | grep ')'", timeout=3)"""
    call, other = read_tool_calls(f"""[{shell}, get(ids=[1, 2], x={{"a": "(b"}})]""")
    command = """echo "a, b" | grep ')'"""
    assert call == ToolCall("bash", {"command": command, "timeout": 3.0}, command)
    assert other.arguments == {"ids": "[1, 2]", "x": '{"a": "(b"}'}
    assert read_tool_calls('<|python_tag|>brave_search.call(query="x y")') == (
        ToolCall("brave_search", {"query": "x y"}),
    )


def test_the_code_tool_of_gpt_oss_gets_its_code_unchanged() -> None:
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert read_tool_calls(text) == (ToolCall("python", {"code": "print(1)"}),)


@pytest.mark.parametrize(
    "name",
    ["bash", "Bash", "execute_bash", "run_command", "run_terminal_cmd", "local_shell", "shell",
     "container.exec", "mcp__box__run_shell_command", "execute", "exec_command", "runInTerminal"],
)  # fmt: skip
@pytest.mark.parametrize("key", ["command", "cmd", "code", "script"])
def test_a_shell_is_known_by_its_name(name: str, key: str) -> None:
    assert tool_call(name, {key: " ls -l "}).command == "ls -l"


@pytest.mark.parametrize("name", ["str_replace_editor", "python", "web_search", "run_tests", ""])
def test_other_tools_have_no_command(name: str) -> None:
    assert tool_call(name, {"command": "view", "code": "print(1)"}).command == ""


def test_a_command_may_be_a_list_of_words() -> None:
    call = tool_call("shell", {"command": ["bash", "-lc", "cd a && ls 'b c'"]})
    assert call.command == "bash -lc 'cd a && ls '\"'\"'b c'\"'\"''"
    assert tool_call("shell", {"command": ["ls -l"]}).command == "ls -l"
    odd_ones: list[object] = [None, 3, {}, [1, 2], [], True]
    for odd in odd_ones:
        assert tool_call("shell", {"command": odd}).command == ""


def test_the_words_of_a_name() -> None:
    assert name_parts("mcp__files__readTextFile") == ["read", "text", "file"]
    assert name_parts("WebSearch") == ["web", "search"]
    assert name_parts("functions.run_SQL_query2") == ["run", "sql", "query2"]


def test_a_repeating_answer_is_read_up_to_a_limit() -> None:
    assert len(read_tool_calls(f"<tool_call>{CALL}</tool_call>" * 500)) == MAX_CALLS


def test_only_the_end_of_a_text_is_read() -> None:
    call = "<tool_call>" + CALL + "</tool_call>"
    assert read_tool_calls(" " * 5_000_000 + call)
    assert read_tool_calls(call + "x" * (MAX_CHARS - len(call)))
    assert not read_tool_calls(call + "x" * (MAX_CHARS - len(call) + 1))


@given(soups(MARKERS))
@example('{"a":' * 3000)
@example("[" * 50_000)
@example("<tool_call>" + "[" * 50_000)
@example('<tool_call>["' * 5000)
@example("[TOOL_CALLS]{" * 5000)
@example('[bash(a="\\"' * 3000)
@example("<think>" * 9000 + "</think>" * 9000)
@example("```bash\n" * 8000)
@example("\ud800<tool_call>\x00")
def test_no_text_makes_the_reader_raise_or_hang(text: str) -> None:
    assert passes(read_tool_calls, text) < MAX_PASSES


@given(st.sampled_from(MARKERS), st.sampled_from(MARKERS))
def test_a_megabyte_of_markers_is_read_in_time(one: str, other: str) -> None:
    text = (one + other) * (1_000_000 // len(one + other))
    assert passes(lambda _: read_tool_calls(text), text[-MAX_CHARS:]) < MAX_PASSES


@given(
    st.sampled_from(["bash", "Read", "mcp__a__b"]),
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.text(max_size=40) | st.integers(), max_size=4
    ),
    st.text(max_size=40).filter(lambda text: "<" not in text and "[" not in text),
)
def test_what_is_written_as_json_is_read_back(
    name: str, arguments: dict[str, str | int], before: str
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    (read,) = read_tool_calls(f"{before}<tool_call>{call}</tool_call>")
    assert (read.name, read.arguments) == (name, arguments)
