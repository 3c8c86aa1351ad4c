"""Recorded requests on a real server, and the jobs that its trace reports for them.

Requests are sent one after another, so the records of the trace, sorted by arrival, are in the same
order. Prompts are generated: each prompt of an agent extends its previous one, as the client's own
prompts do.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tiered_kv.bench.servers.vllm_server import MODEL_NAME
from tiered_kv.policies.jobs.identity import BODY_FIELDS, SYSTEMS, claim
from tiered_kv.trace.turn_record import TurnRecord

from .recorded import Client, Request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
HEADERLESS = frozenset({RESPONSES, MESSAGES})
"""Paths on which vLLM's router drops the headers of clients."""
ANSWER_TOKENS = 1
FIRST_LINES, NEXT_LINES = 12, 4
TIMEOUT_S = 300.0
FOLLOWS = "previous_response_id"
SHARED = {"x-session-id": "one for all"}
"""Header of a router that gives all clients the same session."""

_IDS = (BODY_FIELDS - {*SYSTEMS, FOLLOWS}) | {
    "job_id",
    "is_last_step",
    "kv_transfer_params",
    "session_id",
    "vllm_xargs",
}
"""Body fields with ids and hints, which a client would send on any endpoint."""
_OF_MODEL = frozenset(
    {
        "context_management",
        "include",
        "max_output_tokens",
        "max_tokens",
        "model",
        "output_config",
        "parallel_tool_calls",
        "reasoning",
        "thinking",
        "tool_choice",
    }
)
"""Body fields that are removed, because they select the client's model or its capabilities, which
the small model does not have."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent.

    Attributes:
        client: name of the client.
        user: number of the client's user.
        path: endpoint.
        agent: the agent that sent the request.
        parent: the agent that started ``agent``, if the request states it; None otherwise.
    """

    client: str
    user: int
    path: str
    agent: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class Recognised:
    """Counts of requests whose job was recognised.

    Attributes:
        turns: number of requests.
        known: number of requests whose job has all requests of the agent that sent it, and no other
            agent's.
        told: number of requests that state a parent.
        parent_known: number of requests in ``told`` whose parent is the right job.
    """

    turns: int = 0
    known: int = 0
    told: int = 0
    parent_known: int = 0

    def __add__(self, other: Recognised) -> Recognised:
        return Recognised(
            self.turns + other.turns,
            self.known + other.known,
            self.told + other.told,
            self.parent_known + other.parent_known,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fractions of recognised requests, and the numbers of requests."""
        return {
            "known": self.known / self.turns if self.turns else None,
            "parent_known": self.parent_known / self.told if self.told else None,
            "turns": self.turns,
            "turns_with_parent": self.told,
        }


class Player:
    """Sends runs of clients to a server.

    Args:
        url: address of the server, or of the router in front of it.
        routed: True if ``url`` is the address of a router.
    """

    def __init__(self, url: str, *, routed: bool) -> None:
        self.sent: list[Sent] = []
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self._routed = routed
        self._runs = 0

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def play(self, client: Client, path: str, user: int, more: Mapping[str, str] = {}) -> None:
        """Send all requests of a client's run to an endpoint.

        Args:
            user: number of the client's user.
            more: headers that a router adds.

        Raises:
            httpx.HTTPError: the server refused a request.
        """
        self._runs += 1
        texts: defaultdict[str, list[str]] = defaultdict(list)
        last = ""
        for turn in client.turns:
            said = texts[turn.agent]
            said.append(_text(f"{self._runs} {turn.agent}", len(said)))
            body = _body(turn, path, said, last)
            answer = self._http.post(path, json=body, headers={**turn.headers, **more})
            if answer.is_error:
                raise httpx.HTTPError(f"{client.title}, {path}: {answer.text[:300]}")
            last = answer.json().get("id", "") if FOLLOWS in turn.body or not last else last
            parent = self._stated_parent(client, turn, path, body)
            self.sent.append(Sent(client.name, user, path, turn.agent, parent))

    def _stated_parent(
        self, client: Client, turn: Request, path: str, body: Mapping[str, Any]
    ) -> str | None:
        """Return the agent's parent if the headers and body that reach the server name it; None
        otherwise.
        """
        parent = client.parents.get(turn.agent)
        arrives = {} if self._routed and path in HEADERLESS else turn.headers
        systems = {name: json.dumps(body[name]) for name in SYSTEMS if name in body}
        ids = claim(arrives, {**body, **systems}).ids
        named = bool(ids.keys() & {"parent_agent", "parent_session"})
        named = named or "parent_program_id" in str(body.get("vllm_xargs"))
        # A mark in the system prompt names no parent: it stands for the main agent.
        marked = "subagent" in ids and parent == "main"
        return parent if named or marked else None


def _text(name: str, number: int) -> str:
    """Return the text that a turn adds to its conversation."""
    lines = NEXT_LINES if number else FIRST_LINES
    return " ".join(f"{name} says {line * 7 + number}" for line in range(lines))


def _body(turn: Request, path: str, texts: Sequence[str], last: str) -> dict[str, Any]:
    own = path == turn.path
    body = {
        name: value
        for name, value in turn.body.items()
        if (own and name not in _OF_MODEL) or name in _IDS
    }
    system = turn.body.get("system")
    if system and path == MESSAGES:
        body["system"] = system
    elif system and path == RESPONSES:
        body["instructions"] = "\n".join(block["text"] for block in system)
    body |= {"model": MODEL_NAME, "temperature": 0, "stream": False}
    body.pop("stream_options", None)
    talk = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * len(texts), _answered(texts), strict=False)
    ]
    follows = own and FOLLOWS in turn.body
    if follows:
        body[FOLLOWS] = last
    if path == COMPLETIONS:
        return body | {"prompt": "\n".join(_answered(texts)), "max_tokens": ANSWER_TOKENS}
    if path == RESPONSES:
        return body | {
            "input": texts[-1] if follows else talk,
            "max_output_tokens": ANSWER_TOKENS,
            "store": FOLLOWS in turn.body or turn.body.get("store", True),
        }
    return body | {"messages": talk, "max_tokens": ANSWER_TOKENS}


def _answered(texts: Sequence[str]) -> list[str]:
    """Return the texts of a conversation, with an answer after each text except the last."""
    return [one for text in texts for one in (text, "Yes.")][:-1]


def judge(sent: Sequence[Sent], found: Iterable[TurnRecord]) -> dict[str, Recognised]:
    """Compare the jobs of requests with the agents that sent them. Returns the counts by client
    name.

    Args:
        found: the server's trace.

    Raises:
        RuntimeError: the trace does not have one record for each request.
    """
    records = sorted(found, key=lambda one: one.arrived)
    if len(records) != len(sent):
        raise RuntimeError(
            f"the trace has {len(records)} turns, but {len(sent)} requests were sent"
        )
    both = list(zip(sent, records, strict=True))
    jobs: defaultdict[object, set[str | None]] = defaultdict(set)
    owners: defaultdict[str | None, set[object]] = defaultdict(set)
    for one, record in both:
        jobs[one.client, one.user, one.path, one.agent].add(record.job)
        owners[record.job].add((one.client, one.user, one.agent))
    results: defaultdict[str, Recognised] = defaultdict(Recognised)
    for one, record in both:
        run = (one.client, one.user, one.path)
        alone = len(jobs[*run, one.agent]) == 1 and len(owners[record.job]) == 1
        results[one.client] += Recognised(
            1,
            record.job is not None and alone,
            one.parent is not None,
            one.parent is not None and jobs[*run, one.parent] == {record.parent} != {None},
        )
    return dict(results)
