"""Calls to the engines are sequential and bounded in number, and each failure has a message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.vllm.routes.engines import FakeClient, FakeCore
from tiered_kv.connectors.vllm.routes import engine_calls
from tiered_kv.connectors.vllm.routes.access import Refusal
from tiered_kv.connectors.vllm.routes.core_method import FAILED, METHOD, NO_CONNECTOR
from tiered_kv.connectors.vllm.routes.engine_calls import MOST_WAITING, EngineCalls

STATUS = {"ask": "status"}


def refused(core: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        asyncio.run(EngineCalls(FakeClient(core)).ask(STATUS))
    assert caught.value.sentence.endswith(".")
    return caught.value


def test_all_engines_answer() -> None:
    calls = EngineCalls(FakeClient(FakeCore({"engine": 0}, {"engine": 1})))
    assert asyncio.run(calls.ask(STATUS)) == [{"engine": 0}, {"engine": 1}]


@pytest.mark.parametrize("client", [None, FakeClient(None), FakeClient(object())])
def test_a_server_without_access_to_an_engine_reports_it(client: Any) -> None:
    with pytest.raises(Refusal) as caught:
        asyncio.run(EngineCalls(client).ask(STATUS))
    assert caught.value.status == 501


def test_engines_without_the_connector_report_it() -> None:
    assert refused(FakeCore({"engine": 0}, {"error": NO_CONNECTOR})).status == 501
    assert refused(FakeCore({"error": FAILED})).status == 500


def test_an_engine_without_the_method_is_called_once() -> None:
    """An engine without the method would log each call with a traceback, so it is not called a
    second time."""
    core = FakeCore(
        Exception(f"Call to {METHOD} method failed: 'EngineCoreProc' has no attribute '{METHOD}'")
    )
    calls = EngineCalls(FakeClient(core))
    for _ in range(3):
        with pytest.raises(Refusal) as caught:
            asyncio.run(calls.ask(STATUS))
        assert caught.value.status == 501
    assert len(core.asked) == 1


def test_a_dead_engine_is_reported_without_its_traceback() -> None:
    said = refused(FakeCore(RuntimeError("EngineCore encountered an issue at /secret/path")))
    assert said.status == 503
    assert "secret" not in said.sentence


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "PATIENCE_S", 0.01)

    async def ask() -> Refusal:
        core = FakeCore({"engine": 0})
        core.go_on.clear()
        calls = EngineCalls(FakeClient(core))
        with pytest.raises(Refusal) as caught:
            await calls.ask(STATUS)
        core.go_on.set()
        assert await calls.ask(STATUS) == [{"engine": 0}], "the next one is served"
        return caught.value

    assert asyncio.run(ask()).status == 504


def test_of_many_calls_one_runs_at_a_time_and_the_excess_is_refused() -> None:
    async def crowd() -> tuple[FakeCore, list[Any]]:
        core = FakeCore({"engine": 0})
        calls = EngineCalls(FakeClient(core))
        asked = (calls.ask(STATUS) for _ in range(10 * MOST_WAITING))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert await calls.ask(STATUS) == [{"engine": 0}], "nobody waits any more"
        return core, list(answers)

    core, answers = asyncio.run(crowd())
    assert core.at_once == 1
    refusals = [one.status for one in answers if isinstance(one, Refusal)]
    assert refusals == [429] * (9 * MOST_WAITING)
