"""Other connectors in vLLM's ``MultiConnector`` are refused unless they are declared producers.
Next to producers, this connector works as it does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.errors import UnsupportedError
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import CELL, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

HERE = "tests.vllm.producers"

Config = dict[str, Any]


def other(name: str, role: str = "kv_producer") -> Config:
    return {"kv_connector": name, "kv_connector_module_path": HERE, "kv_role": role}


def inside(*others: Config, last: bool = False, **outer: Any) -> Callable[[Config], Config]:
    """Return a function that puts this connector into a ``MultiConnector`` with others, before or
    after them (``last``)."""

    def around(ours: Config) -> Config:
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [*others, ours] if last else [ours, *others]
            },
        } | outer

    return around


# -- refused configurations ----------------------------------------------------------


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("made", "why", "instead"),
    [
        (
            lambda last: inside(other("Producer", "kv_both"), last=last),
            "Producer may load KV too, and TieredContinuumConnector would save blocks that "
            "Producer has not filled yet",
            'set "kv_role":"kv_producer" for Producer, or use only one of the two connectors.',
        ),
        (
            lambda last: inside(other("Producer", "kv_consumer"), last=last),
            "Producer may load KV too",
            "or use only one of the two connectors.",
        ),
        (
            lambda last: inside(other("Producer"), other("Producer", "kv_both"), last=last),
            "Producer may load KV too",
            "or use only one of the two connectors.",
        ),
        (
            lambda last: inside(other("Talker"), last=last),
            "Talker and TieredContinuumConnector both need vLLM's handshake",
            "use only one of the two connectors.",
        ),
        (
            lambda last: inside(other("Producer"), last=last, kv_load_failure_policy="fail"),
            "it reads kv_load_failure_policy only for MultiConnector",
            'add "kv_load_failure_policy":"recompute" next to "kv_connector":"MultiConnector".',
        ),
        (
            lambda last: inside(other("Producer"), last=last, kv_role="kv_producer"),
            "vLLM frees blocks that TieredContinuumConnector is still filling",
            'set "kv_role":"kv_both" next to "kv_connector":"MultiConnector".',
        ),
    ],
)
def test_unsupported_combinations_are_refused_with_a_remedy(
    make_rig: MakeRig,
    last: bool,
    made: Callable[[bool], Callable[[Config], Config]],
    why: str,
    instead: str,
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        make_rig(around=made(last))
    sentence = str(caught.value)
    assert why in sentence
    assert sentence.endswith(instead)
    assert "\n" not in sentence


def test_nixl_as_a_producer_is_refused_for_its_handshake(make_rig: MakeRig) -> None:
    """NIXL would receive this connector's handshake instead of its own, and fail at startup."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    with pytest.raises(UnsupportedError, match="NixlConnector and TieredContinuumConnector both"):
        make_rig(around=inside(nixl))


def test_two_instances_of_this_connector_are_refused(make_rig: MakeRig) -> None:
    with pytest.raises(UnsupportedError, match="more than once: remove all but one"):
        make_rig(around=lambda ours: inside(ours)(ours))


# -- next to connectors that only produce --------------------------------------------


@pytest.fixture(params=[False, True], ids=["ours first", "ours last"])
def rig(request: pytest.FixtureRequest, make_rig: MakeRig) -> Rig:
    return make_rig(around=inside(other("Producer"), last=request.param))


def test_pages_are_saved_and_restored_next_to_a_producer(rig: Rig) -> None:
    prompt = text(200, seed=1)
    assert rig.ask("one", prompt) == expected(prompt, 4)
    rig.now += 10
    rig.fill()
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 199
    rig.check_clean()


def test_the_handshake_arrives_next_to_a_producer(rig: Rig) -> None:
    said = rig.worker.get_handshake_metadata()
    assert said.handshake == rig.worker_half.handshake()
    assert rig.pages.book.bandwidth == said.handshake.speeds.copy


def test_a_failed_restore_is_recomputed_next_to_a_producer(rig: Rig) -> None:
    prompt = text(200, seed=1)
    rig.ask("one", prompt)
    rig.now += 10
    rig.fill()
    faulty = rig.inject(FaultyTransfer)
    faulty.fail_next(Direction.LOAD, {1})
    assert rig.ask("two", prompt) == expected(prompt, 4)
    assert rig.count("restore_failures") == 1
    rig.check_clean()


@pytest.fixture(params=[False, True], ids=["ours first", "ours last"])
def receiving(request: pytest.FixtureRequest, make_rig: MakeRig) -> Rig:
    """A rig with a second connector that loads KV although it is declared a producer."""
    from tests.vllm.producers import Receiver

    made = make_rig(around=inside(other("Receiver"), last=request.param))
    Receiver.cells = made.memory.numpy().reshape(made.options.blocks, 16, CELL)
    Receiver.under_way = {}
    return made


def test_blocks_that_another_connector_still_fills_are_not_saved(receiving: Rig) -> None:
    rig, prompt = receiving, text(200, seed=1)
    assert rig.ask("remote", prompt) == expected(prompt, 4)
    rig.now += 10
    rig.fill()
    assert rig.ask("again", prompt) == expected(prompt, 4), "what was saved is what came"
    assert rig.count("prompt_tokens_cpu") == 199
    rig.check_clean()


def test_nothing_is_saved_of_a_request_aborted_while_another_connector_fills_it(
    receiving: Rig,
) -> None:
    rig, prompt = receiving, text(200, seed=1)
    rig.add("remote", prompt, params={"job_id": "j"})
    rig.step()
    rig.abort("remote")
    rig.run()
    assert len(rig.index) == 0
    assert len(rig.pins) == 0
    assert rig.ask("again", prompt) == expected(prompt, 4)
    rig.half.release_all()
    rig.check_clean()


@pytest.mark.parametrize("mode", list(RestoreMode))
def test_a_prompt_that_both_have_is_loaded_once(receiving: Rig, mode: RestoreMode) -> None:
    rig, prompt = receiving, text(200, seed=1)
    rig.pages.restores.policy = AlwaysRestore(mode)
    rig.ask("one", prompt)
    rig.now += 10
    rig.fill()
    assert rig.ask("remote", prompt) == expected(prompt, 4)
    rig.check_clean()
