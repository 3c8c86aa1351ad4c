"""External queries to the scheduler half and their replies, in plain JSON.

A query is ``{"ask": ASK}`` with these fields:

- ``status``: no further fields.
- ``jobs``: ``limit``, and ``after`` with the engine and number of the job after which the list
  starts, as ``[engine, number]``. With several engines the jobs of the first engine come first.
- ``job``: ``id``.
- ``snapshot``: ``job``, ``name``, ``wait_turn``, ``stop``, ``exact``.
- ``restore``: ``name``, ``job`` or null, ``salt``: a cache salt for an exact restore, or null.
- ``fork``: ``job``, ``as`` with the names of the new jobs, ``exact``.
- ``hints``: ``message`` with KV hints as JSON, and ``salt``: the cache salt of the jobs and pages
  that the hints may concern, or null for any.
- ``operation``: ``engine`` and ``id``, which are ``engine`` and ``operation`` in the reply to
  ``snapshot``, ``restore`` or ``fork``.

``snapshot``, ``restore`` and ``fork`` start an operation that changes the engine. ``hints`` changes
the engine before the reply. The other queries are read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.connectors.runtime.snapshots.snapshots import NoFolderError, NoSnapshots, Snapshots
from tiered_kv.policies.base import job_scope
from tiered_kv.policies.jobs.kv_hints import HintReader, KvHint, Outcome, results_json
from tiered_kv.snapshot.manifest import SnapshotError

from .engine_status import status
from .job_view import JobView

MOST_JOBS = 100
"""Maximum number of jobs in a reply. Collecting them delays a step by a millisecond or two."""
MOST_NAMESAKES = 100
"""Maximum number of jobs with the same name in a reply."""


def answer(half: SchedulerHalf, question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a query. Computes only what the query asks for.

    Raises:
        KeyError, TypeError, ValueError: the query is malformed.
    """
    match question["ask"]:
        case "status":
            seen = half.observation
            would = {"would_have_saved": seen.would_have_saved} if seen is not None else {}
            return {**status(half).to_json(), **would}
        case "jobs":
            known = len(half.gaps.manager.jobs)
            return {**_now(half), "known": known, "jobs": _jobs(half, question)}
        case "job":
            jobs = JobView(half).named(str(question["id"]), MOST_NAMESAKES)
            return {**_now(half), "jobs": jobs}
        case "hints":
            return {"engine": half.facts.replica, "results": _hints(half, question)}
        case "snapshot" | "restore" | "fork" | "operation":
            engine = half.facts.replica
            if question.get("engine", engine) != engine:  # an operation of another engine
                return {"engine": engine, "state": None}
            return {"engine": engine, **_of_snapshots(half.snapshots, question)}
        case unknown:
            raise ValueError(f"unknown query: {unknown!r}")


def _of_snapshots(
    snapshots: Snapshots | NoSnapshots, question: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        match question["ask"]:
            case "operation":
                return snapshots.outcome(int(question["id"]))
            case "snapshot":
                begun = snapshots.take(
                    str(question["job"]),
                    str(question["name"]),
                    wait_turn=bool(question["wait_turn"]),
                    stop=bool(question["stop"]),
                    exact=bool(question["exact"]),
                )
            case "restore":
                job, salt = question["job"], question["salt"]
                begun = snapshots.restore(
                    str(question["name"]),
                    str(job) if job is not None else None,
                    salt=str(salt) if salt is not None else None,
                )
            case _:
                children = [str(name) for name in question["as"]]
                begun = snapshots.fork(
                    str(question["job"]), children, exact=bool(question["exact"])
                )
    except SnapshotError as error:
        return {"refused": str(error), "status": 501 if isinstance(error, NoFolderError) else 409}
    return {"operation": begun}


def _hints(half: SchedulerHalf, question: Mapping[str, Any]) -> list[dict[str, object]]:
    """Carry out hints. Returns the result of each action, in the order of the actions."""
    reader, salt = HintReader(half.facts.replica), question["salt"]
    reader.add(str(question["message"]))
    wrong = sum(one.outcome is Outcome.REJECTED for one in reader.answered)
    half.counters.add("hints_ignored", wrong)
    scope = job_scope(str(salt)) if salt is not None else None
    carried_out = iter(half.kv_hints.carry_out(scope, reader.hints))
    results = [next(carried_out) if isinstance(one, KvHint) else one for one in reader.found]
    return results_json(results, reader.hints)


def _now(half: SchedulerHalf) -> dict[str, float]:
    return {"now": round(half.deps.wall(), 3)}


def _jobs(half: SchedulerHalf, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    engine, number = map(int, question["after"])
    most = min(int(question["limit"]), MOST_JOBS)
    if half.facts.replica < engine or most < 1:
        return []
    after = number if half.facts.replica == engine else 0
    return [job.to_json() for job in JobView(half).page(after, most)]
