"""Query parameters for a page of the job list, valid and invalid."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.vllm.routes.access import Page, Refusal, read_nothing, read_page
from tiered_kv.status import Cursor


def test_a_page_has_the_first_hundred_jobs_unless_the_query_says_otherwise() -> None:
    assert read_page({}) == Page(100, Cursor(0, 0))
    assert read_page({"limit": "1000", "after": "3.57"}) == Page(1000, Cursor(3, 57))
    assert read_page({"limit": "007"}).limit == 7
    assert read_page({"after": str(Cursor(2, 9))}).after == Cursor(2, 9)


@pytest.mark.parametrize("limit", ["", "0", "-1", "1001", "1e3", "10 ", "١٢", "9" * 5000, "NaN"])
def test_invalid_limits_are_refused(limit: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_page({"limit": limit})
    assert caught.value.status == 400


@pytest.mark.parametrize("after", ["", "7", "1.", ".1", "-1.2", "1.2.3", "a.b", "1." + "9" * 5000])
def test_invalid_positions_are_refused(after: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_page({"after": after})
    assert caught.value.status == 400


def test_unknown_parameter_names_are_refused() -> None:
    for query in ({"limt": "3"}, {"limit": "3", "\ud800\n": ""}):
        with pytest.raises(Refusal):
            read_page(query)
    read_nothing({})
    with pytest.raises(Refusal):
        read_nothing({"limit": "3"})
