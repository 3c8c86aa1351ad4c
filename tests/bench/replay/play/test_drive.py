from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trace.records import record
from tiered_kv.bench.replay.jobs import Job, Turn
from tiered_kv.bench.replay.play.drive import INTERRUPTED, Hints, drive, request_id
from tiered_kv.bench.replay.play.forcing import XARG
from tiered_kv.bench.replay.play.sources import with_sources
from tiered_kv.bench.replay.results import JobDone, TurnDone
from tiered_kv.trace.turn_record import TurnTokens

Body = dict[str, Any]
Answers = Callable[[Body], Awaitable[Iterable[Any]]]

TWO_TURNS = (Turn((1, 2, 3), (10, 11), 0.02), Turn((4,), (12, 13, 14), 0.0))


def job(name: str = "a", salt: str = "", turns: tuple[Turn, ...] = TWO_TURNS) -> Job:
    return Job(name, salt, turns)


def spoken(body: Body) -> list[int]:
    """Tokens that the server under test says: those forced, or its own."""
    forced: list[int] = (body.get("vllm_xargs") or {}).get(XARG) or [99] * body["max_tokens"]
    return forced


def chunks(body: Body, tokens: list[int]) -> list[Body]:
    """A streamed answer as vLLM gives it, the usage in a chunk of its own at the end."""
    asked = body["logprobs"] is not None
    prompt = len(body["prompt"])
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": len(tokens),
        "total_tokens": prompt + len(tokens),
        "prompt_tokens_details": {"cached_tokens": prompt - 1},
    }
    said = [
        {
            "index": 0,
            "text": "",  # as when a character is not whole yet
            "token_ids": [token],
            "logprobs": {"token_logprobs": [-token / 10], "tokens": ["?"]} if asked else None,
            "finish_reason": None,
        }
        for token in tokens
    ]
    base = {"id": "x", "object": "text_completion", "created": 0, "model": body["model"]}
    return [{**base, "choices": [choice]} for choice in said] + [
        {**base, "choices": [], "usage": usage}
    ]


async def normal(body: Body) -> Iterable[Any]:
    return chunks(body, spoken(body))


class FakeServer:
    """Streams completions over real sockets and remembers every body."""

    def __init__(self, answer: Answers, breaks_off: bool) -> None:
        self._answer = answer
        self._breaks_off = breaks_off
        self.url = ""
        self.bodies: list[Body] = []
        self.heads: list[str] = []
        self.hung_up = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.heads.append(head)
        end = b"Content-Length: 100000" if self._breaks_off else b"Connection: close"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + end + b"\r\n\r\n")
        answering = asyncio.ensure_future(self._answer(body))
        gone = asyncio.ensure_future(reader.read())
        await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            for chunk in answering.result():
                writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if not self._breaks_off:
                writer.write(b"data: [DONE]\n\n")
        else:
            self.hung_up += 1
            answering.cancel()
        writer.close()
        gone.cancel()


@asynccontextmanager
async def served(
    answer: Answers = normal, *, breaks_off: bool = False
) -> AsyncIterator[FakeServer]:
    fake = FakeServer(answer, breaks_off)
    async with await asyncio.start_server(fake.handle, "127.0.0.1", 0) as server:
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake


def played(
    jobs: list[Job],
    answer: Answers = normal,
    *,
    hints: Hints = Hints.NONE,
    force: bool = True,
    logprobs: bool = False,
    arrivals_s: list[float] | None = None,
    on_turn: Callable[[], None] = lambda: None,
) -> tuple[tuple[JobDone, ...], list[Body]]:
    async def play() -> tuple[tuple[JobDone, ...], list[Body]]:
        async with served(answer) as server:
            at_s = arrivals_s or [0.0] * len(jobs)
            done = await drive(
                server.url,
                "m",
                jobs,
                at_s,
                hints=hints,
                force=force,
                logprobs=logprobs,
                on_turn=on_turn,
            )
            return done, server.bodies

    return asyncio.run(play())


def test_a_forced_job_says_what_was_recorded_and_its_context_grows() -> None:
    seen: list[int] = []
    (done,), bodies = played([job()], on_turn=lambda: seen.append(1))
    assert done.error is None
    assert [turn.tokens for turn in done.turns] == [(10, 11), (12, 13, 14)]
    assert [body["prompt"] for body in bodies] == [job().prompt(0), job().prompt(1)]
    assert [body["max_tokens"] for body in bodies] == [2, 3]
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in bodies)
    assert len(seen) == 2


def test_a_free_job_goes_on_from_what_the_model_said() -> None:
    (done,), bodies = played([job()], force=False)
    assert [turn.tokens for turn in done.turns] == [(99, 99), (99, 99, 99)]
    assert bodies[1]["prompt"] == [1, 2, 3, 99, 99, 4]
    assert all("vllm_xargs" not in body for body in bodies)


def test_a_turn_is_timed_and_counted() -> None:
    async def slow(body: Body) -> Iterable[Any]:
        await asyncio.sleep(0.05)
        return chunks(body, spoken(body))

    (done,), _ = played([job()], slow, arrivals_s=[0.1])
    first, second = done.turns
    assert done.began_s == 0.1
    assert 0.1 <= first.sent_s <= first.sent_s + 0.05 <= second.sent_s
    assert 0.05 <= first.ttft_s <= first.latency_s
    assert second.sent_s >= first.sent_s + first.latency_s + 0.02, "the gap was waited for"
    assert done.ended_s >= second.sent_s + second.latency_s
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (3, 2, 2)
    assert not first.logprobs


def test_logprobs_come_back_if_they_are_asked_for() -> None:
    (done,), bodies = played([job()], logprobs=True)
    assert done.turns[0].logprobs == (-1.0, -1.1)
    assert bodies[0]["logprobs"] == 0, "of what was said, and of no alternatives"


@pytest.mark.parametrize(
    ("hints", "first", "last"),
    [
        (
            Hints.KV_PARAMS,
            {"kv_transfer_params": {"job_id": "a", "is_last_step": False}},
            {"kv_transfer_params": {"job_id": "a", "is_last_step": True}},
        ),
        (
            Hints.XARGS,
            {"vllm_xargs": {"job_id": "a", "is_last_step": False, XARG: [10, 11]}},
            {"vllm_xargs": {"job_id": "a", "is_last_step": True, XARG: [12, 13, 14]}},
        ),
        (Hints.SESSION, {"session_id": "a"}, {"session_id": "a"}),
        (
            Hints.TOP_LEVEL,
            {"job_id": "a", "is_last_step": False},
            {"job_id": "a", "is_last_step": True},
        ),
        (Hints.NONE, {}, {}),
    ],
)
def test_a_job_is_named_in_one_form_and_in_no_other(hints: Hints, first: Body, last: Body) -> None:
    _, bodies = played([job()], hints=hints)
    names = ("kv_transfer_params", "vllm_xargs", "session_id", "job_id", "is_last_step")
    for body, wanted, forced in zip(bodies, (first, last), ([10, 11], [12, 13, 14]), strict=True):
        sent = {name: body[name] for name in names if name in body}
        assert sent == {"vllm_xargs": {XARG: forced}, **wanted}


def test_only_jobs_with_a_salt_send_one() -> None:
    _, bodies = played([job("a"), job("b", salt="s")])
    salts = {body["request_id"]: body.get("cache_salt") for body in bodies}
    assert salts == {"a.1": None, "a.2": None, "b.1": "s", "b.2": "s"}


def test_a_job_whose_request_fails_ends_and_the_others_go_on() -> None:
    async def picky(body: Body) -> Iterable[Any]:
        if body["request_id"] == "bad.2":
            return [{"error": {"message": "no room", "type": "e", "code": 500}}]
        return chunks(body, spoken(body))

    (good, bad), _ = played([job("good"), job("bad")], picky)
    assert good.error is None
    assert len(good.turns) == 2
    assert len(bad.turns) == 1
    assert bad.error is not None
    assert "turn 2" in bad.error
    assert "no room" in bad.error


def without(key: str) -> Answers:
    async def lacking(body: Body) -> Iterable[Any]:
        made = chunks(body, spoken(body))
        for chunk in made:
            chunk.pop(key, None)
            for choice in chunk["choices"]:
                choice.pop(key, None)
        return made

    return lacking


async def stubborn(body: Body) -> Iterable[Any]:
    return chunks(body, [99] * body["max_tokens"])


async def silent(body: Body) -> Iterable[Any]:
    return []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (without("token_ids"), "without"),
        (without("usage"), "without"),
        (silent, "without"),
        (stubborn, "forced"),
    ],
)
def test_an_answer_that_proves_nothing_is_an_error(answer: Answers, reason: str) -> None:
    (done,), bodies = played([job()], answer)
    assert done.error is not None
    assert reason in done.error
    assert len(bodies) == 1


def test_a_server_that_is_not_there_is_every_jobs_error() -> None:
    async def play() -> tuple[JobDone, ...]:
        async with served() as server:
            url = server.url
        return await drive(url, "m", [job()], [0.0], hints=Hints.NONE, force=True, logprobs=False)

    (done,) = asyncio.run(play())
    assert done.error is not None
    assert done.turns == ()


def test_an_answer_that_breaks_off_is_its_jobs_error() -> None:
    async def play() -> tuple[JobDone, ...]:
        async with served(breaks_off=True) as server:
            return await drive(
                server.url, "m", [job()], [0.0], hints=Hints.NONE, force=True, logprobs=False
            )

    (done,) = asyncio.run(play())
    assert done.error is not None
    assert done.turns == ()


def test_the_client_holds_no_job_back() -> None:
    """As many requests at once as there are jobs: nobody is answered before all have asked."""
    jobs = [job(str(number), turns=TWO_TURNS[:1]) for number in range(150)]
    waiting = 0
    everybody = asyncio.Event()

    async def together(body: Body) -> Iterable[Any]:
        nonlocal waiting
        waiting += 1
        if waiting == len(jobs):
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 300)
        return chunks(body, spoken(body))

    done, _ = played(jobs, together)
    assert [one.error for one in done] == [None] * len(jobs)
    assert [one.name for one in done] == [one.name for one in jobs]


def test_jobs_of_a_cancelled_run_come_back_unfinished() -> None:
    """One job is done, one waits for its answer, one has not begun."""

    async def play() -> tuple[tuple[JobDone, ...], int]:
        asked = asyncio.Event()

        async def hanging(body: Body) -> Iterable[Any]:
            if body["request_id"] == "hangs.2":
                asked.set()
                await asyncio.Event().wait()
            return chunks(body, spoken(body))

        async with served(hanging) as server:
            run = asyncio.create_task(
                drive(
                    server.url,
                    "m",
                    [job("done", turns=TWO_TURNS[:1]), job("hangs"), job("later")],
                    [0.0, 0.0, 3600.0],
                    hints=Hints.NONE,
                    force=True,
                    logprobs=False,
                )
            )
            await asked.wait()
            run.cancel()
            done = await run
            while not server.hung_up:
                await asyncio.sleep(0)
            return done, server.hung_up

    (done, hangs, later), hung_up = asyncio.run(play())
    assert done.error is None
    assert (hangs.error, len(hangs.turns)) == (INTERRUPTED, 1)
    assert (later.error, later.turns, later.completion_s) == (INTERRUPTED, (), 0.0)
    assert hung_up == 1, "the server was told to stop"


def test_a_failing_callback_is_not_a_jobs_error() -> None:
    def fail() -> None:
        raise LookupError("of the caller's")

    with pytest.raises(LookupError):
        played([job(), job("b")], on_turn=fail)


def test_as_many_arrivals_as_jobs_are_asked_for() -> None:
    with pytest.raises(ValueError, match="1 jobs, but 2 arrivals"):
        played([job()], arrivals_s=[0.0, 1.0])


def traced(request: str, arrived: float, vram: int, cpu: int, ssd: int) -> str:
    tokens = TurnTokens(100, vram, cpu, ssd, 100 - vram - cpu - ssd)
    return record(request=request, arrived=arrived, tokens=tokens).to_line()


def test_sources_are_read_in_the_trace_by_the_requests_names(tmp_path: Path) -> None:
    turns = tuple(TurnDone(n, 0, 0, 0, 100, 0, 1) for n in (1, 2))
    job = JobDone("a", 0, 1, turns)
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
    (told,) = with_sources([job], trace)
    assert told.turns[0].sources == {"vram": 40, "cpu": 20, "ssd": 10, "recomputed": 30}
    assert told.turns[1].sources == {}, "its line was cut off"


@pytest.mark.parametrize("named", [True, False])
def test_a_router_reads_a_job_s_name_in_a_header(named: bool) -> None:
    async def heads() -> list[str]:
        async with served(normal) as server:
            await drive(
                server.url,
                "m",
                [job("my-job")],
                [0.0],
                hints=Hints.NONE,
                force=True,
                logprobs=False,
                session_header=named,
            )
            return server.heads

    found = asyncio.run(heads())
    assert len(found) == 2
    assert all(("x-session-id: my-job\r\n" in head) == named for head in found)
