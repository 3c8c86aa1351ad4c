"""The endpoint plugin: ``/tiered_kv/status``, ``/tiered_kv/jobs`` and ``/tiered_kv/jobs/ID``, and
the routes for KV hints and for snapshots.

vLLM loads the plugin only if ``VLLM_PLUGINS`` names it. The plugin also adds the middleware for job
hints, and the middleware that adds reports to streamed answers.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

import vllm
from fastapi import FastAPI, Request, Response
from starlette.convertors import Convertor, register_url_convertor

from tiered_kv import __version__
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.connectors.runtime.views.questions import MOST_JOBS
from tiered_kv.connectors.vllm.middleware import JobMiddleware
from tiered_kv.policies.jobs.identity import MAX_JOB_ID_CHARS
from tiered_kv.status import Cursor

from .access import NO_JOB, Access, Refusal, read_nothing, read_page
from .engine_calls import EngineCalls
from .hint_routes import HintRoutes
from .snapshot_routes import Answer, SnapshotRoutes
from .stream_reports import ReportMiddleware, listen

logger = logging.getLogger(__name__)

MIDDLEWARE = f"{JobMiddleware.__module__}.{JobMiddleware.__qualname__}"


class _JobId(Convertor[str]):
    """URL convertor that matches the rest of a path, including slashes and line breaks, as a job
    id."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class TieredEndpoints:
    """tiered-kv's ``EndpointPlugin`` for vLLM. Used on one event loop."""

    name = "tiered_kv"
    required_tasks = None

    def __init__(self) -> None:
        self._access = Access(None, on_loopback=False)
        self._engines = EngineCalls(None)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, the middleware for streamed reports and, unless the command line names it
        too, the middleware for job hints."""
        register_url_convertor("tiered_kv_job", _JobId())
        for method, path, answer in (
            ("GET", "/tiered_kv/status", self._status),
            ("GET", "/tiered_kv/jobs", self._jobs),
            ("GET", "/tiered_kv/jobs/{job:tiered_kv_job}", self._job),
            *HintRoutes(self._ask).answers(),
            *SnapshotRoutes(self._ask, os.environ).answers(),
        ):
            guarded = self._guarded(answer)
            app.add_api_route(path, guarded, methods=[method], include_in_schema=False)
        if MIDDLEWARE not in app.state.args.middleware:
            app.add_middleware(JobMiddleware)
        app.add_middleware(ReportMiddleware)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Connect to the engine, set the access rule, and start observing answers."""
        listen(engine_client)
        self._engines = EngineCalls(engine_client)
        self._access = Access.of(os.environ, args)
        if self._access.token is not None:
            logger.info("/tiered_kv answers clients that send the token")
        elif self._access.on_loopback:
            logger.info("/tiered_kv answers only programs on this machine")
        else:
            logger.warning(
                "/tiered_kv refuses all clients, because the server accepts connections from "
                "other machines and %s is not set",
                ADMIN_TOKEN,
            )

    async def _ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        return await self._engines.ask(question)

    def _guarded(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._access.check(request.headers)
                return _json(200, await answer(request))
            except Refusal as refusal:
                return _refused(refusal)

        return guarded

    async def _status(self, request: Request) -> dict[str, Any]:
        read_nothing(request.query_params)
        engines = await self._engines.ask({"ask": "status"})
        return {"version": __version__, "vllm_version": vllm.__version__, "engines": engines}

    async def _jobs(self, request: Request) -> dict[str, Any]:
        """Return a page of jobs, queried in parts small enough to report between two steps."""
        page = read_page(request.query_params)
        jobs, after = list[dict[str, Any]](), page.after
        while True:
            limit = min(MOST_JOBS, page.limit - len(jobs))
            place = [after.engine, after.number]
            answers = await self._engines.ask({"ask": "jobs", "limit": limit, "after": place})
            part = [job for said in answers for job in said["jobs"]]  # each up to ``limit``
            part = sorted(part, key=_place)[:limit]
            jobs += part
            more = len(part) == limit
            after = _place(part[-1]) if part else after
            if not more or len(jobs) == page.limit:
                break
        return {
            "now": max(said["now"] for said in answers),
            "known": sum(said["known"] for said in answers),
            "jobs": jobs,
            "next": str(after) if more else None,
        }

    async def _job(self, request: Request) -> dict[str, Any]:
        read_nothing(request.query_params)
        name: str = request.path_params["job"]
        can_be = 0 < len(name) <= MAX_JOB_ID_CHARS
        answers = await self._engines.ask({"ask": "job", "id": name}) if can_be else []
        jobs = [job for said in answers for job in said["jobs"]]
        if not jobs:
            raise Refusal(404, NO_JOB)
        return {"now": max(said["now"] for said in answers), "jobs": jobs}


def _place(job: dict[str, Any]) -> Cursor:
    return Cursor(job["engine"], job["number"])


def _json(status: int, said: dict[str, Any], **headers: str) -> Response:
    """Return a JSON response in ASCII, because names may contain invalid Unicode."""
    return Response(
        json.dumps(said),
        status,
        headers={"Cache-Control": "no-store", **headers},
        media_type="application/json",
    )


def _refused(refusal: Refusal) -> Response:
    said = {"error": {"message": refusal.sentence, "code": refusal.status}}
    if refusal.status == 401:
        return _json(401, said, **{"WWW-Authenticate": "Bearer"})
    return _json(refusal.status, said)
