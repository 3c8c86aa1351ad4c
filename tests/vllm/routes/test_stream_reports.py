"""In a streamed answer, the connector's report is in the event with the finish reason and nowhere
else. No event is delayed."""

from __future__ import annotations

import asyncio
import inspect
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.responses import StreamingResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from tiered_kv.connectors.vllm.routes.endpoints import TieredEndpoints
from tiered_kv.connectors.vllm.routes.stream_reports import listen
from tiered_kv.vllm_versions import parse_version

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
OURS = {"prompt_tokens": 90, "vram_tokens": 64, "cpu_tokens": 0, "recomputed_tokens": 26}
SAID = {"kv_transfer_params": {"tiered_kv": OURS}}
TRAP = '"finish_reason":"stop"},"kv_transfer_params":{}'


def chunk(text: str, finish: str | None = None) -> str:
    """Return a chunk as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'x', 'choices': [choice]}, separators=(',', ':'))}\n\n"


def event(name: str, **said: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **said}, separators=(',', ':'))}\n\n"


class Engine:
    """A fake engine client whose requests have one output for each given report.

    Attributes:
        closed: True if the outputs of a request were closed before their end.
    """

    def __init__(self, reports: Sequence[Any]) -> None:
        self._reports = reports
        self.closed = False

    async def generate(self, *_: Any) -> AsyncGenerator[Any, None]:
        try:
            for params in self._reports:
                await asyncio.sleep(0)
                yield SimpleNamespace(kv_transfer_params=params)
        except GeneratorExit:
            self.closed = True
            raise


def answer(
    path: str, events: Sequence[str], reports: Sequence[Any], prompts: int = 1
) -> tuple[list[str], list[int]]:
    """Return the events that a client receives, and for each the number of events that the server
    had generated when it was sent."""
    engine: Any = Engine(reports)
    app = FastAPI()
    app.state.args = Namespace(middleware=[], host="127.0.0.1")
    plugin = TieredEndpoints()
    plugin.attach_router(app)
    made = 0

    @app.post(path)
    async def ask() -> StreamingResponse:
        first, *_ = [engine.generate("prompt") for _ in range(prompts)]

        async def stream() -> AsyncGenerator[str, None]:
            nonlocal made
            at = 0
            async for _ in first:
                made += 1
                yield events[at]
                at += 1
            for rest in events[at:]:
                made += 1
                yield rest

        return StreamingResponse(stream(), media_type="text/event-stream")

    got, when = list[str](), list[int]()

    body = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in body:
            return message
        return await asyncio.Future()  # the client stays connected

    async def send(message: Any) -> None:
        if body := message.get("body"):
            got.append(body.decode())
            when.append(made)

    async def run() -> None:
        await plugin.init_state(engine, app.state, app.state.args)
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        await app(scope, receive, send)

    asyncio.run(run())
    return got, when


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_last_chunk_of_an_answer_has_the_report(path: str) -> None:
    events = [chunk("a"), chunk(TRAP), chunk("", "stop"), "data: [DONE]\n\n"]
    got, when = answer(path, events, [None, None, SAID["kv_transfer_params"]])
    assert [got[0], got[1], got[3]] == [events[0], events[1], events[3]]
    last = json.loads(got[2].removeprefix("data: "))
    assert last == {**json.loads(events[2].removeprefix("data: ")), **SAID}
    assert got[2].endswith("}\n\n")
    assert when == [1, 2, 3, 4], "each event is sent before the next is made"


def test_messages_have_the_report_in_the_event_with_the_stop_reason() -> None:
    text = event("content_block_delta", delta={"text": TRAP.replace("finish", "stop")})
    end = event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2})
    events = [event("message_start"), text, end, event("message_stop")]
    got, _ = answer(MESSAGES, events, [None, SAID["kv_transfer_params"]])
    assert [got[0], got[1], got[3]] == [events[0], events[1], events[3]]
    name, data, *rest = got[2].split("\n")
    assert (name, rest) == ("event: message_delta", ["", ""])
    said = json.loads(data.removeprefix("data: "))
    assert said["kv_transfer_params"] == SAID["kv_transfer_params"]
    assert said["usage"] == {"output_tokens": 2}


def test_text_that_looks_like_a_finish_reason_is_ignored() -> None:
    """Only the chunk with the finish reason gets the report, even if the text of the answer looks
    like a finish reason. The report may be known before that chunk."""
    events = [chunk(TRAP), chunk(TRAP, "stop"), "data: [DONE]\n\n"]
    got, _ = answer(CHAT, events, [SAID["kv_transfer_params"]])
    assert got[0] == events[0]
    said = json.loads(got[1].removeprefix("data: "))
    assert said["kv_transfer_params"] == SAID["kv_transfer_params"]
    assert said["choices"][0]["delta"]["content"] == TRAP


@pytest.mark.parametrize(
    "reports", [[None, None], [None, {}], [None, {"remote_block_ids": [1]}]], ids=str
)
def test_an_answer_without_a_report_is_left_as_it_is(reports: list[Any]) -> None:
    events = [chunk("a"), chunk("", "stop"), "data: [DONE]\n\n"]
    assert answer(CHAT, events, reports)[0] == events


@pytest.mark.parametrize(
    "last",
    [
        chunk("", "stop").replace("data: ", "data:"),
        chunk("", "stop").replace("\n\n", "\r\n\r\n"),
        chunk("", "stop") + chunk("", "stop"),
        chunk("", "stop").replace("}\n\n", ',"kv_transfer_params":null}\n\n'),
        ": keep-alive\n\n",
        'data: {"error":{"message":"no"}}\n\n',
    ],
)
def test_an_event_of_another_form_is_left_as_it_is(last: str) -> None:
    assert answer(CHAT, [last], [SAID["kv_transfer_params"]])[0] == [last]


def test_several_prompts_in_one_request_give_no_report() -> None:
    events = [chunk("", "stop"), "data: [DONE]\n\n"]
    assert answer(COMPLETIONS, events, [SAID["kv_transfer_params"]], prompts=2)[0] == events


def test_only_the_connectors_report_is_passed_on() -> None:
    params = {**SAID["kv_transfer_params"], "remote_host": "10.0.0.1"}
    got, _ = answer(CHAT, [chunk("", "stop")], [params])
    said = json.loads(got[0].removeprefix("data: "))
    assert said["kv_transfer_params"] == SAID["kv_transfer_params"]


def test_vllm_passes_the_report_with_the_outputs_of_its_engine_client() -> None:
    assert inspect.isasyncgenfunction(AsyncLLM.generate)
    assert "kv_transfer_params" in inspect.signature(RequestOutput).parameters
    client: Any = object.__new__(AsyncLLM)
    listen(client)
    assert client.generate is not AsyncLLM.generate
    outputs = client.generate("prompt", None, "id")
    assert outputs.ag_code is AsyncLLM.generate.__code__, "outside of a request nothing changes"


def test_requests_to_other_routes_are_passed_through() -> None:
    engine: Any = Engine([SAID["kv_transfer_params"]])
    listen(engine)
    listen(engine)
    assert engine.generate().ag_code is Engine.generate.__code__
    listen(None)
    listen(object())


def test_a_client_that_disconnects_ends_its_request() -> None:
    engine: Any = Engine([None, None, None])
    app = FastAPI()
    app.state.args = Namespace(middleware=[], host="127.0.0.1")
    plugin = TieredEndpoints()
    plugin.attach_router(app)
    wrapped = list[str]()

    @app.post(CHAT)
    async def ask() -> dict[str, Any]:
        outputs = engine.generate("prompt")
        wrapped.append(outputs.ag_code.co_name)
        await anext(outputs)
        await outputs.aclose()
        return {"closed": engine.closed}

    async def run() -> None:
        await plugin.init_state(engine, app.state, app.state.args)
        async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
            assert (await client.post(CHAT, json={})).json() == {"closed": True}

    asyncio.run(run())
    assert wrapped == ["_listen"], "the outputs that were listened to were closed"


# -- vLLM's own events ----------------------------------------------------------------------


def outputs(params: dict[str, Any] | None) -> Sequence[RequestOutput]:
    """Return the outputs of vLLM's engine client for an answer of two tokens."""

    def output(text: str, token: int, finish: str | None) -> RequestOutput:
        one = CompletionOutput(0, text, [token], None, None, finish_reason=finish)
        said = None if finish is None else params
        return RequestOutput(
            "x", "prompt", [1, 2], None, [one], finish is not None, kv_transfer_params=said
        )

    return output("a", 3, None), output("b", 4, "stop")


def serving(kind: type[Any]) -> Any:
    """Return one of vLLM's API servers without its engine, models and settings."""
    made = object.__new__(kind)
    made.__dict__.update(
        dict.fromkeys(
            (
                "parser_cls",
                "reasoning_parser_cls",
                "tool_parser",
                "request_logger",
                "system_fingerprint",
            )
        ),
        response_role="assistant",
        stop_reason_map={"stop": "end_turn"},  # needed up to vLLM 0.31
        **dict.fromkeys(
            (
                "enable_auto_tools",
                "enable_force_include_usage",
                "enable_log_deltas",
                "enable_log_outputs",
                "enable_per_request_metrics",
                "enable_prompt_tokens_details",
                "_include_reasoning_tokens_details",
            ),
            False,
        ),
    )
    return made


async def chat(
    params: dict[str, Any] | None, *, messages: bool = False
) -> AsyncGenerator[Any, None]:
    """Yield vLLM's chunks of a chat answer. For the messages API, since vLLM 0.33, they are objects
    that are not serialized yet."""
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}],
        model="m",
        stream=True,
        stream_options={"include_usage": True} if messages else None,
    )
    raw = messages and hasattr(OpenAIServingChat, "chat_completion_stream_generator_raw")
    server = serving(OpenAIServingChat)
    generate = "chat_completion_stream_generator" + ("_raw" if raw else "")

    async def results() -> AsyncGenerator[RequestOutput, None]:
        for one in outputs(params):
            yield one

    metadata = RequestResponseMetadata(request_id="x")
    async for chunk in getattr(server, generate)(request, results(), "x", "m", [], None, metadata):
        yield chunk


async def completion(params: dict[str, Any] | None) -> AsyncGenerator[str, None]:
    request = CompletionRequest(prompt="x", model="m", stream=True, max_tokens=2)

    async def results() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for one in outputs(params):
            yield 0, one

    server = serving(OpenAIServingCompletion)
    metadata = RequestResponseMetadata(request_id="x")
    chunks = server.completion_stream_generator(
        request, [], results(), "x", 1, "m", 1, None, metadata
    )
    async for chunk in chunks:
        yield chunk


def vllm_events(path: str, params: dict[str, Any] | None) -> list[str]:
    """Return the events that vLLM's own code writes for an answer."""

    async def all_of(events: AsyncGenerator[Any, None]) -> list[str]:
        return [event async for event in events]

    if path == COMPLETIONS:
        return asyncio.run(all_of(completion(params)))
    if path == CHAT:
        return asyncio.run(all_of(chat(params)))
    server = serving(AnthropicServingMessages)
    return asyncio.run(all_of(server.message_stream_converter(chat(params, messages=True))))


def reported(events: Sequence[str]) -> list[Any]:
    """Return the reports in events, without null values."""
    data = [line for one in events for line in one.splitlines() if line.startswith("data: {")]
    found = [json.loads(line.removeprefix("data: ")).get("kv_transfer_params") for line in data]
    assert not any("error" in line for line in data), data
    return [params for params in found if params is not None]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_vllm_s_own_events_have_the_report_once(path: str) -> None:
    """An answer has the report exactly once. Since 0.33, vLLM itself adds it, except to answers of
    the Messages API."""
    params = SAID["kv_transfer_params"]
    events = vllm_events(path, params)
    by_itself = reported(events)
    newer = parse_version(vllm.__version__) >= (0, 33)  # type: ignore[operator]
    assert by_itself == [params] * (newer and path != MESSAGES)
    got, _ = answer(path, events, [None, params])
    assert reported(got) == [params]
    if by_itself:
        assert got == events, "left as they are"
    assert reported(answer(path, vllm_events(path, None), [None, None])[0]) == []
