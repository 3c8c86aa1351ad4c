"""A prompt that leaves out the end of its job's earlier context supersedes that context, once a
second turn continues from the new prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.keys import PageKey
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.policies import Always
from tiered_kv.testing.rig import EngineRig

BLOCK = 16
SYSTEM = text(2 * BLOCK, seed=1)
WAITS = Forecast(np.minimum(GRID / 100, 1.0))


@dataclass
class Client:
    """A client of one agent. It checks every answer.

    Attributes:
        params: the agent's ids.
        held: pages of all its contexts so far.
        live: pages of the context of its last turn.
    """

    rig: EngineRig
    params: dict[str, Any]
    salt: str | None = None
    held: set[PageKey] = field(default_factory=set)
    live: set[PageKey] = field(default_factory=set)

    def ask(self, *prompts: list[int]) -> list[list[int]]:
        """Send prompts concurrently. Returns each with its answer: a start for the next prompt."""
        rig = self.rig
        names = [f"{len(rig.prompts)}-{at}" for at, _ in enumerate(prompts)]
        for name, prompt in zip(names, prompts, strict=True):
            rig.add(name, prompt, max_tokens=8, params=self.params, salt=self.salt)
        turns = [rig.turn(name) for name in names]
        rig.run()
        rig.settle()
        rig.now += 1.0
        for name, prompt in zip(names, prompts, strict=True):
            assert rig.outputs[name] == expected(prompt, 8)
        self.live = set(turns[-1].save.pages)
        self.held.update(self.live)
        return [[*rig.prompts[name], *rig.outputs[name]] for name in names]

    def turn(self, prompt: list[int]) -> list[int]:
        """Send one prompt. Returns it with its answer."""
        return self.ask(prompt)[0]

    def superseded(self) -> set[PageKey]:
        """Pages in CPU memory that are superseded."""
        return set(filter(self.rig.index.superseded, self.held))


def said(seed: int, tokens: int = 60) -> list[int]:
    """Text of a user or a tool in a turn."""
    return text(tokens, seed=1000 + seed)


def make(make_engine: MakeEngine, slots: int = 400, **extra: Any) -> EngineRig:
    page = make_engine().half.facts.slot_bytes
    settings = {"cpu_gib": (slots * page + 1) / 2**30, "eviction": "worth", **extra}
    rig = make_engine(blocks=128, max_model_len=1024, extra=settings)
    rig.policy = Always(Decision(Tier.CPU, forecast=WAITS))
    return rig


@pytest.fixture
def rig(make_engine: MakeEngine) -> EngineRig:
    return make(make_engine)


@pytest.fixture
def client(rig: EngineRig) -> Client:
    return Client(rig, {"job_id": "j"})


def conversation(client: Client, seed: int = 0) -> list[int]:
    """Run two turns. Returns the context."""
    return client.turn([*client.turn([*SYSTEM, *said(seed)]), *said(seed + 1)])


def test_a_compacted_context_is_superseded_by_the_second_turn_after_it(client: Client) -> None:
    conversation(client)
    before = client.live
    summary = client.turn([*SYSTEM, *said(7)])
    assert client.rig.count("pages_superseded") == 0, "it may be a title"
    client.turn([*summary, *said(8)])
    assert len(before - client.live) == len(before) - len(SYSTEM) // BLOCK
    gone = client.superseded()
    assert before - client.live <= gone
    assert len(gone - before) <= 1, "where the first answer ended within a block"
    assert client.rig.count("pages_superseded") == len(gone)
    assert set(client.rig.index.least_valuable(len(gone))) == gone, "first to be evicted"
    client.turn([*summary, *said(8), *said(9)])
    client.rig.check_clean()


def test_a_retry_is_no_second_turn(client: Client) -> None:
    conversation(client)
    before = client.live
    client.rig.add("fails", [*SYSTEM, *said(7)], max_tokens=40, params=client.params)
    client.rig.step()
    client.rig.step()
    client.rig.abort("fails")
    client.rig.run()
    summary = client.turn([*SYSTEM, *said(7)])
    client.turn([*SYSTEM, *said(7)])
    assert client.rig.count("pages_superseded") == 0
    client.turn([*summary, *said(8)])
    assert client.superseded() >= before - client.live


def test_going_back_supersedes_the_branch_that_is_left(client: Client) -> None:
    context = conversation(client)
    left, early = client.live, context[: len(SYSTEM) + 60]
    client.turn([*early, *said(5)])
    edited = client.live
    back = client.turn([*context, *said(6)])
    assert not client.superseded() & (left | edited), "one turn on each branch since"
    client.turn([*back, *said(7)])
    assert edited - client.live <= client.superseded()
    assert not client.superseded() & client.live
    again = client.rig.count("prompt_tokens_recomputed")
    client.turn([*early, *said(5), *said(8)])
    assert client.rig.count("prompt_tokens_recomputed") - again < 2 * len(said(8)), "never deleted"
    assert not client.superseded() & client.live, "the pages are of use after all"


def test_after_an_earlier_prompt_is_repeated_the_longer_branch_is_kept(client: Client) -> None:
    first = [*SYSTEM, *said(0)]
    context = client.turn([*client.turn(first), *said(1)])
    left = client.live
    client.turn(first)
    back = client.turn([*context, *said(2)])
    assert not client.superseded() & left, "this prompt extends both"
    client.turn([*back, *said(3)])
    assert not client.superseded() & client.live


def test_side_requests_between_the_turns_supersede_no_conversation(client: Client) -> None:
    context = conversation(client)
    for number in range(6):
        talk = client.live
        client.turn([*text(40, seed=5), *said(100 + number)])
        side = client.live
        context = client.turn([*context, *said(200 + number)])
        assert not client.superseded() & (talk | client.live | side)
    assert client.rig.count("pages_superseded") > 0, "the answers to earlier side requests"


def test_a_compaction_between_side_requests_is_found(client: Client) -> None:
    context = conversation(client)
    client.turn([*text(40, seed=5), *said(100)])
    context = client.turn([*context, *said(2)])
    before = client.live
    client.turn([*text(40, seed=5), *said(101)])
    summary = client.turn([*SYSTEM, *said(7)])
    client.turn([*text(40, seed=5), *said(102)])
    client.turn([*summary, *said(8)])
    assert before - client.live <= client.superseded()


def test_several_answers_to_one_prompt_may_all_go_on(client: Client) -> None:
    """Several answers to the same prompt may all be continued, for example with ``n > 1`` or after
    concurrent requests. None of their contexts is superseded."""
    start = conversation(client)
    one, other = client.ask([*start, *said(2)], [*start, *said(3)])
    for number in range(4, 8):
        one = client.turn([*one, *said(number)])
        mine = client.live
        other = client.turn([*other, *said(10 + number)])
        assert not client.superseded() & (mine | client.live)
    prompt = [*one, *said(20)]
    same = client.ask(prompt, prompt)
    assert same[0] == same[1]
    client.turn([*same[0], *said(21)])
    assert not client.superseded() & client.live


@pytest.mark.parametrize(
    ("params", "salt"),
    [({"session_id": "s", "agent_id": "b"}, None), ({"session_id": "s"}, "another's")],
)
def test_another_agent_or_client_keeps_its_context(
    rig: EngineRig, params: dict[str, Any], salt: str | None
) -> None:
    mine, theirs = Client(rig, {"session_id": "s"}), Client(rig, params, salt)
    conversation(mine)
    conversation(theirs)  # the same text
    old = mine.live
    assert bool(old & theirs.live) is (salt is None)
    summary = mine.turn([*SYSTEM, *said(7)])
    mine.turn([*summary, *said(8)])
    assert not theirs.superseded() & theirs.live
    assert bool(mine.superseded() & old) is (salt is not None), "the pages are also theirs"


def test_a_superseded_page_that_is_used_is_like_any_other(client: Client) -> None:
    old = conversation(client)
    client.turn([*client.turn([*SYSTEM, *said(7)]), *said(8)])
    assert client.superseded()
    stranger = Client(client.rig, {"job_id": "another"})
    stranger.turn([*old, *said(9)])
    assert not client.superseded() & stranger.live


@pytest.mark.parametrize("ssd", [False, True])
def test_ten_compactions_leave_little_more_than_the_live_context(
    make_engine: MakeEngine, tmp_path: Path, ssd: bool
) -> None:
    """A client replaces its job's history ten times, while other jobs fill the tiers. Hardly any
    pages of its earlier contexts are left."""
    extra = {"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 0.002} if ssd else {}
    rig = make(
        make_engine, 96, codec="raw", **extra
    )  # with compression, memory might not run short
    client = Client(rig, {"job_id": "j"})
    others = [Client(rig, {"job_id": f"other-{n}"}) for n in range(4 + 4 * ssd)]
    contexts = [text(300, seed=50 + n) for n, _ in enumerate(others)]

    def press() -> None:
        for at, other in enumerate(others):
            contexts[at] = [*other.turn(contexts[at]), *said(at, 20)]
            if len(contexts[at]) > 500:
                contexts[at] = text(200, seed=len(rig.prompts))  # another task

    for number in range(10):
        context = [*SYSTEM, *said(100 * number)]
        for turn in range(5):
            context = [*client.turn(context), *said(100 * number + turn + 1, 48)]
            press()
    reclaimed = rig.count("ssd_pages_reclaimed")
    while ssd and rig.count("ssd_pages_reclaimed") == reclaimed:  # until SSD runs short again
        press()
    held = {key for key in client.held if rig.index.readable(key)}
    for tier in rig.tiers.values():
        held.update(tier.pages.index.present(client.held))
    assert rig.index.evictions > 500
    assert len(held - client.live) <= 0.3 * len(client.live)
    rig.check_clean()
