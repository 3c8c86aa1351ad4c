"""Requests of real clients: their headers and the fields of their bodies, without the texts.

Each file in ``clients/`` has the requests of one run of a client, in the order in which they were
sent. ``how`` states how they were recorded, or that they were built from documentation because the
client cannot run on its own. The agent that sent a request was determined from its prompt, not from
its ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiered_kv.policies.jobs.identity import claim

FOLDER = Path(__file__).parent / "clients"


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client.

    Attributes:
        agent: name of the agent that sent the request, unique in the client's run.
        path: endpoint of the request.
        headers: by name in lower case, without connection headers and secrets.
        body: top-level fields without the prompt and the tools.
    """

    agent: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Client:
    """A run of a client.

    Attributes:
        name: name of the client's file.
        title: the client's own name, with the version.
        recorded: False if the requests were built from documentation.
        parents: for each sub-agent, the agent that started it.
        turns: the client's requests.
    """

    name: str
    title: str
    recorded: bool
    parents: Mapping[str, str]
    turns: tuple[Request, ...] = field(repr=False)

    @property
    def ids(self) -> frozenset[str]:
        """Ids that the middleware reads in the client's requests."""
        claims = [claim(one.headers, one.body).ids for one in self.turns]
        found = {ids.get(name) for ids in claims for name in ("session", "agent")}
        return frozenset(value for value in found if isinstance(value, str) and value)

    def again(self) -> Client:
        """Return a copy of the run with different ids, as if a second user had made it."""
        text = json.dumps([[one.agent, one.path, one.headers, one.body] for one in self.turns])
        for number, id_ in enumerate(sorted(self.ids)):
            text = text.replace(id_, f"{id_[:-4]}bee{number}")
        turns = tuple(Request(*one) for one in json.loads(text))
        return Client(self.name, self.title, self.recorded, self.parents, turns)


def clients() -> list[Client]:
    """Read all clients, sorted by file name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.json"))]


def _read(path: Path) -> Client:
    found = json.loads(path.read_text(encoding="utf-8"))
    turns = tuple(Request(**one) for one in found["turns"])
    return Client(path.stem, found["client"], found["recorded"], found["parents"], turns)
