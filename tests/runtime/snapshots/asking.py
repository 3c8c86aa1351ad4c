"""Sends snapshot queries to a rig, as the routes send them to an engine."""

from __future__ import annotations

from typing import Any

from tiered_kv.connectors.runtime.snapshots.capture import fresh_salt
from tiered_kv.connectors.runtime.views.questions import answer
from tiered_kv.testing.rig import EngineRig


def ask(rig: EngineRig, what: str, **question: Any) -> dict[str, Any]:
    """Send a query, and return the engine's answer."""
    return answer(rig.half, {"ask": what, **question})


def take(rig: EngineRig, job: str, name: str, **how: bool) -> dict[str, Any]:
    """Start taking a snapshot, and return the engine's answer."""
    how = {"wait_turn": False, "stop": False, "exact": False, **how}
    return ask(rig, "snapshot", job=job, name=name, **how)


def restore(
    rig: EngineRig, name: str, job: str | None = None, *, exact: bool = False
) -> dict[str, Any]:
    """Start restoring a snapshot, and return the engine's answer."""
    return ask(rig, "restore", name=name, job=job, salt=fresh_salt() if exact else None)


def fork(rig: EngineRig, job: str, *children: str, exact: bool = False) -> dict[str, Any]:
    """Start forking a job, and return the engine's answer."""
    return ask(rig, "fork", job=job, **{"as": list(children)}, exact=exact)


def step(rig: EngineRig) -> None:
    """Wait for pending file operations and copies, then run a step."""
    settle(rig)
    rig.step()


def settle(rig: EngineRig) -> None:
    """Wait for pending file operations and copies."""
    rig.half.snapshots.drain()
    rig.wait_for_worker()


def outcome(rig: EngineRig, begun: dict[str, Any]) -> dict[str, Any]:
    """Step until an operation has ended, and return its outcome."""
    assert begun.get("operation") is not None, begun
    for _ in range(500):
        said = ask(rig, "operation", engine=begun["engine"], id=begun["operation"])
        if said["state"] != "running":
            return said
        step(rig)
    raise AssertionError(f"an operation has no end: {said}")


def result(rig: EngineRig, begun: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an operation, and assert that it succeeds."""
    said = outcome(rig, begun)
    assert said["state"] == "done", said
    found: dict[str, Any] = said["result"]
    return found


def why(rig: EngineRig, begun: dict[str, Any]) -> str:
    """Return the message of an operation, and assert that it is refused or fails."""
    if "refused" in begun:
        return str(begun["refused"])
    said = outcome(rig, begun)
    assert said["state"] == "failed", said
    return str(said["why"])
