"""Operations are generators that own resources, and can be ended at every wait."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from tiered_kv.connectors.runtime.snapshots.operations import (
    LONGEST_WAIT_S,
    MOST_AT_ONCE,
    OUTCOMES_KEPT,
    Operations,
    Steps,
    Wait,
    file_work,
)
from tiered_kv.json_fields import JsonObject
from tiered_kv.snapshot.manifest import SnapshotError


@dataclass(frozen=True, slots=True)
class Answer(JsonObject):
    """Result of an operation in these tests."""

    answer: int


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operations(clock: Clock) -> Operations:
    return Operations(clock)


class Owner:
    """An operation that owns a resource until it ends."""

    def __init__(self) -> None:
        self.owns, self.over = False, False

    def test(self) -> bool:
        return self.over

    def steps(self) -> Steps:
        self.owns = True
        try:
            yield Wait("something", self.test)
        finally:
            self.owns = False
        return Answer(1)


def test_an_operation_continues_once_its_wait_has_ended(operations: Operations) -> None:
    owner = Owner()
    number = operations.begin(owner.steps())
    operations.advance()
    assert operations.outcome(number) == {"state": "running", "doing": "something"}
    owner.over = True
    operations.poll()
    assert owner.owns, "polling does not go on"
    operations.advance()
    assert operations.outcome(number) == {"state": "done", "result": {"answer": 1}}
    assert not operations.under_way


def test_a_failing_condition_ends_only_its_own_operation(operations: Operations) -> None:
    broken, other, fails = Owner(), Owner(), [False]
    first = operations.begin(_waits_for(fails, broken))
    second = operations.begin(other.steps())
    fails[0] = other.over = True

    operations.advance()

    assert operations.outcome(first)["state"] == "failed"
    assert not broken.owns
    assert operations.outcome(second)["state"] == "done"


def _waits_for(fails: list[bool], owner: Owner) -> Steps:
    def over() -> bool:
        if fails[0]:
            raise KeyError("injected")
        return False

    owner.owns = True
    try:
        yield Wait("something that breaks", over)
    finally:
        owner.owns = False
    return Answer(0)


def test_an_operation_that_waits_too_long_is_ended(operations: Operations, clock: Clock) -> None:
    owner = Owner()
    number = operations.begin(owner.steps())
    clock.now = LONGEST_WAIT_S
    operations.advance()
    assert operations.outcome(number)["state"] == "running"
    clock.now += 1
    operations.poll()
    assert not owner.owns
    assert "too long: something" in operations.outcome(number)["why"]


def undo() -> None:
    raise RuntimeError("injected")


def test_all_operations_can_be_ended_although_one_fails_to_undo(operations: Operations) -> None:
    def stubborn() -> Steps:
        try:
            yield Wait("something", lambda: False)
            return Answer(0)
        finally:
            undo()

    owner = Owner()
    numbers = [operations.begin(stubborn()), operations.begin(owner.steps())]
    operations.end_all("The engine ends.")
    assert not owner.owns
    assert {operations.outcome(one)["why"] for one in numbers} == {"The engine ends."}
    assert not operations.under_way


def test_work_that_has_not_started_is_cancelled(operations: Operations) -> None:
    work = Future[int]()

    def steps() -> Steps:
        return Answer((yield from file_work("files", work)))

    number = operations.begin(steps())
    operations.end_all("The cache was reset during the operation: try again.")
    assert work.cancelled()
    work = Future()
    number = operations.begin(steps())
    work.set_result(3)
    operations.advance()
    assert operations.outcome(number)["result"] == {"answer": 3}


def test_a_limited_number_of_outcomes_is_kept(operations: Operations) -> None:
    def refuse(i: int) -> Steps:
        yield Wait("nothing", lambda: True)
        raise SnapshotError(f"{i}")

    numbers = [operations.begin(refuse(i)) for i in range(OUTCOMES_KEPT + 9)]
    assert operations.outcome(numbers[8])["why"].startswith("The outcome")
    assert operations.outcome(numbers[9])["why"] == "9"
    assert not operations.full
    for _ in range(MOST_AT_ONCE):
        operations.begin(Owner().steps())
    assert operations.full
