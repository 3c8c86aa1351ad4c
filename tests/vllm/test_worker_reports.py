"""Workers' reports reach the scheduler merged over all ranks, each exactly once.

With ``--enable-fault-tolerance`` (vLLM 0.33), the reports of a step that failed on another worker
are added to those of the next step, so two reports of one rank are merged.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tiered_kv.connectors.vllm.envelopes import TieredWorkerMetadata
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal, Reports, TierReport
from tiered_kv.orders import OrderId, OrderReport
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.testing.stores import SSD

KEYS = [PageKey(bytes([n]) * 32) for n in range(4)]
FIRST, SECOND, THIRD = map(OrderId, (1, 2, 3))


def saved(*orders: OrderId, failed: int | None = None) -> dict[OrderId, OrderReport]:
    bad = frozenset() if failed is None else frozenset({failed})
    return {order: OrderReport(1, bad, 64, 0.5) for order in orders}


def output(reports: Reports | None) -> ModelRunnerOutput:
    meta = None if reports is None else TieredWorkerMetadata(reports)
    kv = KVConnectorOutput(kv_connector_worker_meta=meta)
    return ModelRunnerOutput(
        req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=kv
    )


def merged(*reports: Reports) -> Reports:
    whole = TieredWorkerMetadata(reports[0])
    for one in reports[1:]:
        whole = whole.aggregate(TieredWorkerMetadata(one))
    return whole.reports


def news(gone: int, counted: int, proposal: Proposal | None, stored: int) -> TierReport:
    return TierReport((KEYS[gone],), proposal, {"ssd_writes": counted}, stored)


def test_two_reports_of_a_rank_lose_nothing() -> None:
    dying = Proposal(7, (KEYS[2],))
    earlier = Reports(saved(FIRST), {0: 2}, {SSD: {0: news(0, 3, None, 100)}})
    later = Reports(saved(SECOND, failed=1), {0: 1}, {SSD: {0: news(1, 4, dying, 90)}})
    beside = Reports(saved(FIRST, SECOND), {1: 1}, {SSD: {1: news(0, 1, None, 70)}})
    found = merged(earlier, later, beside)
    assert found.failures == {0: 2, 1: 1}, "a count never falls"
    assert found.stores[SSD] == {
        0: TierReport((KEYS[0], KEYS[1]), dying, {"ssd_writes": 7}, 90),
        1: news(0, 1, None, 70),
    }
    assert {order: (one.ranks, one.failed) for order, one in found.orders.items()} == {
        FIRST: (2, frozenset()),
        SECOND: (2, {1}),
    }


@pytest.mark.skipif(
    not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"), reason="since vLLM 0.33"
)
def test_reports_of_a_failed_step_count_in_the_next_step() -> None:
    book = OrderBook(PageIndex(4, LeastRecentlyUsed()), 2, [64], 1e9)
    first, second = (book.plan_save({KEYS[n]: n}) for n in (0, 1))
    assert first is not None
    assert second is not None
    aggregator = KVOutputAggregator(expected_finished_count=2)

    def round_of(*reports: Reports | None) -> Reports | None:
        whole: Any = aggregator.aggregate([output(one) for one in reports], 0)
        meta = whole.kv_connector_output.kv_connector_worker_meta
        return None if meta is None else meta.reports

    # The second rank fails in this step.
    lost = Reports(saved(first.order_id), {}, {SSD: {0: news(2, 1, None, 10)}})
    aggregator.ft_defer_kv_connector_outputs([output(lost).kv_connector_output])
    found = round_of(Reports(saved(second.order_id), {}, {SSD: {0: news(3, 1, None, 5)}}), None)
    assert found is not None
    assert found.stores[SSD][0].gone == (KEYS[2], KEYS[3])
    assert book.settle(found.orders) == [], "the second rank has reported neither"

    found = round_of(None, Reports(saved(first.order_id, second.order_id)))
    assert found is not None
    assert [done.order for done in book.settle(found.orders)] == [first, second]
    assert book.in_flight == 0
    assert all(map(book.index.readable, KEYS[:2]))
    assert round_of(None, None) is None, "each once"
