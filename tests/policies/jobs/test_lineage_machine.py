"""Random conversations of random clients, in which each turn has exactly one right job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.policies.jobs.agents import ASSISTANT, TOOL, Agents, question
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.lineage import Inferred


@dataclass
class Conversation:
    """A conversation of one client: its prompts, and the job that they belong to."""

    salt: str
    prompts: list[list[int]]
    turn: Inferred
    running: bool = True
    aborted: bool = False
    answer: list[int] = field(default_factory=list)


class Conversations(RuleBasedStateMachine):
    """Trees of conversations, many of which start with the same tokens.

    Every answer and every message contains a unique token, so that each turn has exactly one right
    job.
    """

    def __init__(self) -> None:
        super().__init__()
        self.agents = Agents()
        self.all: list[Conversation] = []
        self.fresh = itertools.count(1000)
        self.chains: dict[JobKey, list[tuple[int, list[int]]]] = {}

    def ask(self, salt: str, prompt: list[int]) -> Inferred:
        turn = self.agents.ask(prompt, salt)
        assert turn.job.salt == salt
        self.chains.setdefault(turn.job, []).append((turn.turn, prompt))
        return turn

    def ask_as_new_job(self, salt: str, prompt: list[int]) -> None:
        known = set(self.chains)
        turn = self.ask(salt, prompt)
        assert turn.job not in known
        assert turn.turn == 1
        self.all.append(Conversation(salt, [prompt], turn))

    def pick(self, data: st.DataObject, *, running: bool) -> Conversation | None:
        found = [one for one in self.all if one.running == running]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(salt=st.sampled_from(["", "a", "b"]), words=st.integers(0, 9))
    def begin(self, salt: str, words: int) -> None:
        self.ask_as_new_job(salt, question(*range(words), next(self.fresh)))

    @rule(data=st.data(), length=st.integers(1, 80), aborted=st.booleans())
    def end(self, data: st.DataObject, length: int, aborted: bool) -> None:
        one = self.pick(data, running=True)
        if one is None:
            return
        one.answer = [next(self.fresh), *range(length)]
        one.running, one.aborted = False, aborted
        self.agents.end(one.turn, one.answer, aborted=aborted)

    @rule(data=st.data(), words=st.integers(0, 9))
    def go_on(self, data: st.DataObject, words: int) -> None:
        one = self.pick(data, running=False)
        if one is None:
            return
        prompt = [*one.prompts[-1], *one.answer, next(self.fresh), *range(words), *ASSISTANT]
        turn = self.ask(one.salt, prompt)
        assert turn == Inferred(one.turn.job, one.turn.turn + 1)
        one.prompts.append(prompt)
        one.turn, one.running, one.aborted = turn, True, False

    @rule(data=st.data())
    def fork_a_running_turn(self, data: st.DataObject) -> None:
        one = self.pick(data, running=True)
        if one is not None:
            self.fork(one.salt, one.prompts[-1])

    @rule(data=st.data())
    def fork_an_earlier_turn(self, data: st.DataObject) -> None:
        forkable = [one for one in self.all if len(one.prompts) > 1]
        if forkable:
            one = data.draw(st.sampled_from(forkable))
            self.fork(one.salt, data.draw(st.sampled_from(one.prompts[:-1])))

    def fork(self, salt: str, prompt: list[int]) -> None:
        prompt = [*prompt, next(self.fresh), *TOOL]
        if not self.waiting_for(salt, prompt):
            self.ask_as_new_job(salt, prompt)

    @rule(data=st.data(), salt=st.sampled_from(["", "a", "b"]))
    @precondition(lambda self: self.all)
    def repeat(self, data: st.DataObject, salt: str) -> None:
        """Send the same prompt again, like a second sample or another client with the same task."""
        prompt = data.draw(st.sampled_from(self.all)).prompts[-1]
        if not self.waiting_for(salt, prompt):
            self.ask_as_new_job(salt, prompt)

    def waiting_for(self, salt: str, prompt: list[int]) -> bool:
        """Return True if the prompt may be the next one of a conversation."""
        return any(
            one.salt == salt
            and not one.running
            and prompt[: len(one.prompts[-1])] == one.prompts[-1]
            and (one.aborted or prompt != one.prompts[-1])
            for one in self.all
        )

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        aborted = [one for one in self.all if one.aborted]
        if not aborted:
            return
        one = data.draw(st.sampled_from(aborted))
        turn = self.agents.ask(one.prompts[-1], one.salt)
        (found,) = (other for other in aborted if other.turn.job == turn.job)
        assert found.prompts[-1] == one.prompts[-1]
        assert turn == found.turn
        found.running, found.aborted = True, False

    @rule(data=st.data())
    @precondition(lambda self: self.all)
    def leave_for_good(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        self.agents.lineage.forget(one.turn.job)
        self.all.remove(one)

    @invariant()
    def every_job_is_a_chain(self) -> None:
        for turns in self.chains.values():
            assert [number for number, _ in turns] == list(range(1, len(turns) + 1))
            for (_, before), (_, after) in itertools.pairwise(turns):
                assert after[: len(before)] == before

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert len(self.agents.lineage) == len(self.all)

    def teardown(self) -> None:
        for one in self.all:
            self.agents.lineage.forget(one.turn.job)
        assert self.agents.lineage.places == 0, "nothing is left of jobs that are over"


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=60, stateful_step_count=30)
