"""Ways to send a KV hint, and checks of its effect by the server's own reports.

A ``Sender`` sends one hint, either as a call of a route or with a turn of a job. ``play`` sends
each intent that a sender can carry, to jobs of its own, and checks the effects.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote

import httpx

from tiered_kv.bench.servers.vllm_server import MODEL_NAME
from tiered_kv.metrics import hint_event
from tiered_kv.policies.jobs.kv_hints import Intent, Outcome

JSON_TYPE = {"Content-Type": "application/json"}
FINAL_S = 30.0
"""Longest wait for the final outcome of a deferred hint, and for copies to finish, seconds."""
POLL_S = 0.02
PIN_S, RETAIN, TOOL_S = 120.0, "10m", 300.0
TERMS: Mapping[Intent, Mapping[str, object]] = {
    Intent.RETAIN: {"ttl": RETAIN},
    Intent.PIN: {"ttl_s": PIN_S},
    Intent.REVISE: {"expected_tool_s": TOOL_S},
}
"""Fields of a hint in addition to its target, by intent. Intents without such fields are missing.
"""
TURN_ENDS = (Intent.RETAIN, Intent.PIN, Intent.DEMOTE)
"""Intents of hints that, if a turn carries them, apply to that turn's own job."""
DONE = (Outcome.ACCEPTED, Outcome.CLIPPED)


class Server:
    """Client of one server, which sends requests and hints, and reads the server's status.

    Args:
        http: HTTP client with the server's address.

    Attributes:
        results: all results that the server has reported.
        route_s: duration of each call that carried hints, seconds.
    """

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.results: list[Mapping[str, Any]] = []
        self.route_s: list[float] = []
        self._ticks = 0

    # -- what the server shows --------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """Return the status of the server's only engine."""
        found: Mapping[str, Any] = self.http.get("/tiered_kv/status").raise_for_status().json()
        (engine,) = found["engines"]
        return dict(engine)

    def job(self, name: str) -> Mapping[str, Any] | None:
        """Return the job with this name; None if the server does not list it."""
        answer = self.http.get(f"/tiered_kv/jobs/{quote(name, safe='')}")
        return None if answer.status_code == 404 else answer.raise_for_status().json()["jobs"][0]

    def jobs(self) -> dict[str, Mapping[str, Any]]:
        """Return all jobs by name, at most 1,000."""
        found = self.http.get("/tiered_kv/jobs?limit=1000").raise_for_status().json()
        return {one["id"]: one for one in found["jobs"]}

    # -- requests ---------------------------------------------------------------------

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request. Returns its answer.

        Raises:
            RuntimeError: the server refused the request.
        """
        answer = self.http.post(path, json={"model": MODEL_NAME, **body})
        if answer.is_error:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        found: Mapping[str, Any] = answer.json()
        return found

    def turn(
        self, job: str, prompt: Sequence[int], *, salt: str | None = None, **params: object
    ) -> Mapping[str, Any]:
        """Send a turn of a job, with ``params`` as further ``kv_transfer_params``. Returns the
        connector's report."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        body["kv_transfer_params"] = {"job_id": job, **params}
        return self.report(self.post("/v1/completions", body))

    def report(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the connector's report in an answer, and add its hint results to ``results``."""
        found: Mapping[str, Any] = answer["kv_transfer_params"]["tiered_kv"]
        self.results += found.get("hints", ())
        return found

    def call(self, method: str, path: str, **more: Any) -> list[Mapping[str, Any]]:
        """Call a route that carries hints, and record the call's duration. Returns the results of
        the hints.

        Raises:
            RuntimeError: the server refused the call.
        """
        began = time.perf_counter()
        answer = self.http.request(method, path, **more)
        self.route_s.append(time.perf_counter() - began)
        if answer.is_error:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        results: list[Mapping[str, Any]] = answer.json()["results"]
        self.results += results
        return results

    def hint(self, intent: str, salt: str | None = None, **payload: object) -> Mapping[str, Any]:
        """Send a hint to ``POST /tiered_kv/hints``. Returns its result."""
        body: dict[str, Any] = {"actions": [{"action_type": intent, "payload": payload}]}
        if salt is not None:
            body["cache_salt"] = salt
        (result,) = self.call("POST", "/tiered_kv/hints", json=body)
        return result

    def finish(self, intent: Intent, payload: Mapping[str, object]) -> int:
        """Send a hint to ``POST /tiered_kv/hints``, and wait until it has been carried out. Returns
        the number of pages in its result, or 0 if the result has none.

        Raises:
            RuntimeError: the hint was not carried out.
        """
        before = self.status()["counters"]
        result = self.hint(intent, None, **payload)
        outcome = final(self, intent, result, before)
        if outcome not in DONE:
            raise RuntimeError(f"{intent} of {str(payload)[:80]} was {outcome}: {result}")
        return int(result.get("pages", 0))

    def fill_vram(self) -> None:
        """Send a request that takes nearly all blocks of VRAM, to evict other KV from VRAM."""
        vram = next(one for one in self.status()["tiers"] if one["tier"] == "vram")
        tokens = (vram["blocks"] - 3) * vram["block_tokens"]
        self.turn("filler", [9 + at % 40_000 for at in range(tokens)], is_last_step=True)

    def settle(self) -> Mapping[str, Any]:
        """Wait until no copy is in flight. Returns the counters and gauges.

        Raises:
            TimeoutError: copies do not finish.
        """
        until = time.monotonic() + FINAL_S
        while time.monotonic() < until:
            self._ticks += 1
            prompt = [400 + self._ticks % 1_000]
            self.turn("tick", prompt, is_last_step=True)  # an idle engine receives no reports
            found = self.status()
            if not found["queues"]["orders_in_flight"]:
                return {**found["counters"], **found["gauges"]}
            time.sleep(POLL_S)
        raise TimeoutError(f"copies did not finish within {FINAL_S:g} s")


def final(
    server: Server, intent: Intent, result: Mapping[str, Any], before: Mapping[str, float]
) -> str:
    """Return the final outcome of a hint; ``DEFERRED`` if the final outcome is not known within
    ``FINAL_S`` seconds. The server counts a deferred hint again with its final outcome.

    Args:
        result: the server's answer to the hint.
        before: counters before the hint was sent. No other hint with this intent may be in
            progress.
    """
    outcome = str(result["outcome"])
    if outcome != Outcome.DEFERRED:
        return outcome
    until = time.monotonic() + FINAL_S
    others = [one.value for one in Outcome if one is not Outcome.DEFERRED]
    while time.monotonic() < until:
        now = server.status()["counters"]
        for one in others:
            name = hint_event(intent.value, one)
            if now[name] > before[name]:
                return one
        time.sleep(POLL_S)
    return outcome


# -- transports -----------------------------------------------------------------------


def envelope(intent: Intent, payload: Mapping[str, object]) -> dict[str, Any]:
    """Return a KV hint envelope with one action, in the format of vLLM and SGLang."""
    action = {
        "action_id": f"bench-{intent}",
        "action_type": f"kv.{intent}",
        "action_version": "1.0",
        "payload": payload,
    }
    return {"protocol_version": "0.1", "message_id": "bench", "actions": [action]}


@dataclass(frozen=True)
class Sender(ABC):
    """A transport of hints.

    Attributes:
        name: the transport.
        intents: intents that the transport can carry.
    """

    name: str
    intents: Sequence[Intent] = tuple(Intent)
    with_turn: ClassVar[bool] = True
    """True if a turn of a job carries the hint."""

    @abstractmethod
    def send(
        self, server: Server, job: str, prompt: Sequence[int], intent: Intent, target: str | None
    ) -> Mapping[str, Any]:
        """Send a hint. Returns its result.

        Args:
            job, prompt: the turn that carries the hint; unused if no turn carries it.
            target: the job that the hint is about; None for the turn's own job.
        """


def payload_of(intent: Intent, target: str | None) -> dict[str, object]:
    """Return the payload of an action: the intent's ``TERMS``, and the target if it is not None."""
    return {**TERMS.get(intent, {}), **({"job_id": target} if target is not None else {})}


@dataclass(frozen=True)
class Message(Sender):
    """Transport of a KV hint envelope in a completions request.

    Attributes:
        fields: function that returns the request's fields for a job and an envelope.
    """

    fields: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _job, _message: {}

    def send(
        self, server: Server, job: str, prompt: Sequence[int], intent: Intent, target: str | None
    ) -> Mapping[str, Any]:
        message = envelope(intent, payload_of(intent, target))
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **self.fields(job, message)}
        (result,) = server.report(server.post("/v1/completions", body))["hints"]
        return dict(result)


@dataclass(frozen=True)
class BodyFields(Sender):
    """Transport of hints in request fields of third-party APIs, which can only request retention.
    The prompt is a text.

    Attributes:
        path: route of the request.
        body: request fields that carry the hint.
    """

    path: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)

    def send(
        self, server: Server, job: str, prompt: Sequence[int], intent: Intent, target: str | None
    ) -> Mapping[str, Any]:
        text = " ".join(f"{job} {token}" for token in prompt[: len(prompt) // 8])
        content: Any = text
        if self.path == "/v1/messages":
            control = self.body["cache_control"]
            content = [{"type": "text", "text": text, "cache_control": control}]
        talk = [{"role": "user", "content": content}]
        own = self.body if self.path != "/v1/messages" else {}
        body = {"messages": talk, "max_tokens": 1, "temperature": 0, "job_id": job, **own}
        (result,) = server.report(server.post(self.path, body))["hints"]
        return dict(result)


@dataclass(frozen=True)
class HintRoute(Sender):
    """Transport of hints by ``POST /tiered_kv/hints``."""

    with_turn: ClassVar[bool] = False

    def send(
        self, server: Server, job: str, prompt: Sequence[int], intent: Intent, target: str | None
    ) -> Mapping[str, Any]:
        message = envelope(intent, payload_of(intent, target))
        (result,) = server.call("POST", "/tiered_kv/hints", json=message)
        return result


@dataclass(frozen=True)
class JobRoute(Sender):
    """Transport of releases by ``DELETE /tiered_kv/jobs/ID``."""

    with_turn: ClassVar[bool] = False

    def send(
        self, server: Server, job: str, prompt: Sequence[int], intent: Intent, target: str | None
    ) -> Mapping[str, Any]:
        path = f"/tiered_kv/jobs/{quote(target or '', safe='')}"
        (result,) = server.call("DELETE", path)
        return result


_RETAIN = (Intent.RETAIN,)
CHAT = "/v1/chat/completions"
SENDERS: Sequence[Sender] = (
    Message(
        "kv_transfer_params.kv_hints: envelope",
        fields=lambda job, message: {"kv_transfer_params": {"job_id": job, "kv_hints": message}},
    ),
    Message(
        "kv_transfer_params.kv_hints: list",
        fields=lambda job, message: {
            "kv_transfer_params": {"job_id": job, "kv_hints": message["actions"]}
        },
    ),
    Message(
        "vllm_xargs.kv_hints: JSON",
        fields=lambda job, message: {
            "vllm_xargs": {"job_id": job, "kv_hints": json.dumps(message)}
        },
    ),
    BodyFields(
        "Anthropic: cache_control",
        _RETAIN,
        "/v1/messages",
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ),
    BodyFields("OpenAI: prompt_cache_retention", _RETAIN, CHAT, {"prompt_cache_retention": "24h"}),
    BodyFields(
        "nvext.cache_control",
        _RETAIN,
        CHAT,
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}},
    ),
    BodyFields("nvext.agent_hints", _RETAIN, CHAT, {"nvext": {"agent_hints": {"priority": 5}}}),
    BodyFields(
        "vLLM router: agentic_context",
        _RETAIN,
        CHAT,
        {"vllm_xargs": {"agentic_context": json.dumps({"kv_retention_ttl_seconds": 600})}},
    ),
    HintRoute("POST /tiered_kv/hints"),
    JobRoute("DELETE /tiered_kv/jobs/ID", (Intent.RELEASE,)),
)


# -- each intent by each transport ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """A hint that was sent, and its effect.

    Attributes:
        transport: name of the sender.
        reported: the outcome in the answer.
        outcome: the final outcome.
        seen: True if the server's state shows that the hint was carried out.
    """

    transport: str
    intent: Intent
    reported: str
    outcome: str
    seen: bool

    @property
    def executed(self) -> bool:
        """True if the hint was carried out."""
        return self.outcome in DONE and self.seen


def play(server: Server, sender: Sender, prompt: Sequence[int]) -> Iterator[Sent]:
    """Send hints for a new job, one for each intent that the transport supports. Yields the
    results.

    Args:
        prompt: the job's context. No other job may share it.
    """
    job = f"job of {sender.name}"
    server.turn(job, prompt)
    for intent in (one for one in ORDER if one in sender.intents):
        own = sender.with_turn and intent in TURN_ENDS
        if intent is Intent.PREFETCH:
            server.fill_vram()
        before = server.settle()
        at_start = server.job(job)
        if own:
            result = sender.send(server, job, prompt, intent, None)
        else:
            other = [*prompt[:3], *map(ord, f"{sender.name} {intent}")]
            result = sender.send(server, f"router of {sender.name}", other, intent, job)
        outcome = final(server, intent, result, before)
        seen = EFFECTS[intent](server, job, at_start or {}, before)
        yield Sent(sender.name, intent, str(result["outcome"]), outcome, seen)


ORDER = (
    Intent.RETAIN,
    Intent.PIN,
    Intent.REVISE,
    Intent.DEMOTE,
    Intent.PREFETCH,
    Intent.RELEASE,
)
"""Intents in the order in which they are sent. PREFETCH promotes the pages that DEMOTE moved to
SSD."""

Effect = Callable[[Server, str, Mapping[str, Any], Mapping[str, float]], bool]
"""Returns True if the server shows a hint's effect. Arguments: the server, the job's name, and the
job's row and the counters before the hint."""


def _retained(server: Server, job: str, _at: object, _before: object) -> bool:
    """Return True if the hint's result states how long the KV is retained. The server does not show
    the eviction order, so the effect itself cannot be checked."""
    return float(server.results[-1].get("until_s", 0)) > 0


def _pinned(server: Server, job: str, _at: object, _before: object) -> bool:
    answer = server.http.get(f"/tiered_kv/jobs/{quote(job, safe='')}").raise_for_status().json()
    kv = answer["jobs"][0]["kv"]
    return bool(kv["pinned_blocks"]) and kv["until"] - answer["now"] > PIN_S / 2


def _demoted(server: Server, job: str, _at: object, before: Mapping[str, float]) -> bool:
    return bool(server.settle()["ssd_pages"]) and _is_unpinned(server, job)


def _is_unpinned(server: Server, job: str) -> bool:
    found = server.job(job)
    return found is not None and not found["kv"]["pinned_blocks"]


def _prefetched(server: Server, job: str, _at: object, before: Mapping[str, float]) -> bool:
    return bool(server.settle()["pages_promoted"] > before["pages_promoted"])


def _released(server: Server, job: str, _at: object, _before: object) -> bool:
    return server.job(job) is None


def _revised(server: Server, job: str, at: Mapping[str, Any], _before: object) -> bool:
    found = server.job(job)
    return found is not None and found["forecast"] != at["forecast"]


EFFECTS: Mapping[Intent, Effect] = {
    Intent.RETAIN: _retained,
    Intent.PIN: _pinned,
    Intent.REVISE: _revised,
    Intent.DEMOTE: _demoted,
    Intent.PREFETCH: _prefetched,
    Intent.RELEASE: _released,
}
