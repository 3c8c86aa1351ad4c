"""Every policy passes the conformance suite."""

from __future__ import annotations

from tiered_kv.policies.baselines.contextserve import ContextServe
from tiered_kv.policies.baselines.continuum import Continuum, ContinuumFixed
from tiered_kv.policies.baselines.infercept import InferCept
from tiered_kv.policies.baselines.unpinned import Lru, NoOffload
from tiered_kv.policies.registry import POLICIES
from tiered_kv.policies.tier_choice import Occupancy
from tiered_kv.testing.conformance.policy import PolicyConformance
from tiered_kv.testing.policies import FixedPin


class TestOccupancy(PolicyConformance):
    policy = Occupancy


class TestContextServe(PolicyConformance):
    policy = ContextServe


class TestContinuum(PolicyConformance):
    policy = Continuum


class TestContinuumFixed(PolicyConformance):
    policy = ContinuumFixed


class TestInferCept(PolicyConformance):
    policy = InferCept


class TestLru(PolicyConformance):
    policy = Lru


class TestNowhere(PolicyConformance):
    policy = NoOffload


class TestFixedPin(PolicyConformance):
    policy = FixedPin


def test_every_registered_policy_is_tested() -> None:
    tested = {suite.policy for suite in PolicyConformance.__subclasses__()}
    assert set(POLICIES.values()) <= tested
