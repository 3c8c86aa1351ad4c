"""The waiting jobs of a client count against other clients only up to an equal share, and fully
against the client itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.admission.working_set import Blocks, FairShare

ROOM = Blocks(100.0, 300.0)
waiting = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Blocks, st.floats(0, 1000), st.floats(0, 1000))
)


def test_a_client_that_exceeds_its_share_only_delays_itself() -> None:
    fair = FairShare.of({"greedy": Blocks(90.0, 200.0), "modest": Blocks(10.0, 20.0)}, ROOM)
    assert fair.of_others("modest", anywhere=False) == 40.0
    assert fair.of_others("modest", anywhere=True) == 50.0
    assert fair.of_others("greedy", anywhere=False) == 0.0
    assert fair.of_others("new", anywhere=False) == 40.0


def test_a_client_that_is_alone_gets_half() -> None:
    fair = FairShare.of({"alone": Blocks(90.0, 90.0)}, ROOM)
    assert fair.of_others("new", anywhere=False) == 40.0
    assert fair.of_others("alone", anywhere=False) == 0.0


def test_everything_counts_before_any_job_waits() -> None:
    assert FairShare().of_others("new", anywhere=True) == 0.0


@given(waiting, st.sampled_from("abcde"))
def test_what_counts_of_others_is_no_more_than_their_shares(
    left: dict[str, Blocks], asks: str
) -> None:
    fair = FairShare.of(left, ROOM)
    others = sum(one.vram for client, one in left.items() if client != asks)
    counted = others - fair.of_others(asks, anywhere=False)
    most = sum(1 for client in left if client != asks) * ROOM.vram / max(2, len(left))
    assert -1e-6 <= counted <= min(others, most) + 1e-6
    assert fair.of_others(asks, anywhere=False) == pytest.approx(
        sum(
            max(0.0, one.vram - ROOM.vram / max(2, len(left)))
            for c, one in left.items()
            if c != asks
        )
    )
