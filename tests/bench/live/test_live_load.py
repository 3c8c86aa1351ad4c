"""Loads on a server that speaks OpenAI's API: what it is asked, by whom, and when."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tests.bench.live.stub_server import Body, StubServer, common, prompt_of, running
from tiered_kv.bench.agents.openai_client import open_client
from tiered_kv.bench.live.chat_client import Api, ChatClient
from tiered_kv.bench.live.live_load import Arriving, LivePlayer, Load, Material, Played, arrivals_s
from tiered_kv.bench.replay.play.drive import Hints
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn

AGENT = SimJob("agent", 0.0, (SimTurn(0, 7, 2, 0.0),))
TURNS = (
    SimTurn(0, 40, 3, 0.0, tool="ls", agents=(AGENT, AGENT)),
    SimTurn(43, 10, 3, 0.0),
    SimTurn(28, 5, 2, 0.0),  # compacted
)
JOB = SimJob("job", 0.0, TURNS)
ONE_LOOK = Load(Arriving.SESSIONS, 1, 1e-9)
"""One job: another would begin later than that."""


def play(
    server: StubServer,
    *jobs: SimJob,
    load: Load = ONE_LOOK,
    material: Material | None = None,
    api: Api = Api.CHAT,
    hints: Hints = Hints.KV_PARAMS,
    plain: bool = False,
) -> Played:
    async def played() -> Played:
        async with open_client(server.url, "key") as client:
            chat = ChatClient(client, "stub", api, hints, plain)
            return await LivePlayer(chat, material or Material("n1", 1.0)).play(jobs, load, 0)

    return asyncio.run(played())


def by_job(server: StubServer) -> dict[str, list[Body]]:
    found: dict[str, list[Body]] = defaultdict(list)
    for body in server.bodies:
        found[body["kv_transfer_params"]["job_id"]].append(body)
    return found


@pytest.mark.parametrize("api", Api)
def test_a_prompt_grows_by_the_answer_and_what_the_turn_adds(api: Api) -> None:
    with running(StubServer()) as server:
        (done,) = play(server, JOB, api=api).jobs
    assert done.error is None
    first, second, third = (prompt_of(body).split() for body in by_job(server)["n1-job"])
    assert len(first) == 40
    assert second[:39] == first[:39], "the last word may run into the answer"
    assert " ".join(second[39:]).count("yes") == 3, "what the server said"
    assert 52 <= len(second) <= 53
    kept = common(third, second)
    assert 22 <= kept <= 30, "half of the context, which was compacted"
    assert [turn.prompt_tokens for turn in done.turns] == [40, len(second), len(third)]
    assert done.turns[1].cached_tokens >= 39


def test_the_server_is_told_the_job_its_tool_and_its_last_turn() -> None:
    with running(StubServer()) as server:
        play(server, JOB)
    said = [body["kv_transfer_params"] for body in by_job(server)["n1-job"]]
    assert [one["is_last_step"] for one in said] == [False, False, True]
    assert said[0]["tool_command"] == "ls"
    assert "tool_command" not in said[1]
    assert all(body["ignore_eos"] for body in server.bodies)
    assert {header["x-session-id"] for header in server.headers} == {"n1-job", "n1-agent"}


def test_a_plain_request_has_nothing_that_openai_does_not_know() -> None:
    with running(StubServer()) as server:
        play(server, JOB, plain=True)
    known = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    assert {key for body in server.bodies for key in body} == known
    assert not any("x-session-id" in header for header in server.headers)


def test_sub_agents_run_between_their_turns() -> None:
    with running(StubServer(takes_s=0.02)) as server:
        played = play(server, JOB)
    (done,) = played.jobs
    assert [agent.name for agent in played.agents] == ["agent", "agent"]
    for agent in played.agents:
        assert agent.began_s >= done.turns[0].sent_s + done.turns[0].latency_s
        assert agent.ended_s <= done.turns[1].sent_s


def test_so_many_sessions_are_live_until_the_time_is_over() -> None:
    jobs = tuple(SimJob(f"job-{at}", 0.0, (SimTurn(0, 5, 1, 0.0),)) for at in range(2))
    with running(StubServer(takes_s=0.02)) as server:
        played = play(server, *jobs, load=Load(Arriving.SESSIONS, 3, 0.5))
    assert server.most_at_once == 3
    names = [job.name for job in played.jobs]
    assert len(set(names)) == len(names) > 6, "jobs come again under names of their own"
    assert all(job.error is None for job in played.jobs)


def test_a_job_that_fails_ends_with_its_error_and_the_others_go_on() -> None:
    jobs = (
        SimJob("good", 0.0, (SimTurn(0, 5, 1, 0.0),)),
        SimJob("bad", 0.0, (SimTurn(0, 5, 1, 0.0), SimTurn(6, 3, 1, 0.0))),
    )
    texts = {"good": ("fine",), "bad": ("fine", "poison")}
    with running(StubServer(refuses="poison")) as server:
        load = Load(Arriving.JPS, 1_000.0, 0.1)
        played = play(server, *jobs, load=load, material=Material("n1", 1.0, texts))
    errors = {job.name.partition("-copy")[0]: job.error for job in played.jobs}
    assert errors["good"] is None
    assert "this prompt is refused" in str(errors["bad"])
    assert {len(job.turns) for job in played.jobs} == {1}


def test_no_prompt_of_a_run_begins_as_one_of_another_run() -> None:
    """Or the second run of a server would find what the first one left."""
    texts = {"told": ("the same words",)}
    jobs = (SimJob("told", 0.0, (SimTurn(0, 9, 1, 0.0),)), SimJob("made", 0.0, TURNS))
    prompts: list[list[list[str]]] = []
    for nonce in ("one", "two"):
        with running(StubServer()) as server:
            load = Load(Arriving.SESSIONS, 2, 1e-9)
            play(server, *jobs, load=load, material=Material(nonce, 1.0, texts))
            prompts.append([prompt.split() for prompt in server.prompts()])
    assert all(common(one, two) <= 1 for one in prompts[0] for two in prompts[1])


def test_jobs_that_share_a_prefix_do_so_in_one_run() -> None:
    def one(name: str) -> SimJob:
        return SimJob(name, 0.0, (SimTurn(0, 30, 1, 0.0),), "system", 20)

    with running(StubServer()) as server:
        play(server, one("a"), one("b"), load=Load(Arriving.SESSIONS, 2, 1e-9))
    first, second = (prompt.split() for prompt in server.prompts())
    assert len(first) == len(second) == 30
    assert 20 <= common(first, second) <= 22


def test_one_seed_gives_the_same_arrivals_at_every_rate_only_closer_together() -> None:
    slow, fast = arrivals_s(0.5, 100.0, 3), arrivals_s(1.0, 50.0, 3)
    assert slow == pytest.approx([2 * at for at in fast])
    assert slow[0] == 0.0
    assert max(slow) < 100.0
    assert 30 <= len(slow) <= 75
    assert arrivals_s(0.5, 100.0, 4) != slow


def test_a_server_that_tells_no_tokens_is_an_error_of_the_job() -> None:
    class Silent(StubServer):
        def _chunks(self, *args: Any) -> list[Body]:
            return super()._chunks(*args)[:-1]

    with running(Silent()) as server:
        (done,) = play(server, JOB).jobs
    assert "does not tell its tokens" in str(done.error)
