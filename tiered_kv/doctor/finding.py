"""Findings of the doctor: what was looked at, what was seen, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Verdict of a check."""

    OK = "ok"
    """All is well."""
    WARN = "warn"
    """Room for improvement: it works, but worse than it could, or perhaps not as meant."""
    FAIL = "fail"
    """Failure: the server does not start, or a part of it does nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check.

    Attributes:
        check: what was looked at.
        seen: what there was.
        advice: what to change; empty if there is nothing.
    """

    check: str
    verdict: Verdict
    seen: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        """Describe the finding as JSON."""
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "seen": self.seen,
            "advice": self.advice,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, str]) -> Finding:
        """Read what ``as_json`` gave."""
        return cls(found["check"], Verdict(found["verdict"]), found["seen"], found["advice"])


def ok(check: str, seen: str) -> Finding:
    """Finding that all is well."""
    return Finding(check, Verdict.OK, seen)


def warn(check: str, seen: str, advice: str) -> Finding:
    """Finding that something could be better."""
    return Finding(check, Verdict.WARN, seen, advice)


def fail(check: str, seen: str, advice: str) -> Finding:
    """Finding that something does not work."""
    return Finding(check, Verdict.FAIL, seen, advice)
