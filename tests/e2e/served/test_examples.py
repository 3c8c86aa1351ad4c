"""The programs in ``examples/`` run against a real server."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.e2e.asking import trace
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
    # The small model writes no commands: whatever it writes counts as one.
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
