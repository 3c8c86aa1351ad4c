"""``bench.identities``: the turns that count as recognised, and the requests that are generated."""

from __future__ import annotations

import pytest

from tiered_kv.bench.identities.recorded import Client, clients
from tiered_kv.bench.identities.replay import Recognised, Sent, judge
from tiered_kv.trace.turn_record import TurnRecord

MAIN, CHILD = ("main", None), ("child", "main")


def judged(*turns: tuple[tuple[str, str | None], str | None, str | None]) -> Recognised:
    """Return the result for the turns of one client.

    Each turn is given with the agent that sent it, the parent of this agent, and the job and parent
    job that the server recognised.
    """
    sent = [Sent("c", 0, "/v1/messages", agent, parent) for (agent, parent), _, _ in turns]
    records = [
        TurnRecord(turn=1, request="r", arrived=float(number), job=job, parent=parent)
        for number, (_, job, parent) in enumerate(turns)
    ]
    return judge(sent, reversed(records))["c"]


def test_an_agent_with_a_job_of_its_own_is_known() -> None:
    found = judged((MAIN, "S", None), (CHILD, "T", "S"), (MAIN, "S", None))
    assert found == Recognised(turns=3, known=3, told=1, parent_known=1)


@pytest.mark.parametrize(
    ("turns", "known", "parent_known"),
    [
        ([(MAIN, "S", None), (CHILD, "S", None)], 0, 0),  # two agents merged into one job
        ([(MAIN, "S", None), (CHILD, "T", "U")], 2, 0),  # the child has a wrong parent job
        # One agent was split into two jobs.
        ([(MAIN, "S", None), (MAIN, "T", None), (CHILD, "U", "S")], 1, 0),
        ([(MAIN, None, None), (CHILD, "T", None)], 1, 0),  # the main agent's turn has no job
    ],
)
def test_agents_without_a_job_of_their_own_are_not_known(
    turns: list[tuple[tuple[str, str | None], str | None, str | None]],
    known: int,
    parent_known: int,
) -> None:
    found = judged(*turns)
    assert (found.turns, found.known) == (len(turns), known)
    assert (found.told, found.parent_known) == (1, parent_known)


def test_a_trace_that_lacks_a_turn_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="0 turns, but 1 requests were sent"):
        judge([Sent("c", 0, "/v1/messages", "main", None)], [])


@pytest.mark.parametrize("client", clients(), ids=lambda one: one.name)
def test_recorded_parents_send_requests_too(client: Client) -> None:
    agents = {turn.agent for turn in client.turns}
    assert set(client.parents) | set(client.parents.values()) <= agents
    assert client.turns[0].agent == "main"


def test_a_second_user_differs_in_ids_only() -> None:
    for client in clients():
        again = client.again()
        assert [one.agent for one in again.turns] == [one.agent for one in client.turns]
        assert not client.ids & again.ids
        assert len(again.ids) == len(client.ids)
