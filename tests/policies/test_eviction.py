"""Least recently used, against a list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered_kv.keys import PageKey
from tiered_kv.policies.eviction import LeastRecentlyUsed

KEYS = [PageKey(bytes([n])) for n in range(8)]


class LeastRecentlyUsedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = LeastRecentlyUsed()
        self.model: list[PageKey] = []

    @rule(key=st.sampled_from(KEYS))
    def add(self, key: PageKey) -> None:
        if key not in self.model:
            self.order.added(key)
            self.model.append(key)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.model))
        self.order.touched(key)
        self.model.remove(key)
        self.model.append(key)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.model))
        self.order.removed(key)
        self.model.remove(key)

    @invariant()
    def the_one_used_longest_ago_comes_first(self) -> None:
        assert list(self.order) == self.model


TestLeastRecentlyUsed = LeastRecentlyUsedMachine.TestCase
TestLeastRecentlyUsed.settings = settings(max_examples=50, stateful_step_count=30)


def test_pages_nobody_added_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        LeastRecentlyUsed().removed(KEYS[0])
