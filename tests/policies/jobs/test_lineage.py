"""Jobs are inferred from prompts, in conversations with a simplified hash chain."""

from __future__ import annotations

import pytest

from tests.policies.jobs.agents import ASSISTANT, BLOCK, SYSTEM, TOOL, Agents, chained, question
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs import lineage as module
from tiered_kv.policies.jobs.hints import read_hints
from tiered_kv.policies.jobs.lineage import MAX_TWINS, TOLERANCE, Inferred


@pytest.fixture
def agents() -> Agents:
    return Agents()


# -- a conversation -----------------------------------------------------------------


@pytest.mark.parametrize("length", range(9))
def test_a_job_is_followed_from_turn_to_turn(agents: Agents, length: int) -> None:
    """Five prompts, each of which extends the one before, are turns of one job. The first prompt
    may end at any position within a block."""
    prompt = question(*range(700, 700 + length))
    for number in range(1, 6):
        turn = agents.asked(prompt, answer=[90, 91])
        assert turn.turn == number
        assert turn.job == JobKey("", "(inferred) 1")
        prompt = [*prompt, 90, 91, *TOOL, *ASSISTANT]
    assert len(agents.lineage) == 1


def test_the_answer_may_return_changed(agents: Agents) -> None:
    """A prompt continues its job even if the answer in it has other tokens, because the client has
    tokenized it again and removed the reasoning."""
    first = agents.asked(question(7), answer=list(range(800, 900)))
    again = agents.asked([*question(7), 899, *TOOL])
    assert again == Inferred(first.job, 2)


@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize("lost", range(7))
def test_the_end_of_a_prompt_may_be_missing_in_the_next_one(
    agents: Agents, lost: int, length: int
) -> None:
    """A chat template may open a reasoning section that it omits from the history. The next prompt
    then lacks a few tokens of the previous one. If more tokens are missing, it starts another
    job."""
    prompt = [*question(*range(length)), *range(60, 66)]
    first = agents.asked(prompt)
    after = agents.asked([*prompt[: len(prompt) - lost], 77, 78, *TOOL, *ASSISTANT])
    assert (after.job == first.job) == (lost <= TOLERANCE)


def test_a_common_system_prompt_joins_nothing(agents: Agents) -> None:
    """Sixty questions differ in one token, after the same full blocks. Each starts a job of its
    own, and its next turn continues that job."""
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


def test_only_the_latest_of_many_samples_are_compared(agents: Agents) -> None:
    for n in range(3 * MAX_TWINS):
        latest = agents.asked(question(7), answer=[90, 91, 300 + n])
    assert agents.asked([*question(7), 90, 91, 299 + 3 * MAX_TWINS, *TOOL]).job == latest.job


def test_indistinguishable_twins_continue_in_order(agents: Agents) -> None:
    """Two runs have the same prompt, and their next prompts do not contain the answers. The next
    turns are assigned to the two jobs in order. They may be swapped, but both jobs continue."""
    first, second = agents.ask(question(7)), agents.ask(question(7))
    agents.end(first)
    agents.end(second)
    prompt = [*question(7), *TOOL, *ASSISTANT]
    assert agents.asked(prompt) == Inferred(first.job, 2)
    assert agents.asked(prompt) == Inferred(second.job, 2)


def test_a_twin_that_was_abandoned_long_ago_gets_no_turn(agents: Agents) -> None:
    agents.asked(question(7))
    for other in range(300, 310):
        agents.asked(question(other))
    second = agents.asked(question(7))
    assert agents.asked([*question(7), *TOOL, *ASSISTANT]) == Inferred(second.job, 2)


def test_a_second_run_follows_the_steps_of_the_first(agents: Agents) -> None:
    """Two runs send the same prompts. While the first run is further ahead, each prompt of the
    second run extends the second run's own last turn."""
    prompts = [question(7) + n * [*TOOL, *ASSISTANT] for n in range(4)]
    first = [agents.asked(prompt).job for prompt in prompts]
    second = [agents.asked(prompt).job for prompt in prompts[:3]]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_no_turn_is_given_to_a_job_of_another_salt(agents: Agents) -> None:
    """Prompts of different salts are never one job, even if their hashes are equal."""
    mine = agents.asked(question(7), salt="mine")
    theirs = agents.asked([*question(7), *TOOL], salt="theirs")
    assert theirs.turn == 1
    assert theirs.job.salt == "theirs"
    assert agents.asked([*question(7), *TOOL], salt="mine") == Inferred(mine.job, 2)


# -- salts, names, bounds -----------------------------------------------------------


def test_a_client_cannot_name_an_inferred_job(agents: Agents) -> None:
    hints = read_hints({"job_id": agents.asked(question(7)).job.name})
    assert (hints.job_id, hints.ignored) == (None, 1)


def test_a_finished_job_has_no_next_turn(agents: Agents) -> None:
    job = agents.asked(question(7)).job
    agents.lineage.forget(job)
    agents.lineage.forget(job)
    agents.lineage.ended(job, [], aborted=False)
    assert len(agents.lineage) == 0
    assert agents.asked([*question(7), *TOOL]).job != job


def test_the_least_recently_active_job_is_forgotten(
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


def test_only_some_of_endless_repeats_are_remembered(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A health check sends the same prompt many times. Only the latest jobs that started with this
    prompt are remembered."""
    monkeypatch.setattr(module, "MAX_NEIGHBOURS", 10)
    for _ in range(100):
        latest = agents.asked(question(7))
    assert len(agents.lineage) == 10
    found = agents.asked([*question(7), *TOOL]).job
    assert int(found.name.split()[1]) > int(latest.job.name.split()[1]) - 10
