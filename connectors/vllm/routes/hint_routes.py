"""Routes for KV hints that belong to no request: ``POST /tiered_kv/hints``, and ``DELETE
/tiered_kv/jobs/ID``, which releases a job's KV.

The engines carry the hints out between two steps, within the query. Each engine reports a result
for each action, and the client receives the best of these results.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from tiered_kv.json_fields import cut, plain_text
from tiered_kv.policies.jobs.identity import MAX_JOB_ID_CHARS
from tiered_kv.policies.jobs.kv_hints import (
    MAX_ID_BYTES,
    MAX_MESSAGE_CHARS,
    Intent,
    Outcome,
    job_number,
)
from tiered_kv.status import Cursor

from .access import NO_JOB, Refusal, read_nothing
from .snapshot_routes import Answer, Ask, read_bytes, read_object

NO_ACTIONS = (
    'The body has no list of actions: send {"actions": [{"action_type": "release", "payload": '
    '{"job_id": "ID"}}]}.'
)
WRONG_SALT = "cache_salt must be a string: the cache_salt of the job's requests."
WRONG_NUMBER = "number must be a job's number, or ENGINE.NUMBER: GET /tiered_kv/jobs lists both."
SEVERAL = (
    "Several jobs have this id, with different cache salts or in different engines: choose one "
    "with ?number=ENGINE.NUMBER, both from GET /tiered_kv/jobs/ID."
)

_BEST_FIRST = [outcome.value for outcome in Outcome]


class HintRoutes:
    """Handlers of the routes. Used on one event loop.

    Args:
        ask: queries the engines.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def answers(self) -> tuple[tuple[str, str, Answer], ...]:
        """Return the routes, with the method, path and handler of each."""
        return (
            ("POST", "/tiered_kv/hints", self._hints),
            ("DELETE", "/tiered_kv/jobs/{job:tiered_kv_job}", self._release),
        )

    async def _hints(self, request: Request) -> dict[str, Any]:
        read_nothing(request.query_params)
        body = await read_bytes(request, MAX_MESSAGE_CHARS)
        given = read_object(body)
        if not isinstance(given.get("actions"), list):
            raise Refusal(400, NO_ACTIONS)
        salt, name = given.get("cache_salt"), given.get("message_id")
        if salt is not None and (not isinstance(salt, str) or plain_text(salt) != salt):
            raise Refusal(400, WRONG_SALT)
        name = plain_text(cut(name, MAX_ID_BYTES)) if isinstance(name, str) else None
        # As text: vLLM's messages to its engines have no integers of more than 64 bits.
        return {"message_id": name, "results": await self._results(body.decode(), salt)}

    async def _release(self, request: Request) -> dict[str, Any]:
        """Release a job. If several jobs have the id, the query must name the number of one of
        them. Raises Refusal if no job, or more than one job, matches."""
        number = _number({**request.query_params})
        name: str = request.path_params["job"]
        can_be = 0 < len(name) <= MAX_JOB_ID_CHARS
        answers = await self._ask({"ask": "job", "id": name}) if can_be else []
        jobs = [Cursor(job["engine"], job["number"]) for said in answers for job in said["jobs"]]
        jobs = [job for job in jobs if number in (None, job)]
        if not jobs:
            raise Refusal(404, NO_JOB)
        if len(jobs) > 1:
            raise Refusal(409, SEVERAL)
        payload = {"number": str(jobs[0])}
        action = {"action_id": name, "action_type": Intent.RELEASE, "payload": payload}
        results = await self._results(json.dumps([action]), None)
        if results[0]["outcome"] == Outcome.MISSING:  # it has ended meanwhile
            raise Refusal(404, NO_JOB)
        return {"results": results}

    async def _results(self, message: str, salt: str | None) -> list[dict[str, Any]]:
        """Send a message to all engines, and return the best result of each action."""
        answers = await self._ask({"ask": "hints", "message": message, "salt": salt})
        by_action = zip(*(said["results"] for said in answers), strict=True)
        return [
            min(one, key=lambda result: _BEST_FIRST.index(result["outcome"])) for one in by_action
        ]


def _number(query: dict[str, str]) -> Cursor | None:
    """Return the engine and the number of a job from a query; None if the query has no number.
    Raises Refusal if the number is invalid, or if the query has another parameter."""
    given = query.pop("number", None)
    read_nothing(query)
    if given is None:
        return None
    try:
        return job_number(given)
    except ValueError:
        raise Refusal(400, WRONG_NUMBER) from None
