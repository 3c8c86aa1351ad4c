"""Jobs played on a server with OpenAI's routes: the requests it receives, their times, and the
recorded results."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench.agents.stub_server import OWN, Body, StubServer, prompt_of, running
from tests.trace.records import record
from tiered_kv.bench.agents.client import Api, Ask, Hints, Reading, ask_over, open_client
from tiered_kv.bench.agents.forcing import XARG
from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.agents.player import Player, drive, request_id
from tiered_kv.bench.agents.results import JobDone, TurnDone
from tiered_kv.bench.agents.sources import with_sources
from tiered_kv.trace.turn_record import TurnTokens

TWO_TURNS = (Turn((1, 2, 3), (10, 11), 0.02), Turn((4,), (12, 13, 14), 0.0))
AGENT = Job("agent", "", (Turn((), (), 0.0, length=2, text="sub task"),))
TALK = Job(
    "talk",
    "",
    (
        Turn((), (), 0.0, tool="ls", agents=(AGENT, AGENT), length=3, text="one two three"),
        Turn((), (), 0.0, length=3, text="four five"),
        Turn((), (), 0.0, kept=0.5, length=2, text="six"),
    ),
)


def job(name: str = "a", salt: str = "", turns: tuple[Turn, ...] = TWO_TURNS) -> Job:
    return Job(name, salt, turns)


def driven(
    server: StubServer, *jobs: Job, arrivals_s: list[float] | None = None, **how: Any
) -> tuple[JobDone, ...]:
    how = {"hints": Hints.NONE, "force": True, "logprobs": False, **how}
    return asyncio.run(drive(server.url, "stub", jobs, arrivals_s or [0.0] * len(jobs), **how))


def played(server: StubServer, *jobs: Job, **how: Any) -> tuple[tuple[JobDone, ...], Player]:
    async def play() -> tuple[tuple[JobDone, ...], Player]:
        async with open_client(server.url, "stub", "key") as client:
            player = Player(client, prefix="n1-", sessions=True, **how)
            return await player.arriving((0.0, job) for job in jobs), player

    return asyncio.run(play())


def test_a_forced_job_answers_what_was_recorded_and_its_context_grows() -> None:
    seen: list[int] = []
    with running(StubServer(takes_s=0.05)) as server:
        jobs = job("a"), job("b", salt="s")
        done, other = driven(
            server,
            *jobs,
            arrivals_s=[0.1, 0.0],
            logprobs=True,
            session_header=True,
            on_turn=lambda: seen.append(1),
        )
    assert (done.name, done.error, other.name, other.error) == ("a", None, "b", None)
    assert [turn.tokens for turn in done.turns] == [(10, 11), (12, 13, 14)]
    assert done.turns[0].logprobs == (-1.0, -1.1)
    assert len(seen) == 4

    bodies = {body["request_id"]: body for body in server.bodies}
    assert bodies["a.1"]["prompt"] == jobs[0].prompt(0)
    assert bodies["a.2"]["prompt"] == jobs[0].prompt(1)
    assert [bodies[name]["max_tokens"] for name in ("a.1", "a.2")] == [2, 3]
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in server.bodies)
    assert bodies["a.1"]["logprobs"] == 0, "of the answer, and of no alternatives"
    assert {name[0]: body.get("cache_salt") for name, body in bodies.items()} == {
        "a": None,
        "b": "s",
    }
    assert {head["x-session-id"] for head in server.headers} == {"a", "b"}

    first, second = done.turns
    assert done.began_s == pytest.approx(0.1, abs=0.09)
    assert first.sent_s >= 0.1
    assert 0.05 <= first.ttft_s <= first.latency_s
    assert second.sent_s >= first.sent_s + first.latency_s + 0.02, "it waited for the gap"
    assert done.ended_s >= second.sent_s + second.latency_s
    assert (first.prompt_tokens, first.output_tokens) == (3, 2)


def test_a_free_job_continues_from_the_model_s_answer() -> None:
    with running(StubServer()) as server:
        (done,) = driven(server, job(), force=False)
    assert [turn.tokens for turn in done.turns] == [(OWN, OWN), (OWN, OWN, OWN)]
    assert not done.turns[0].logprobs
    assert server.bodies[1]["prompt"] == [1, 2, 3, OWN, OWN, 4]
    assert all("vllm_xargs" not in body for body in server.bodies)
    assert not any("x-session-id" in head for head in server.headers)


@pytest.mark.parametrize(
    ("hints", "fields"),
    [
        (Hints.KV_PARAMS, lambda last: {"kv_transfer_params": named(last)}),
        (Hints.XARGS, lambda last: {"vllm_xargs": named(last)}),
        (Hints.SESSION, lambda _: {"session_id": "a"}),
        (Hints.TOP_LEVEL, lambda last: named(last)),
        (Hints.NONE, lambda _: {}),
    ],
)
def test_a_job_is_named_in_one_form_and_in_no_other(
    hints: Hints, fields: Callable[[bool], Body]
) -> None:
    with running(StubServer()) as server:
        driven(server, job(), hints=hints)
    names = ("kv_transfer_params", "vllm_xargs", "session_id", "job_id", "is_last_step")
    for body, last, forced in zip(
        server.bodies, (False, True), ([10, 11], [12, 13, 14]), strict=True
    ):
        wanted = fields(last)
        xargs = {**wanted.pop("vllm_xargs", {}), XARG: forced}
        sent = {name: body[name] for name in names if name in body}
        assert sent == {**wanted, "vllm_xargs": xargs}


def named(last: bool) -> Body:
    return {"job_id": "a", "is_last_step": last}


@pytest.mark.parametrize("api", Api)
def test_a_prompt_of_texts_grows_by_the_answer_and_what_the_turn_adds(api: Api) -> None:
    with running(StubServer()) as server:
        ((done,), _) = played(server, TALK, api=api)
    assert done.error is None
    first, second, third = (prompt_of(body) for body in by_job(server)["n1-talk"])
    assert first == "one two three"
    assert second.split() == ["one", "two", "three", *["yes"] * 3, "four", "five"] or (
        second == "one two threeyes yes yes four five"
    )
    assert third.startswith("one two three"), "half of the context was compacted"
    assert "five" not in third
    assert third.endswith("six")
    assert done.turns[0].prompt_tokens == 3


def by_job(server: StubServer) -> dict[str, list[Body]]:
    found: dict[str, list[Body]] = defaultdict(list)
    for body in server.bodies:
        found[body["kv_transfer_params"]["job_id"]].append(body)
    return found


def test_roles_alternate_and_the_system_s_message_is_first() -> None:
    cut = replace(TALK.turns[1], kept=0.1)
    with running(StubServer()) as server:
        played(server, Job("talk", "", (replace(TALK.turns[0], agents=()), cut), "be brief"))
    first, second = (body["messages"] for body in server.bodies)
    assert first == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two three"},
    ]
    assert [one["role"] for one in second] == ["system", "user"], "the rest was compacted"


def test_the_server_gets_the_job_its_tool_and_its_last_turn_and_sub_agents_run_between() -> None:
    with running(StubServer(takes_s=0.02)) as server:
        ((done,), player) = played(server, TALK)
    told = [body["kv_transfer_params"] for body in by_job(server)["n1-talk"]]
    assert [one["is_last_step"] for one in told] == [False, False, True]
    assert [one.get("tool_command") for one in told] == ["ls", None, None]
    parents = {
        name: {one["kv_transfer_params"].get("parent_job_id") for one in bodies}
        for name, bodies in by_job(server).items()
    }
    assert parents == {"n1-talk": {None}, "n1-agent": {"n1-talk"}}
    assert {head["x-session-id"] for head in server.headers} == {"n1-talk", "n1-agent"}
    assert [agent.name for agent in player.agents] == ["agent", "agent"]
    for agent in player.agents:
        assert agent.began_s >= done.turns[0].sent_s + done.turns[0].latency_s
        assert agent.ended_s <= done.turns[1].sent_s


def test_a_plain_request_has_only_openai_s_own_fields() -> None:
    with running(StubServer()) as server:
        played(server, TALK, plain=True)
    fields = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    assert {key for body in server.bodies for key in body} == fields
    assert not any("x-session-id" in head for head in server.headers)


def test_a_fixed_number_of_sessions_is_live_until_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = (job(f"job-{at}", turns=TWO_TURNS[:1]) for at in count())
    ticks = count()
    monkeypatch.setattr(Player, "_now_s", lambda _: float(next(ticks)))

    async def play(url: str) -> tuple[JobDone, ...]:
        async with open_client(url, "stub") as client:
            return await Player(client).live(jobs, 3, 30.0)

    with running(StubServer()) as server:
        done = asyncio.run(play(server.url))
    assert len(done) > 6, "when a job ends, another one starts"
    assert [one.error for one in done] == [None] * len(done)
    assert [one.began_s for one in done] == sorted(one.began_s for one in done)
    assert max(one.began_s for one in done) <= 30


def test_a_job_whose_request_fails_ends_and_the_others_continue() -> None:
    bad = job("bad", turns=(TWO_TURNS[0], Turn((666,), (12,), 0.0)))
    with running(StubServer(refuses="666")) as server:
        good, failed = driven(server, job("good"), bad)
    assert good.error is None
    assert len(good.turns) == 2
    assert len(failed.turns) == 1
    assert failed.error is not None
    assert failed.error.startswith("turn 2 was refused: ")
    assert "this prompt is refused" in failed.error


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (StubServer(lacks=("token_ids",)), "the answer has no token ids"),
        (StubServer(lacks=("usage",)), "does not report token counts"),
        (StubServer(obeys=False), "differs from the forced tokens"),
        (StubServer(breaks_off=True), "got no answer"),
    ],
)
def test_an_answer_that_cannot_be_used_is_its_job_s_error(server: StubServer, reason: str) -> None:
    with running(server):
        (done,) = driven(server, job())
    assert done.error is not None
    assert reason in done.error
    assert done.turns == ()
    assert len(server.bodies) == 1, "nothing is sent again"


def test_the_client_holds_no_job_back() -> None:
    """The server answers no request before it has received one from each of 100 jobs. Every job
    finishes, which shows that the client sends all requests concurrently."""
    jobs = [job(str(number), turns=TWO_TURNS[:1]) for number in range(100)]
    everybody = threading.Barrier(len(jobs))

    class Together(StubServer):
        def answer(self, body: Body, headers: dict[str, str]) -> tuple[int, Body | list[Body]]:
            everybody.wait(300)
            return super().answer(body, headers)

    with running(Together()) as server:
        done = driven(server, *jobs)
    assert [one.error for one in done] == [None] * len(jobs)
    assert [one.name for one in done] == [one.name for one in jobs], "in their order"


def test_a_cancelled_run_closes_its_connections() -> None:
    until = threading.Event()

    async def cancelled(server: StubServer) -> None:
        run = asyncio.create_task(
            drive(server.url, "stub", [job()], [0.0], hints=Hints.NONE, force=True, logprobs=False)
        )
        await asyncio.to_thread(server.waits.wait)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        until.set()

    with running(StubServer(until=until)) as server:
        asyncio.run(cancelled(server))
    assert len(server.bodies) == 1


def test_a_failing_callback_is_not_a_job_s_error() -> None:
    def fail() -> None:
        raise LookupError("of the caller's")

    with running(StubServer()) as server, pytest.raises(LookupError):
        driven(server, job(), job("b"), on_turn=fail)


def test_a_turn_over_an_open_connection_is_answered_whole_or_token_by_token() -> None:
    ask = Ask(prompt=[1, 2], max_tokens=3, logprobs=1, salt="s")
    seen: list[int] = []

    def on_token(reading: Reading) -> None:
        seen.append(len(reading.tokens))

    with running(StubServer()) as server, httpx.Client(base_url=server.url) as http:
        whole = ask_over(http, "stub", ask)
        streamed = ask_over(http, "stub", ask, on_token=on_token)
        server.refuses = "1"
        with pytest.raises(httpx.HTTPStatusError):
            ask_over(http, "stub", ask)
    assert whole.tokens == streamed.tokens == (OWN,) * 3
    assert whole.logprobs == streamed.logprobs == (-OWN / 10,) * 3
    assert whole.sources["remote_tokens"] == 6
    assert streamed.sources == {}
    assert seen[:3] == [1, 2, 3]
    assert list(streamed.times) == sorted(streamed.times)
    assert server.bodies[0]["cache_salt"] == "s"


def traced(request: str, arrived: float, vram: int, cpu: int, ssd: int) -> str:
    tokens = TurnTokens(100, vram, cpu, ssd, 100 - vram - cpu - ssd)
    return record(request=request, arrived=arrived, tokens=tokens).to_line()


def test_sources_are_read_in_the_trace_by_the_requests_names(tmp_path: Path) -> None:
    turns = tuple(TurnDone(n, 0, 0, 0, 100, 0, 1) for n in (1, 2))
    trace = tmp_path / "trace.jsonl"
    first, second = (f"cmpl-{request_id('a', n)}-0-0123abcd" for n in (1, 2))
    lines = [
        traced(first, 9.0, 40, 20, 10),
        traced("cmpl-a.10-0-0123abcd", 9.0, 5, 5, 0),
        traced("chatcmpl-other", 10.0, 1, 1, 1),
        traced(first, 5.0, 1, 1, 0),
        traced(second, 11.0, 1, 1, 1)[:50],
    ]
    trace.write_text("\n".join(lines))
    (found,) = with_sources([JobDone("a", 0, 1, turns)], trace)
    assert found.turns[0].sources == {"vram": 40, "cpu": 20, "ssd": 10, "recomputed": 30}
    assert found.turns[1].sources == {}, "its line was cut off"
