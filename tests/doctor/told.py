"""Helpers that return the doctor's findings and verdicts by check."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.doctor.finding import Finding, Verdict


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return findings by check. Asserts that no check has two findings, and that a finding has
    advice unless it is OK."""
    found = list(findings)
    named = {one.check: one for one in found}
    assert len(named) == len(found)
    for one in found:
        assert one.seen
        assert bool(one.advice) == (one.verdict is not Verdict.OK)
    return named


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    """Return the verdicts as strings, by check."""
    return {name: one.verdict.value for name, one in by_check(findings).items()}
