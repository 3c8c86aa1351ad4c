"""Findings by check, for tests."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.doctor.finding import Finding, Verdict


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Findings by check. No two findings may have the same check."""
    found = list(findings)
    named = {one.check: one for one in found}
    assert len(named) == len(found)
    for one in found:
        assert one.seen
        assert bool(one.advice) == (one.verdict is not Verdict.OK)
    return named


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    """Verdicts by check, as words."""
    return {name: one.verdict.value for name, one in by_check(findings).items()}
