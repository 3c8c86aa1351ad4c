"""Recent decisions are counted by type, and their number is bounded."""

from __future__ import annotations

from tiered_kv.connectors.runtime.between_turns.turn_ends import MOST_RECENT, Kind, RecentDecisions
from tiered_kv.policies.base import Decision, GapClass, Tier

PIN = Decision(Tier.PIN, 30.0, GapClass.FAST)
CPU = Decision(Tier.CPU)


def test_each_kind_is_counted_the_most_frequent_first() -> None:
    decided = RecentDecisions()
    assert (len(decided), decided.since, list(decided.counts())) == (0, None, [])
    for at, made in enumerate((CPU, PIN, PIN)):
        decided.add(made, now=10.0 + at)
    assert list(decided.counts()) == [(Kind(GapClass.FAST, Tier.PIN), 2), (Kind(None, Tier.CPU), 1)]
    assert (len(decided), decided.since) == (3, 10.0)


def test_the_oldest_are_forgotten() -> None:
    decided = RecentDecisions()
    for at in range(MOST_RECENT):
        decided.add(CPU, now=float(at))
    for at in range(MOST_RECENT):
        decided.add(PIN, now=1000.0 + at)
        assert len(decided) == MOST_RECENT == sum(times for _, times in decided.counts())
    assert decided.since == 1000.0
    assert list(decided.counts()) == [(Kind(GapClass.FAST, Tier.PIN), MOST_RECENT)]
