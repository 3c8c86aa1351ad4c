"""The programs in ``examples/`` run against a real server."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from mcp import StdioServerParameters

from tests.e2e.asking import ask, job, trace
from tiered_kv.bench.servers.vllm_server import VllmServer

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> ModuleType:
    """Import an example from its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_agent_is_one_job_whose_turns_find_their_context(
    server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, commands = load("agent"), list[str]()

    def shell(command: str) -> str:
        commands.append(command)
        return "lines: 120 " * 10

    monkeypatch.setattr(agent, "shell", shell)
    monkeypatch.setattr(agent, "STEPS", 4)
    monkeypatch.setattr(agent, "ANSWER_TOKENS", 16)
    # The small model writes no commands, so everything that it writes counts as one.
    monkeypatch.setattr(agent, "COMMAND", re.compile("(.+)"))

    agent.run(f"{server.url}/v1", "Count the lines of every file of this project. " * 20)

    found = trace(
        server, lambda turns: sum((one.job or "").startswith("agent-") for one in turns) >= 4
    )
    turns = [one for one in found if (one.job or "").startswith("agent-")]
    assert len({one.job for one in turns}) == 1
    assert [one.turn for one in turns] == [1, 2, 3, 4]
    for turn in turns[1:]:
        assert turn.tokens.recomputed < turn.tokens.prompt / 2
    assert turns[-1].decision.tier == "drop"
    assert commands


def test_rollouts_share_kv_within_a_policy_and_never_across(
    server: VllmServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_loop = load("rl_loop")
    monkeypatch.setattr(rl_loop, "VERSIONS", 2)
    monkeypatch.setattr(rl_loop, "ROLLOUTS", 2)
    monkeypatch.setattr(rl_loop, "TURNS", 2)
    monkeypatch.setattr(rl_loop, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(rl_loop, "PROMPTS", ("Compute 17 * 23. " * 40, "What day is it? " * 40))

    reports = rl_loop.train(server.url)
    again = rl_loop.rollout(client, client.get("/v1/models").json()["data"][0]["id"], 0, 0)

    def computed(report: dict[str, int]) -> float:
        return report["recomputed_tokens"] / report["prompt_tokens"]

    for policy in reports:
        assert all(computed(turns[1]) < 0.5 for turns in policy)
        for prompt in (policy[:2], policy[2:]):
            assert max(computed(turns[0]) for turns in prompt) > 0.8
    assert computed(again[0]) > 0.8, "no KV of old weights is left"


SERVER = """
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("build")

@server.tool()
async def build(files: int, ctx: Context) -> str:
    for file in range(1, files + 1):
        await ctx.report_progress(file, files)
    return f"built {files}"

server.run()
"""


def test_the_progress_of_an_mcp_server_reaches_its_jobs_gap(
    server: VllmServer,
    client: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mcp_progress = load("mcp_progress")
    monkeypatch.setattr(mcp_progress, "EVERY_S", 0.0)
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    command = StdioServerParameters(command=sys.executable, args=[str(program)])
    ask(client, list(range(300)), **job("mcp"))

    result = asyncio.run(mcp_progress.call_tool(server.url, "mcp", command, "build", {"files": 2}))
    absent = asyncio.run(mcp_progress.call_tool(server.url, "gone", command, "build", {"files": 1}))

    assert result.content[0].text == "built 2"
    assert absent.content[0].text == "built 1"
    told = capsys.readouterr().out.splitlines()
    assert [line.partition("}")[0] for line in told] == [
        "{'progress': 1.0, 'total': 2.0",
        "{'progress': 2.0, 'total': 2.0",
        "{'done': True",
        "{'progress': 1.0, 'total': 1.0",
        "{'done': True",
    ]
    assert ["'accepted'" in line for line in told] == [True] * 3 + [False] * 2
    assert all("'missing'" in line for line in told[3:])
