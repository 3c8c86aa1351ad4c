"""Keys change the view and never move it beyond the list of jobs."""

from __future__ import annotations

import random

from tests.top.made import engine, job, server
from tiered_kv.top.view import Action, JobOrder, View

TEN = server(*(job(n) for n in range(10)))


def test_paging_stops_at_the_last_job() -> None:
    view = View()
    tops = []
    for action in (
        Action.PREVIOUS_ROW,
        Action.NEXT_PAGE,
        Action.NEXT_ROW,
        Action.NEXT_PAGE,
        Action.NEXT_PAGE,
        Action.PREVIOUS_PAGE,
        Action.LAST,
        Action.FIRST,
    ):
        view = view.moved(action, TEN, rows=4)
        tops.append(view.top)
    assert tops == [0, 4, 5, 6, 6, 2, 6, 0]


def test_selecting_the_same_order_again_reverses_it_from_the_top() -> None:
    view = View(top=5).sorted_by(JobOrder.CONTEXT)
    assert view == View(JobOrder.CONTEXT)
    assert view.sorted_by(JobOrder.CONTEXT) == View(JobOrder.CONTEXT, backwards=True)
    assert view.sorted_by(JobOrder.CONTEXT).sorted_by(JobOrder.CONTEXT) == view


def test_engines_are_shown_one_after_the_other() -> None:
    three = server(job(1, engine=3), engines=(engine(0), engine(3), engine(5)))
    seen, view = [], View()
    for _ in range(5):
        view = view.moved(Action.NEXT_ENGINE, three, rows=4)
        seen.append(view.engine)
    assert seen == [0, 3, 5, None, 0]
    assert View().moved(Action.NEXT_ENGINE, TEN, rows=4).engine is None, "there is one"
    gone = View(engine=3).of(TEN)
    assert gone == TEN, "the engine is not there any more"


def test_after_any_keys_the_first_row_is_within_the_jobs() -> None:
    chance = random.Random(29)
    view = View()
    for _ in range(500):
        view = view.moved(chance.choice(list(Action)), TEN, chance.randrange(15))
        assert 0 <= view.top <= 10
