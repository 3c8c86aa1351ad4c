"""A real server with the connector over HTTP, as seen by clients and operators."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import httpx
import pytest

from tests.e2e.asking import EVENT_S, ask, count, job, metric, tick, trace, usage_in_gap
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer
from tiered_kv.trace.turn_record import StoryEnd, TurnRecord

pytestmark = pytest.mark.e2e


def drain(client: httpx.Client) -> None:
    """Release the pins of earlier tests."""
    deadline = time.monotonic() + EVENT_S
    while usage_in_gap(client) > 0 and time.monotonic() < deadline:
        client.post("/reset_prefix_cache").raise_for_status()


def test_the_connector_is_found_by_name_and_reports_its_content(server: VllmServer) -> None:
    log = server.log_text()
    assert "CPU tier of rank 0: " in log
    assert "TieredContinuumConnector" in log


def test_a_five_turn_job_holds_its_blocks_until_its_last_turn(client: httpx.Client) -> None:
    drain(client)
    context = texts(client, 1, 400)[0][:300]
    held = []
    for turn in range(1, 6):
        answer = ask(client, context, **job("five", last=turn == 5))["choices"][0]
        context = context + answer["token_ids"] + [700 + turn * 100 + i for i in range(80)]
        first, second = usage_in_gap(client), usage_in_gap(client)
        assert first == second, "constant through the gap while pinned"
        held.append(first)
    assert held[:4] == sorted(set(held[:4])), "rises turn by turn"
    assert held[0] > 0
    assert held[4] == 0, "nothing is held after the last turn"
    assert count(client, "pins_ended_returned") >= 4


def test_a_turn_that_ends_with_a_stop_string_is_pinned(client: httpx.Client) -> None:
    """The API server detects stop strings and aborts the request, so the engine sees an abort. The
    turn is still pinned."""
    drain(client)
    context = texts(client, 1, 400)[0][:300]
    said = ask(client, context, max_tokens=12, **job("before", last=True))["choices"][0]["text"]
    word = said.split()[2]
    answer = ask(client, context, max_tokens=100, stop=[word], **job("stops"))["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert word not in answer["text"]
    assert usage_in_gap(client) > 0, "its context is pinned"
    ask(client, context + answer["token_ids"], **job("stops", last=True))
    assert usage_in_gap(client) == 0


def test_a_pinned_context_survives_rivals_that_evict_an_unpinned_one(
    client: httpx.Client, server: VllmServer
) -> None:
    drain(client)
    pinned, unpinned = (text[:1000] for text in texts(client, 2, 1000))
    ask(client, unpinned, max_tokens=1, **job("one-off", last=True))
    ask(client, pinned, max_tokens=1, **job("holder"))
    # On a slow machine these requests take longer than a pin lasts, so the job's own turns renew
    # it.
    for i in range(9):
        ask(client, [(i * 1500 + j) % 40_000 + 50 for j in range(700)], max_tokens=1)
        ask(client, pinned, max_tokens=1, **job("holder"))
    last = ask(client, pinned, max_tokens=1, **job("holder", last=True))
    again = ask(client, unpinned, max_tokens=1, **job("once more", last=True))

    def last_of(job: str, found: list[TurnRecord]) -> TurnRecord | None:
        return next((one for one in reversed(found) if one.job == job), None)

    found = trace(server, lambda found: last_of("once more", found) is not None)
    held, evicted = last_of("holder", found), last_of("once more", found)
    assert held is not None
    assert evicted is not None
    assert held.tokens.vram >= 992, last
    assert evicted.tokens.vram < 500, again
    assert evicted.tokens.cpu > 400, "what left VRAM came back from CPU memory"


BAD: list[Any] = [
    {"job_id": {"a": 1}},
    {"job_id": "x" * 10_000_000},
    {"job_id": "j", "is_last_step": "perhaps"},
    {"job_id": "j", "ttl": -3, "unknown": [None]},
    {"is_last_step": True},
    {"job_id": 3.5},
]


def test_invalid_hints_disturb_no_request(client: httpx.Client, server: VllmServer) -> None:
    ignored = count(client, "hints_ignored")
    for hints in BAD:
        assert ask(client, [1, 2, 3], kv_transfer_params=hints)["choices"]
    tick(client)
    assert count(client, "hints_ignored") - ignored >= len(BAD) - 1
    server.check()


def test_two_concurrent_turns_of_a_job_are_served(client: httpx.Client) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, client, [900 + i] * 40, 12, **job("twice")) for i in range(2)]
        assert all(future.result()["choices"] for future in asked)
    ask(client, [7, 8, 9], **job("twice", last=True))


def test_a_chat_answer_reports_the_sources_of_its_prompt(client: httpx.Client) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "temperature": 0,
        **job("chat", last=True),
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    told = answer["kv_transfer_params"]["tiered_kv"]
    parts = told["vram_tokens"] + told["cpu_tokens"] + told["recomputed_tokens"]
    assert parts == told["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_resets_pause_and_sleep_work_while_pins_and_saves_are_pending(
    client: httpx.Client,
) -> None:
    prompt = texts(client, 1, 600)[0]
    for path in ("/reset_prefix_cache", "/pause", "/sleep?level=0"):
        ask(client, prompt, **job("resting"))  # pinned for two seconds, while its tail is saved
        answer = client.post(path)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        if path == "/pause":
            client.post("/resume").raise_for_status()
        if path.startswith("/sleep"):
            client.post("/wake_up").raise_for_status()
        assert ask(client, prompt, **job("resting", last=True))["choices"]
    assert count(client, "resets") >= 1
    assert count(client, "pins_ended_reset") >= 1


def test_a_client_that_disconnects_leaves_nothing_behind(
    client: httpx.Client, server: VllmServer
) -> None:
    body = {"model": MODEL_NAME, "prompt": [5] * 300, "max_tokens": 400, "stream": True}
    last = job("gone", last=True)
    with client.stream("POST", "/v1/completions", json={**body, **last}) as stream:
        next(stream.iter_lines())
    for _ in range(50):
        tick(client)
        if metric(client, "vllm:num_requests_running") == 0:
            break

    def aborted(found: list[TurnRecord]) -> bool:
        return any((one.job, one.finish) == ("gone", "FINISHED_ABORTED") for one in found)

    assert aborted(trace(server, aborted))


def test_the_tool_call_of_an_answer_is_read_and_its_gap_observed(
    client: httpx.Client, server: VllmServer
) -> None:
    """The client names no job and no tool. The connector infers the job from the prompt, and the
    tool from the answer."""
    answer = "I wait for it.\n\n```bash\ncd /src && sleep 1.5\n```"
    chat = [{"role": "user", "content": "Is the server up? " + "Look at its log. " * 40}]
    body = {"model": MODEL_NAME, "max_tokens": 60, "temperature": 0}
    forced = {**body, "structured_outputs": {"choice": [answer]}}
    for _ in range(3):  # the third turn completes the second turn's record
        response = client.post("/v1/chat/completions", json={**forced, "messages": chat})
        response.raise_for_status()
        said = response.json()["choices"][0]["message"]["content"]
        assert said == answer
        chat += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "It printed nothing. Look again."},
        ]
        for _ in range(3):
            tick(client)

    def read(one: TurnRecord) -> bool:
        return one.tool[:2] == ("bash", "sleep")

    first, second = filter(read, trace(server, lambda found: sum(map(read, found)) == 2))
    assert first.tool[:2] == ("bash", "sleep")
    assert first.decision.q50_s is not None
    assert first.decision.q50_s >= 1.5, "it sleeps that long"
    assert (first.job, first.turn, second.turn) == (second.job, 1, 2)
    assert first.gap.end is second.gap.end is StoryEnd.RETURNED


def test_at_the_end_nothing_is_held_and_no_hook_has_failed(
    client: httpx.Client, server: VllmServer
) -> None:
    drain(client)
    assert usage_in_gap(client) == 0
    assert count(client, "pinned_blocks") == 0
    assert count(client, "hook_errors") == 0
    assert count(client, "save_failures") == count(client, "restore_failures") == 0
    server.check()
