"""Jobs are told from prompts: conversations over a toy hash chain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs import lineage as module
from tiered_kv.policies.jobs.hints import read_hints
from tiered_kv.policies.jobs.lineage import MAX_TWINS, TOLERANCE, Inferred, Lineage

BLOCK = 4
SYSTEM = list(range(100, 141))
"""A system prompt that ends within a block."""
ASSISTANT = [1, 2, 3, 4, 5]
"""How a chat template closes a question, in as many tokens as ChatML does."""
TOOL = [50, 51, 52, 53, 54, 55, 56]


def chained(tokens: Sequence[int]) -> list[bytes]:
    """A hash for every full block, of all tokens up to its end."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [repr(list(tokens[:end])).encode() for end in ends]


class Agents:
    """An engine's clients, none of which names its job."""

    def __init__(self) -> None:
        self.lineage = Lineage(BLOCK)

    def ask(self, prompt: Sequence[int], salt: str = "") -> Inferred:
        inferred = self.lineage.arrived(salt, chained(prompt), prompt)
        assert inferred is not None
        return inferred

    def end(self, turn: Inferred, answer: Sequence[int] = (), *, aborted: bool = False) -> None:
        self.lineage.ended(turn.job, answer, aborted=aborted)

    def asked(self, prompt: Sequence[int], answer: Sequence[int] = (), salt: str = "") -> Inferred:
        """A turn from its beginning to its end."""
        turn = self.ask(prompt, salt)
        self.end(turn, answer)
        return turn


@pytest.fixture
def agents() -> Agents:
    return Agents()


def question(*tokens: int) -> list[int]:
    return [*SYSTEM, *tokens, *ASSISTANT]


# -- a conversation -----------------------------------------------------------------


@pytest.mark.parametrize("length", range(9))
def test_a_job_is_followed_from_turn_to_turn(agents: Agents, length: int) -> None:
    """At any place of a prompt's end within a block."""
    prompt = question(*range(700, 700 + length))
    for number in range(1, 6):
        turn = agents.asked(prompt, answer=[90, 91])
        assert turn.turn == number
        assert turn.job == JobKey("", "(inferred) 1")
        prompt = [*prompt, 90, 91, *TOOL, *ASSISTANT]
    assert len(agents.lineage) == 1


def test_the_answer_need_not_come_back_as_it_was(agents: Agents) -> None:
    """It is tokenised anew, and its thoughts are cut."""
    first = agents.asked(question(7), answer=list(range(800, 900)))
    again = agents.asked([*question(7), 899, *TOOL])
    assert again == Inferred(first.job, 2)


@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize("lost", range(7))
def test_the_end_of_a_prompt_may_not_come_back(agents: Agents, lost: int, length: int) -> None:
    """A template opens a thought that it leaves out of the history; more is another prompt."""
    prompt = [*question(*range(length)), *range(60, 66)]
    first = agents.asked(prompt)
    after = agents.asked([*prompt[: len(prompt) - lost], 77, 78, *TOOL, *ASSISTANT])
    assert (after.job == first.job) == (lost <= TOLERANCE)


def test_a_common_system_prompt_joins_nothing(agents: Agents) -> None:
    """Questions of one token, all behind the same full blocks."""
    for word in range(200, 260):
        assert agents.asked(question(word)).turn == 1
    assert len(agents.lineage) == 60
    for word in range(200, 260):
        turn = agents.asked([*question(word), 90, *TOOL, *ASSISTANT])
        assert turn == Inferred(JobKey("", f"(inferred) {word - 199}"), 2)


def test_a_longer_question_is_not_the_answer_to_a_shorter_one(agents: Agents) -> None:
    agents.asked(question(7))
    assert agents.asked(question(7, 8, 9, 10, 11, 12)).turn == 1


def test_a_history_that_was_cut_or_summarised_is_a_new_job(agents: Agents) -> None:
    agents.asked(prompt := [*question(7), *TOOL, *ASSISTANT])
    assert agents.asked(prompt[5:] + TOOL).turn == 1
    assert agents.asked([*SYSTEM, 5, *TOOL, *TOOL, *ASSISTANT]).turn == 1


def test_a_prompt_too_short_to_be_known_again_has_no_job(agents: Agents) -> None:
    short = list(range(BLOCK + TOLERANCE - 1))
    assert agents.lineage.arrived("", chained(short), short) is None
    assert agents.lineage.arrived("", [], []) is None
    assert len(agents.lineage) == 0
    assert agents.asked([*short, 7]).turn == 1


def test_a_prompt_without_hashes_has_no_job(agents: Agents) -> None:
    assert agents.lineage.arrived("", [], SYSTEM) is None


# -- forks, repeats, samples --------------------------------------------------------


def test_forks_are_jobs_of_their_own(agents: Agents) -> None:
    trunk = agents.asked(question(7), answer=[90])
    agents.asked([*question(7), 90, *TOOL, *ASSISTANT], answer=[91])
    fork = agents.asked([*question(7), 90, 66, 66, *ASSISTANT], answer=[92])
    assert fork.job != trunk.job
    assert fork.turn == 1
    on_trunk = agents.asked([*question(7), 90, *TOOL, *ASSISTANT, 91, *TOOL])
    on_fork = agents.asked([*question(7), 90, 66, 66, *ASSISTANT, 92, *TOOL])
    assert on_trunk == Inferred(trunk.job, 3)
    assert on_fork == Inferred(fork.job, 2)


def test_what_extends_a_running_turn_is_a_fork(agents: Agents) -> None:
    running = agents.ask(question(7))
    assert agents.ask([*question(7), *TOOL, *ASSISTANT]).job != running.job
    agents.end(running)
    assert agents.ask([*question(7), 9, *TOOL, *ASSISTANT]) == Inferred(running.job, 2)


def test_a_prompt_that_is_repeated_is_a_job_of_its_own(agents: Agents) -> None:
    assert agents.asked(question(7)).job != agents.asked(question(7)).job


def test_a_prompt_repeated_after_an_abort_is_the_same_turn(agents: Agents) -> None:
    first = agents.asked(question(7))
    prompt = [*question(7), *TOOL, *ASSISTANT]
    for _ in range(3):
        turn = agents.ask(prompt)
        agents.end(turn, [90], aborted=True)
        assert turn == Inferred(first.job, 2)
    assert agents.asked([*prompt, 90, *TOOL]) == Inferred(first.job, 3)


def test_of_several_samples_the_one_that_was_chosen_goes_on(agents: Agents) -> None:
    samples = [agents.ask(question(7)) for _ in range(5)]
    assert len({sample.job for sample in samples}) == 5
    for n, sample in enumerate(samples):
        agents.end(sample, answer=[90, 91, 300 + n])
    chosen = agents.asked([*question(7), 90, 91, 302, *TOOL])
    assert chosen == Inferred(samples[2].job, 2)


def test_of_very_many_samples_the_latest_are_compared(agents: Agents) -> None:
    for n in range(3 * MAX_TWINS):
        latest = agents.asked(question(7), answer=[90, 91, 300 + n])
    assert agents.asked([*question(7), 90, 91, 299 + 3 * MAX_TWINS, *TOOL]).job == latest.job


def test_twins_that_nothing_tells_apart_go_on_in_order(agents: Agents) -> None:
    """Two runs of one task, whose answers are cut: any choice may be wrong, but not both."""
    first, second = agents.ask(question(7)), agents.ask(question(7))
    agents.end(first)
    agents.end(second)
    prompt = [*question(7), *TOOL, *ASSISTANT]
    assert agents.asked(prompt) == Inferred(first.job, 2)
    assert agents.asked(prompt) == Inferred(second.job, 2)


def test_a_twin_that_was_given_up_long_ago_does_not_return(agents: Agents) -> None:
    agents.asked(question(7))
    for other in range(300, 310):
        agents.asked(question(other))
    second = agents.asked(question(7))
    assert agents.asked([*question(7), *TOOL, *ASSISTANT]) == Inferred(second.job, 2)


def test_a_second_run_follows_the_steps_of_the_first(agents: Agents) -> None:
    """While it does, what it extends is its own last turn, though the first went further."""
    prompts = [question(7) + n * [*TOOL, *ASSISTANT] for n in range(4)]
    first = [agents.asked(prompt).job for prompt in prompts]
    second = [agents.asked(prompt).job for prompt in prompts[:3]]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


# -- salts, names, bounds -----------------------------------------------------------


def test_no_turn_is_given_to_a_job_of_another_salt(agents: Agents) -> None:
    """Even if the hashes were the same."""
    mine = agents.asked(question(7), salt="mine")
    theirs = agents.asked([*question(7), *TOOL], salt="theirs")
    assert theirs.turn == 1
    assert theirs.job.salt == "theirs"
    assert agents.asked([*question(7), *TOOL], salt="mine") == Inferred(mine.job, 2)


def test_a_client_cannot_name_an_inferred_job(agents: Agents) -> None:
    hints = read_hints({"job_id": agents.asked(question(7)).job.name})
    assert (hints.job_id, hints.ignored) == (None, 1)


def test_a_job_that_is_over_has_no_next_turn(agents: Agents) -> None:
    job = agents.asked(question(7)).job
    agents.lineage.forget(job)
    agents.lineage.forget(job)
    agents.lineage.ended(job, [], aborted=False)
    assert len(agents.lineage) == 0
    assert agents.asked([*question(7), *TOOL]).job != job


def test_the_job_longest_unheard_of_is_forgotten(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_JOBS", 3)
    slow, idle, other = (agents.ask(question(word)) for word in (5, 6, 7))
    for turn in (idle, other, slow):
        agents.end(turn)
    assert agents.asked([*question(7), *TOOL, *ASSISTANT]) == Inferred(other.job, 2)
    agents.asked(question(8))
    assert len(agents.lineage) == 3
    assert agents.asked([*question(5), *TOOL]) == Inferred(slow.job, 2)
    assert agents.asked([*question(7), *TOOL, *ASSISTANT, *TOOL]) == Inferred(other.job, 3)
    assert agents.asked([*question(6), *TOOL]).turn == 1


def test_repeats_without_end_are_not_all_remembered(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A health check, say."""
    monkeypatch.setattr(module, "MAX_NEIGHBOURS", 10)
    for _ in range(100):
        latest = agents.asked(question(7))
    assert len(agents.lineage) == 10
    found = agents.asked([*question(7), *TOOL]).job
    assert int(found.name.split()[1]) > int(latest.job.name.split()[1]) - 10


# -- whatever clients do ------------------------------------------------------------


@dataclass
class Conversation:
    """What the lineage should make of a client: its prompts, and who they were given to."""

    salt: str
    prompts: list[list[int]]
    turn: Inferred
    running: bool = True
    aborted: bool = False
    answer: list[int] = field(default_factory=list)


class Conversations(RuleBasedStateMachine):
    """Trees of conversations, many of them with the same beginnings.

    Every answer and every message holds a token that never comes again, so there is one right
    job for each turn.
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

    def ask_anew(self, salt: str, prompt: list[int]) -> None:
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
        self.ask_anew(salt, question(*range(words), next(self.fresh)))

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
            self.ask_anew(salt, prompt)

    @rule(data=st.data(), salt=st.sampled_from(["", "a", "b"]))
    @precondition(lambda self: self.all)
    def repeat(self, data: st.DataObject, salt: str) -> None:
        """The same prompt again: a sample, or another client with the same task."""
        prompt = data.draw(st.sampled_from(self.all)).prompts[-1]
        if not self.waiting_for(salt, prompt):
            self.ask_anew(salt, prompt)

    def waiting_for(self, salt: str, prompt: list[int]) -> bool:
        """Whether the prompt may be what comes next in some conversation."""
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
        assert not self.agents.lineage._places, "nothing is left of jobs that are over"


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=60, stateful_step_count=30)
