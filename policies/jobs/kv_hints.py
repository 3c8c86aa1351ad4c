"""KV hints: what clients and routers ask to be done with a job's KV. Input is untrusted.

A hint names an intent and a target. Carrying it out is the engine's choice: every hint ends with an
outcome and its reason. No hint changes an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Intent(StrEnum):
    """What a hint asks for."""

    RETAIN = "retain"
    """Keep the pages longer than their forecast alone would, for a limited time."""
    PIN = "pin"
    """Keep the blocks in VRAM for a limited time, within the pin budget."""
    PREFETCH = "prefetch"
    """Promote the pages to CPU memory now."""
    DEMOTE = "demote"
    """Move the pages to a tier below CPU memory now."""
    RELEASE = "release"
    """The job is over: free what it shares with no other job, in every tier."""
    REVISE = "revise"
    """The tool of the gap that runs has made progress, or has ended."""


class Outcome(StrEnum):
    """What became of a hint."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    """Carried out in part, or for a shorter time."""
    DEFERRED = "deferred"
    """It is carried out later: when the job's running turn ends, or a copy has."""
    REJECTED = "rejected"
    MISSING = "missing"
    """The caller's scope has no such job and no such pages."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a hint is about: exactly one of these.

    Attributes:
        job: id of a job in the caller's scope.
        number: number of a job in any scope, from ``/tiered_kv/jobs``; only from operators.
        tokens: token ids from the start of a context.
        hashes: block hashes, each of which covers all tokens before its end too.
        own: True for the job of the request that carries the hint.
    """

    job: str | None = None
    number: int | None = None
    tokens: tuple[int, ...] = ()
    hashes: tuple[bytes, ...] = ()
    own: bool = False


@dataclass(frozen=True, slots=True)
class KvHint:
    """A hint that can be carried out.

    Attributes:
        action_id: the sender's name for it.
        ttl_s: time that a retention or a pin lasts, seconds; None for the default.
        priority: relative priority of a retention, -1 to 1.
        expected_s: seconds until the running tool ends, for ``REVISE``; None if unknown.
        progress: fraction of the running tool that is done, for ``REVISE``; None if unknown.
        done: True if the running tool has ended, for ``REVISE``.
    """

    action_id: str
    intent: Intent
    target: Target
    ttl_s: float | None = None
    priority: float = 0.0
    expected_s: float | None = None
    progress: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class HintResult:
    """What became of a hint.

    Attributes:
        action_id: the sender's name for the hint.
        intent: None if it could not be read.
        reason: one sentence for the sender. Contains nothing from other scopes.
        pages: number of pages, or of pinned blocks, that it concerned.
        until_s: seconds that a retention or a pin still lasts; None for other intents.
    """

    action_id: str
    intent: Intent | None
    outcome: Outcome
    reason: str = ""
    pages: int = 0
    until_s: float | None = None
