"""The method that the plugin adds to vLLM's engine core, called as vLLM calls it: by name and
through vLLM's own messages.

The tests call the vLLM internals on which the method depends, so they fail if a vLLM version
changes them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient, DPAsyncMPClient, DPLBAsyncMPClient
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.runtime.conftest import MakeRig
from tests.vllm.test_other_connectors import inside, other
from tiered_kv.connectors.vllm import plugin
from tiered_kv.connectors.vllm.routes import core_method
from tiered_kv.connectors.vllm.routes.core_method import METHOD, half_of
from tiered_kv.connectors.vllm.routes.engine_calls import EngineCalls
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig

STATUS = {"ask": "status"}


@pytest.fixture(autouse=True)
def method() -> None:
    plugin.register()


def core_of(rig: Rig) -> Any:
    """Return vLLM's engine core around a rig's scheduler, without a process of its own."""
    core = object.__new__(EngineCoreProc)
    core.scheduler = rig.scheduler
    core.output_queue = queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    return core


def call(core: Any, question: Any) -> dict[str, Any]:
    """Return the answer to a call through vLLM's own dispatch, as vLLM's client receives it."""
    dispatch = core._handle_client_request  # noqa: SLF001 - pinned here
    dispatch(EngineCoreRequestType.UTILITY, (0, 7, METHOD, (question,)))
    client, outputs = core.output_queue.get_nowait()
    assert client == 0
    bufs = MsgpackEncoder().encode(outputs)
    got = MsgpackDecoder(EngineCoreOutputs).decode(bufs).utility_output
    assert got.call_id == 7
    assert got.failure_message is None
    said: dict[str, Any] = json.loads(got.result.result)
    return said


def test_the_plugin_adds_one_method_and_adds_it_once() -> None:
    before = set(vars(EngineCore))
    plugin.register()
    assert set(vars(EngineCore)) == before
    assert [name for name in before if "tiered" in name] == [METHOD]


def test_a_call_reaches_the_scheduler_side(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.ask("t1", text(50, seed=1), params={"job_id": "j"})
    core = core_of(rig)
    assert half_of(core) is rig.half
    assert call(core, STATUS)["jobs"]["known"] == 1
    (job,) = call(core, {"ask": "job", "id": "j"})["jobs"]
    assert (job["id"], job["state"]) == ("j", "waiting")
    assert rig.count("hook_errors") == 0


def test_the_connector_is_found_inside_multi_connector(make_rig: MakeRig) -> None:
    rig = make_rig(around=inside(other("Producer")))
    assert call(core_of(rig), STATUS)["steps"] == rig.steps


def test_an_engine_without_the_connector_reports_it(make_rig: MakeRig) -> None:
    assert call(core_of(make_rig(extra=None)), STATUS) == {"error": core_method.NO_CONNECTOR}


@pytest.mark.parametrize("nonsense", [None, [], "status", {"ask": ["x"]}, {"ask": "jobs"}])
def test_no_question_raises_an_exception_in_the_engine(make_rig: MakeRig, nonsense: Any) -> None:
    rig = make_rig()
    assert call(core_of(rig), nonsense) == {"error": core_method.FAILED}
    assert rig.count("hook_errors") == 1


def test_a_failure_is_logged_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_method, "_failures", set[str]())
    rig = make_rig()

    def broken() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.half.stats, "gauges", broken)
    core = core_of(rig)
    with caplog.at_level(logging.ERROR):
        for _ in range(50):
            assert call(core, STATUS) == {"error": core_method.FAILED}
    # The package's log records also go to vLLM's handlers, so caplog may have the same record
    # twice.
    assert len({one for one in caplog.records if one.name == core_method.__name__}) == 1
    monkeypatch.undo()
    assert call(core, STATUS)["counters"]["hook_errors"] == 50


def test_an_engine_that_has_lost_its_scheduler_answers_with_a_value() -> None:
    core = object.__new__(EngineCoreProc)
    core.output_queue = queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    assert call(core, STATUS) == {"error": core_method.FAILED}


def test_names_that_are_not_valid_unicode_are_returned_unchanged(make_rig: MakeRig) -> None:
    """A job name with half of a surrogate pair reaches the client unchanged. vLLM's output thread
    would stop at such a string, because it cannot be encoded."""
    rig = make_rig()
    name = "a/b\n\x00 \ud800 ü 🎉 </script>"
    rig.ask("t1", text(50, seed=1), params={"job_id": name})
    core = core_of(rig)
    assert call(core, {"ask": "jobs", "limit": 5, "after": [0, 0]})["jobs"][0]["id"] == name
    assert call(core, {"ask": "job", "id": name})["jobs"][0]["id"] == name


@pytest.mark.parametrize("kind", [AsyncMPClient, DPAsyncMPClient, DPLBAsyncMPClient])
def test_every_client_of_vllm_reaches_every_engine(
    make_rig: MakeRig, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of vLLM's clients builds its real messages; only its sockets are replaced. Both engines
    receive the question and answer it."""
    cores = {b"\x00\x00": core_of(make_rig()), b"\x01\x00": core_of(make_rig())}
    client: Any = object.__new__(kind)
    client.core_engines, client.client_index = list(cores), 0
    client.core_engine = client.core_engines[0]
    client.utility_results, client.encoder = {}, MsgpackEncoder()

    async def send(message: Any, engine: bytes, *_: Any) -> None:
        kind, *frames = message
        assert kind == EngineCoreRequestType.UTILITY.value
        _, call_id, name, args = msgspec.msgpack.decode(frames[0])
        assert name == METHOD
        said = json.dumps({**call(cores[engine], *args), "asked": engine.hex()})
        client.utility_results.pop(call_id).set_result(said)

    monkeypatch.setattr(client, "_send_input_message", send)
    monkeypatch.setattr(client, "_ensure_output_queue_task", lambda: None)

    class Server:
        engine_core = client

    answers = asyncio.run(EngineCalls(Server).ask(STATUS))
    assert [said["asked"] for said in answers] == ["0000", "0100"]
