"""Identity: the job of a request, from the ids that clients, routers and vLLM provide.

A job is identified by its scope, session and agent. The scope is the cache salt alone, because all
ids are claims of a client, and clients without a salt trust each other. Session, agent and parent
are each read from the first row of ``SOURCES`` that has them. Two further rules apply:

- A client's own session, if it differs from the session of an earlier row, is appended to that
  session. So a router or gateway that sends one session id for several clients does not merge
  their jobs.
- A ``job_id`` or ``program_id`` names a job completely, and nothing is added to it.

``claim`` runs in the API server, and reads the headers and body fields that vLLM drops. The
middleware adds the result of ``claim`` to the request, and ``identify`` reads it in the engine,
together with the ids that vLLM keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, NamedTuple

from tiered_kv.json_fields import string, whole

MAX_JOB_ID_CHARS = 512
"""Maximum length of a job id, which is kept for as long as the job. A longer id is an error or an
attack."""
MAX_NESTED_CHARS = 4096
"""Maximum length of a string whose JSON is parsed. The JSON that Codex sends has about 1,000
characters."""
INFERRED_PREFIX = "(inferred) "
"""Prefix of the names of inferred jobs, which clients may not use."""
CLIENT = "client"
"""Field of ``kv_transfer_params`` in which the middleware passes the ids of a ``Claim`` to the
engine."""

_DIGEST_PREFIX = "(sha256) "
_OWN, _AGENT = "/session:", "/agent:"
_LONG_PART = 100
_MAX_IGNORED = 16
_MAPPINGS = (dict, Mapping)
"""Types of JSON objects. ``dict`` comes first, because almost all objects are a ``dict``, and the
check for another ``Mapping`` is slow."""


class Place(Enum):
    """Place in a request where a source is read."""

    PARAMS = "`kv_transfer_params`"
    XARGS = "`vllm_xargs`"
    CONTEXT = "`agentic_context` in either"
    VLLM = "vLLM's session id"
    HEADER = "header"
    BODY = "body"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Source:
    """A row of the table ``SOURCES``: the fields that one client sends in one place. Several fields
    may contain the same id; the first field with a usable id is read.

    Attributes:
        client: the client that sends these fields.
        job: fields with an id that identifies the job completely.
        session, agent: fields with the ids of the session, and of the agent in that session. An
            agent with the id of its session is the main agent.
        parent_job, parent_session, parent_agent: fields with the ids of the agent that started this
            agent.
        follows: field with the id of the response that this request continues.
        last: field that is true if no turn follows.
        own: True if no gateway sends this session id on behalf of several clients.
        root: True if an agent without a parent is a child of the session's main agent.
        user_agent: start of this client's ``User-Agent`` header; empty for any header.
        pattern: form of the session ids; None for any form.
    """

    place: Place
    client: str
    job: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    parent_job: tuple[str, ...] = ()
    parent_session: tuple[str, ...] = ()
    parent_agent: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    own: bool = False
    root: bool = False
    user_agent: str = ""
    pattern: re.Pattern[str] | None = None


_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_EXPLICIT: dict[str, Any] = {
    "job": ("job_id",),
    "session": ("session_id",),
    "agent": ("agent_id",),
    "parent_job": ("parent_job_id",),
    "parent_session": ("parent_session_id",),
    "parent_agent": ("parent_agent_id",),
}

SOURCES = (
    Source(Place.PARAMS, "any", **_EXPLICIT),
    Source(Place.XARGS, "any", **_EXPLICIT),
    Source(
        Place.CONTEXT,
        "vLLM's router",
        job=("program_id",),
        session=("session_id", "task_id"),
        agent=("agent_id",),
        parent_job=("parent_program_id",),
    ),
    Source(Place.VLLM, "any, OpenCode, routers", session=("session_id", "x-session-id")),
    Source(
        Place.HEADER,
        "Claude Code",
        session=("x-claude-code-session-id",),
        agent=("x-claude-code-agent-id",),
        parent_agent=("x-claude-code-parent-agent-id",),
        own=True,
        root=True,
    ),
    Source(
        Place.HEADER,
        "Codex",
        session=("session-id", "session_id"),
        agent=("thread-id", "thread_id"),
        parent_agent=("x-codex-parent-thread-id",),
    ),
    Source(
        Place.HEADER,
        "OpenCode",
        session=("x-session-affinity",),
        parent_session=("x-parent-session-id",),
    ),
    Source(Place.HEADER, "OpenHands, LiteLLM", session=("x-litellm-session-id",)),
    Source(
        Place.HEADER,
        "Dynamo",
        session=("x-dynamo-session-id",),
        parent_session=("x-dynamo-parent-session-id",),
        last=("x-dynamo-session-final",),
    ),
    Source(Place.HEADER, "aiperf", session=("x-correlation-id",), user_agent="aiperf"),
    Source(Place.BODY, "Claude Code", session=("metadata.user_id.session_id",), own=True),
    Source(
        Place.BODY,
        "Codex",
        session=("client_metadata.session_id",),
        agent=("client_metadata.thread_id",),
        parent_agent=("client_metadata.x-codex-parent-thread-id",),
        own=True,
    ),
    Source(
        Place.BODY,
        "Codex, OpenCode",
        session=("prompt_cache_key",),
        pattern=re.compile(rf"{_UUID}|ses_\w+"),  # other keys are shared by many conversations
    ),
    Source(Place.BODY, "Dynamo", session=("nvext.agent_context.trajectory_id",)),
    Source(Place.BODY, "OpenAI's Responses", follows=("previous_response_id",)),
    Source(Place.PROMPT, "all others"),
)
"""All sources, first to last. docs/configuration.md has this table."""

IDS = ("job", "session", "agent", "parent_job", "parent_session", "parent_agent")
"""Names of the ids of a source."""


class _Row(NamedTuple):
    """A source, with the name of each of its ids and the paths of the fields that contain it."""

    source: Source
    fields: list[tuple[str, list[tuple[str, ...]]]]


def _row(source: Source) -> _Row:
    split = "." if source.place is Place.BODY else None
    named = ((name, [tuple(one.split(split)) for one in getattr(source, name)]) for name in IDS)
    return _Row(source, [(name, paths) for name, paths in named if paths])


def _tops(*places: Place) -> frozenset[str]:
    """Return the top-level names of all fields that are read in these places."""
    rows = map(_row, (one for one in SOURCES if one.place in places))
    return frozenset(path[0] for row in rows for _, paths in row.fields for path in paths)


_CARRIED = [_row(one) for one in SOURCES if one.place in (Place.HEADER, Place.BODY)]
_PARAMS, _XARGS, _CONTEXT = (_row(one) for one in SOURCES[:3])
_FOLLOWS = next(one.follows[0] for one in SOURCES if one.follows)
_LAST = next(one.last[0] for one in SOURCES if one.last)

USER_AGENT, AGENTIC_CONTEXT = "user-agent", "agentic_context"
SYSTEMS = ("system", "instructions")
"""Fields of the system prompt in requests of the Messages API and of the Responses API."""
HEADERS = _tops(Place.HEADER) | {USER_AGENT, _LAST}
"""Names of the headers that ``claim`` reads, in lower case."""
BODY_FIELDS = _tops(Place.BODY) | {_FOLLOWS, *SYSTEMS}
"""Names of the top-level body fields that ``claim`` reads."""
PARAMS_FIELDS = _tops(Place.PARAMS) | {CLIENT, AGENTIC_CONTEXT}
"""Names of the fields of ``kv_transfer_params`` that ``identify`` reads."""

_SUBAGENT = "cc_is_subagent=true"
_SUBAGENT_WITHIN = 512
_OLDER_USER_ID = re.compile(rf"user_\w*_session_({_UUID})")
_MAIN_AGENTS = ("", "lead")
"""Agent ids that stand for a session's main agent. vLLM's router uses ``lead``."""


def job_name(value: object) -> str:
    """Check an id, and return it as a string. An integer is converted to its decimal text.

    Raises:
        ValueError: the id is neither a string nor an integer, or it is empty, too long or reserved.
    """
    if type(value) is int:
        return str(whole(value, 1 - 2**64, 2**64 - 1))
    name = string(value, 1, MAX_JOB_ID_CHARS)
    if name.startswith(INFERRED_PREFIX):
        raise ValueError(
            f"names that start with {INFERRED_PREFIX.strip()} are reserved for inferred jobs"
        )
    return name


class _Ids:
    """Ids found so far in a request, and the number of unusable ids. The id of a main agent is
    empty."""

    __slots__ = ("found", "ignored")

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.ignored = 0

    def usable(self, value: object) -> str | None:
        """Return ``value`` as an id; None if it is None or unusable. Unusable values are
        counted."""
        if value is None:
            return None
        try:
            return job_name(value)
        except ValueError:
            self.ignored += 1
            return None

    def agent(self, value: object) -> str | None:
        """Return ``value`` as an agent's id; empty for a main agent; None, as in ``usable``, if
        ``value`` is None or unusable."""
        return "" if value in _MAIN_AGENTS else self.usable(value)

    def read(self, row: _Row, values: Mapping[Any, Any]) -> None:
        """Add the ids of a source. Ids that an earlier source had are kept."""
        source, found = row.source, dict[str, str]()
        for name, paths in row.fields:
            for path in paths:
                value = values.get(path[0])
                if len(path) > 1 and value is not None:
                    value = _inner(value, path)
                if source.pattern and not (
                    isinstance(value, str) and source.pattern.fullmatch(value)
                ):
                    continue
                if (one := self.usable(value)) is not None:
                    found[name] = one
                    break
        for name in ("agent", "parent_agent"):
            if name in found and found[name] in (*_MAIN_AGENTS, found.get("session")):
                found[name] = ""
        if source.root and found.get("agent"):
            found.setdefault("parent_agent", "")
        self.found = found | self.found
        if source.own and found.get("session", session := self.found.get("session")) != session:
            self.found.setdefault("own", found["session"])


def _inner(value: object, path: tuple[str, ...]) -> object:
    """Return the value at the end of a path into an object; None if there is none. Strings on the
    path are parsed as JSON.

    Args:
        value: value of the path's first name.
    """
    for name in path[1:]:
        if isinstance(value, str):
            value = opened(value)
        if not isinstance(value, _MAPPINGS):
            return None
        value = value.get(name)
    return value


def opened(text: str) -> object:
    """Parse a string as a JSON object; None if it is not one. The user ids of Claude Code before
    2.1.78 are not JSON, but end with the session, which is returned as an object."""
    if len(text) > MAX_NESTED_CHARS:
        return None
    if text[:1] == "{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None
    older = _OLDER_USER_ID.fullmatch(text)
    return {"session_id": older[1]} if older else None


# -- in the API server --------------------------------------------------------------------


class Claim(NamedTuple):
    """Statements about a request's job in the headers and the body of the request.

    Attributes:
        ids: the ids, which the middleware adds to the request as the field ``CLIENT``; empty if
            there are none.
        last: True if the client stated that no turn follows.
    """

    ids: dict[str, object]
    last: bool


def claim(headers: Mapping[str, str], body: Mapping[str, object]) -> Claim:
    """Read the ids in the headers and the body of a request. Never raises.

    Args:
        headers: headers by name in lower case. Only ``HEADERS`` are read.
        body: top-level fields of the body. Only ``BODY_FIELDS`` are read. For a system prompt, the
            start of its JSON text suffices.
    """
    ids = _Ids()
    for row in _CARRIED:
        values: Mapping[str, object] = headers if row.source.place is Place.HEADER else body
        if values and headers.get(USER_AGENT, "").startswith(row.source.user_agent):
            ids.read(row, values)
    carried: dict[str, object] = dict(ids.found)
    if "agent" not in carried and any(_is_subagent(body.get(name)) for name in SYSTEMS):
        carried["subagent"] = True
    response = body.get(_FOLLOWS)
    if isinstance(response, str) and 0 < len(response) <= MAX_JOB_ID_CHARS:
        carried["follows"] = response
    if ids.ignored:
        carried["ignored"] = min(ids.ignored, _MAX_IGNORED)
    return Claim(carried, headers.get(_LAST, "").lower() == "true")


def _is_subagent(system: object) -> bool:
    """Return True if the start of a system prompt contains Claude Code's mark of a subagent. If a
    router drops headers, only the mark distinguishes a subagent from its session's main agent."""
    return isinstance(system, str) and system.find(_SUBAGENT, 0, _SUBAGENT_WITHIN) >= 0


# -- in the engine ------------------------------------------------------------------------


class Identity(NamedTuple):
    """The job of a request.

    Attributes:
        job: id of the job; None if it must be inferred.
        session: id of the session's main agent, which is the job itself unless ``agent`` is given;
            None without a session.
        agent: id of the agent in the session; None for the main agent and if unknown.
        parent: id of the job whose agent started this job's agent; None if unknown.
        follows: id of the response that this request continues; None without one.
        carried: True if the middleware added ids from headers or the body to this request.
        ignored: number of unusable ids.
    """

    job: str | None = None
    session: str | None = None
    agent: str | None = None
    parent: str | None = None
    follows: str | None = None
    carried: bool = False
    ignored: int = 0


NOBODY = Identity()
"""Identity of a request without ids."""


def identify(params: object, xargs: object = None, session_id: object = None) -> Identity:
    """Return the job of a request. Unusable ids are counted. Never raises.

    Args:
        params: ``kv_transfer_params`` of the request.
        xargs: ``vllm_xargs`` of the request.
        session_id: session id that vLLM read from the request; None without one.
    """
    given = [
        (row, values)
        for row, values in ((_PARAMS, params), (_XARGS, xargs))
        if values and isinstance(values, _MAPPINGS)
    ]
    if not given and session_id is None:
        return NOBODY
    ids = _Ids()
    contexts = list[Mapping[Any, Any]]()
    for row, values in given:
        ids.read(row, values)
        if (context := values.get(AGENTIC_CONTEXT)) is not None:
            found_context = opened(context) if isinstance(context, str) else context
            if isinstance(found_context, _MAPPINGS):
                contexts.append(found_context)
            else:
                ids.ignored += 1
    for context in contexts:
        ids.read(_CONTEXT, context)
    found = ids.found
    known = found.get("session")
    if known is None and "job" not in found:
        known = ids.usable(session_id)
    client = params.get(CLIENT) if isinstance(params, _MAPPINGS) else None
    if not isinstance(client, _MAPPINGS):
        ids.ignored += client is not None
        client = {}
    if (job := found.get("job")) is not None:
        parent = found.get("parent_job")
        return Identity(
            job,
            agent=found.get("agent") or None,
            parent=parent if parent != job else None,
            carried=bool(client),
            ignored=ids.ignored,
        )
    return _composed(ids, known, client)


def _composed(ids: _Ids, known: str | None, client: Mapping[Any, Any]) -> Identity:
    """Return the identity of a job that is named by its session and agent.

    Args:
        ids: ids found in ``kv_transfer_params`` and ``vllm_xargs``.
        known: session from these fields or from vLLM; None without one.
        client: ids that the middleware read from headers and body.
    """
    found = ids.found
    session, own, above_session = (
        ids.usable(client.get(name)) for name in ("session", "own", "parent_session")
    )
    ids.ignored += min(_MAX_IGNORED, _count(client.get("ignored")))
    given = ids.agent(client.get("agent"))
    agent = found.get("agent", given) or None
    sessions = [*dict.fromkeys(one for one in (known, session, own) if one is not None)]
    root = _name(sessions)
    job = _name(sessions, agent) if agent else root
    parent = found.get("parent_job")
    above = ids.agent(client.get("parent_agent"))
    if parent is None and "parent_session" in found:
        parent = _name([found["parent_session"]], found.get("parent_agent"))
    elif parent is None and "parent_agent" in found:
        parent = _name(sessions, found["parent_agent"])
    elif parent is None and above_session is not None:
        replaced = known if session is None else session
        parent = _name([above_session if one == replaced else one for one in sessions])
    elif parent is None and above is not None:
        parent = _name(sessions, above) if above else root
    elif parent is None and agent is None and client.get("subagent") is True:
        job, parent = None, root
    return Identity(
        job,
        root,
        agent,
        parent if parent != job else None,
        ids.usable(client.get("follows")) if job is None else None,
        bool(client),
        ids.ignored,
    )


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _name(sessions: Sequence[str], agent: str | None = None) -> str | None:
    """Return the id of a job, at most ``MAX_JOB_ID_CHARS`` long; None without session and agent.
    Different sessions or agents have different ids.

    Args:
        sessions: the different ids of the job's session.
        agent: None or empty for the main agent.
    """
    if not sessions and not agent:
        return None
    for most in (MAX_JOB_ID_CHARS, _LONG_PART):
        name = _OWN.join(_part(one, most) for one in sessions)
        if agent:
            name += _AGENT + _part(agent, most)
        if len(name) <= MAX_JOB_ID_CHARS:
            break
    return name


def _part(text: str, most: int) -> str:
    """Return a part of an id: the text, or its digest if the text is longer than ``most`` or could
    be mistaken for several parts."""
    ambiguous = _OWN in text or _AGENT in text or text.startswith(_DIGEST_PREFIX)
    if len(text) <= most and not ambiguous:
        return text
    return _DIGEST_PREFIX + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
