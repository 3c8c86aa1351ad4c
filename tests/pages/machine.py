"""A machine that executes an order book's orders on bytes, and checks the results.

``OrdersMachine`` is a Hypothesis state machine. Its rules are the possible actions of a scheduler
and events at a worker, in any order: saves, restores, compression, cancellations, resets, failed
copies, late reports. In addition to the order book it has a ``World``: a model of what each key
must contain, and the bytes in VRAM, slots and SSD of every rank, as dicts.
"""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tiered_kv.keys import PageKey
from tiered_kv.orders import (
    DemoteOrder,
    OrderId,
    OrderReport,
    PackOrder,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
)
from tiered_kv.pages.base import PageState
from tiered_kv.pages.order_book import Settled
from tiered_kv.testing.stores import SSD

from .world import KEYS, PAGE_BYTES, Bundle, Flight, Page, World


class OrdersMachine(World):
    """A state machine whose order book and model must agree after any sequence of rules."""

    # -- actions of the scheduler --------------------------------------------------

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def save(self, data: st.DataObject, keys: list[PageKey]) -> None:
        """Save pages of full blocks. Some of the pages are already saved, and some are given
        twice."""
        blocks = self.free_blocks(data, len(keys))
        keys = keys[: len(blocks)]
        before, in_use = dict(self.pages), self.slots_in_use()
        free = self.index.num_slots - len(in_use)
        idle = {key for key in before if self.idle(key)}
        evictions, unsaved = self.index.evictions, self.planner.unsaved

        order = self.planner.plan_save(dict(zip(keys, blocks, strict=True)))

        content = dict(zip(blocks, keys, strict=True))
        planned = [content[block] for block in order.blocks] if order else []
        # A page evicted for one key may be requested later in the same order.
        gone = {*planned} & before.keys() | self.index.missing(before).keys()
        assert gone <= idle, "a page in use was evicted"
        assert len(gone) == self.index.evictions - evictions
        room = {slot for key in idle for slot in before[key].slots}
        freed = {slot for key in gone for slot in before[key].slots}
        missing = max(0, len(planned) - free)
        assert len(freed) >= missing
        assert len(freed) == missing or any(before[key].bundle for key in gone)
        for key in gone:
            del self.pages[key]
        in_use = self.slots_in_use()
        refused = self.planner.unsaved - unsaved
        assert len(planned) + refused >= len(set(keys) - set(before))
        if refused:
            assert gone == idle, "a slot could have been had"
            assert len(planned) == free + len(room)
        if order is not None:
            taken = len(order.slots) + len(in_use)
            assert len({*order.slots, *in_use}) == taken, "a slot was given twice"
            self.fill_blocks(order, planned)
        self.pass_time(data)

    def fill_blocks(self, order: SaveOrder, keys: list[PageKey]) -> None:
        """Write the blocks' contents, as the forward pass does before the save copies them."""
        flight = self.flights[order.order_id] = Flight(order, [])
        for key, block, slot in zip(keys, order.blocks, order.slots, strict=True):
            self.serial += 1
            page = Page(key, self.serial, slot)
            assert key not in self.pages, "a page is saved twice"
            self.pages[key] = page
            flight.pages.append(page)
            self.held[block] = self.held.get(block, 0) + 1
            for rank in self.ranks:
                self.vram[rank][block] = page.bytes_of(rank)

    @rule(data=st.data())
    @precondition(lambda self: any(page.whole for page in self.pages.values()))
    def restore(self, data: st.DataObject) -> None:
        """Restore readable pages for a returning turn. One page may be given twice."""
        readable = [page.key for page in self.pages.values() if page.whole]
        keys = data.draw(st.lists(st.sampled_from(readable), min_size=1, max_size=4))
        blocks = self.free_blocks(data, len(keys))
        keys = keys[: len(blocks)]
        order = self.planner.plan_load("request", keys, blocks, RestoreMode.ASYNC)

        pages = [self.pages[key] for key in keys]
        assert all(page.whole for page in pages)
        assert list(order.slots) == [page.place for page in pages]
        assert list(order.blocks) == blocks
        assert order.cold == tuple(page.key for page in pages if page.bundle is not None)
        self.flights[order.order_id] = Flight(order, pages)
        for block in blocks:
            self.held[block] = self.held.get(block, 0) + 1
        self.pass_time(data)

    @rule(data=st.data())
    @precondition(lambda self: self.to_pack())
    def pack(self, data: st.DataObject) -> None:
        """Compress unused pages in place, in any order."""
        keys = st.lists(st.sampled_from(self.to_pack()), min_size=1, max_size=4, unique=True)
        order = self.planner.plan_pack(data.draw(keys), group=0)

        pages = [self.pages[key] for key in order.keys]
        assert list(order.slots) == [page.slot for page in pages]
        self.serial += 1
        bundle = Bundle(list(order.slots), self.serial)
        for page in pages:
            page.whole, page.bundle = False, bundle
        self.flights[order.order_id] = Flight(order, pages)
        self.pass_time(data)

    def to_pack(self) -> list[PageKey]:
        return [key for key, page in self.pages.items() if self.idle(key) and not page.bundle]

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def demote(self, data: st.DataObject, keys: list[PageKey]) -> None:
        """Demote pages to SSD. Some of the pages are already on SSD, being demoted, or missing."""
        on_the_way = {p.key for f in self.flights.values() if self.is_demotion(f) for p in f.pages}
        order = self.planner.plan_demote(SSD, keys, due=0.0)

        wanted = [
            key
            for key in dict.fromkeys(keys)
            if self.readable(key) and key not in self.on_ssd and key not in on_the_way
        ]
        assert (list(order.keys) if order else []) == wanted
        if order is not None:
            pages = [self.pages[key] for key in wanted]
            assert list(order.slots) == [page.place for page in pages]
            self.flights[order.order_id] = Flight(order, pages)
        self.pass_time(data)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    @precondition(lambda self: self.on_ssd)
    def promote(self, data: st.DataObject, keys: list[PageKey]) -> None:
        """Promote pages from SSD. Some of the pages are already in CPU memory, or being
        promoted."""
        wanted = [k for k in dict.fromkeys(keys) if k in self.on_ssd and k not in self.pages]
        before = dict(self.pages)
        idle = {key for key in before if self.idle(key)}
        order = self.planner.plan_promote(SSD, keys, due=0.0)

        planned = list(order.keys) if order else []
        assert planned == wanted[: len(planned)]
        gone = self.index.missing(before).keys()
        assert gone <= idle, "a page in use was evicted"
        for key in gone:
            del self.pages[key]
        if len(planned) < len(wanted):
            assert gone == idle, "a slot could have been had"
        if order is not None:
            assert not {*order.slots} & self.slots_in_use(), "a slot was given twice"
            flight = self.flights[order.order_id] = Flight(order, [])
            for key, slot in zip(order.keys, order.slots, strict=True):
                self.pages[key] = Page(key, self.on_ssd[key], slot)
                flight.pages.append(self.pages[key])
        self.pass_time(data)

    @rule(data=st.data())
    def disturb(self, data: st.DataObject) -> None:
        """Apply one of several other actions to a random page."""
        key = data.draw(st.sampled_from(KEYS))
        what = [
            self.use,
            self.forget_one,
            self.restore_what_is_not_readable,
            self.report_from_nowhere,
            self.cancel,
            self.abandon_saves,
            self.reset,
        ]
        self.pick(data, what)(key)
        self.pass_time(data)

    def use(self, key: PageKey) -> None:
        self.index.touch([key])

    def forget_one(self, key: PageKey) -> None:
        self.index.forget(key)
        self.pages.pop(key, None)

    def restore_what_is_not_readable(self, key: PageKey) -> None:
        """Order a restore that includes an unreadable page. The order must be refused, and must not
        leave the readable pages locked."""
        if self.readable(key):
            return
        readable = [page.key for page in self.pages.values() if page.whole]
        keys = [*readable, key]
        try:
            self.planner.plan_load("request", keys, range(len(keys)), RestoreMode.SYNC)
        except (KeyError, ValueError):
            return
        raise AssertionError("an unreadable page was ordered")

    def report_from_nowhere(self, _: PageKey) -> None:
        """Report orders that the order book did not issue: order 0, which is never issued, and an
        order of another engine."""
        report = OrderReport(self.world, frozenset({0}), 0, 0.0)
        assert self.planner.settle({OrderId(0): report, OrderId(1 << 40): report}) == []

    def cancel(self, _: PageKey) -> None:
        """Cancel the newest save before it is sent."""
        for flight in self.unsent_saves()[-1:]:
            assert isinstance(flight.order, SaveOrder)
            self.planner.cancel(flight.order)
            self.end(flight)
            for page in flight.pages:
                self.forget(page)

    def abandon_saves(self, _: PageKey) -> None:
        abandoned = self.planner.abandon_saves()

        mine = [f for f in self.flights.values() if self.is_save(f) and not f.abandoned]
        assert abandoned == [flight.order for flight in mine]
        for flight in mine:
            flight.abandoned = True
            for page in flight.pages:
                self.pages.pop(page.key, None)
            self.give_up(flight)

    def reset(self, key: PageKey) -> None:
        """Reset the cache, as after an update of the weights. No page that was saved before may be
        found again."""
        while self.unsent_saves():
            self.cancel(key)
        self.abandon_saves(key)
        self.planner.forget_all()
        for flight in self.flights.values():
            flight.abandoned = True
        self.pages.clear()
        self.on_ssd.clear()

    # -- events at the workers -----------------------------------------------------

    def pass_time(self, data: st.DataObject) -> None:
        """Let workers copy, report, or finish all orders. Every rule calls this method, because a
        run in which no worker reports would test little."""
        for _ in range(data.draw(st.sampled_from([1, 0, 2, 4]))):
            what = data.draw(st.sampled_from([self.copy, self.copy, self.report, self.finish]))
            what(data)

    def copy(self, data: st.DataObject) -> None:
        """Let one rank execute one order. Some of the copied pages may be torn."""
        if not self.to_copy():
            return
        fail = data.draw(st.just(set[int]()) | st.sets(st.integers(0, 3), max_size=2))
        flight, rank = self.pick(data, self.to_copy())
        self.carry_out(flight, rank, fail)

    def report(self, data: st.DataObject) -> None:
        """Deliver up to four pending reports together, in random order."""
        waiting = self.to_report()
        count = data.draw(st.integers(1, 4))
        self.deliver([waiting.pop(self.draw_index(data, waiting)) for _ in waiting[:count]])

    def finish(self, _: st.DataObject) -> None:
        """Let every rank execute its remaining orders, and deliver all reports."""
        for flight, rank in self.to_copy():
            self.carry_out(flight, rank, set())
        self.deliver(self.to_report())

    def carry_out(self, flight: Flight, rank: int, fail: set[int]) -> None:
        order, vram, slots = flight.order, self.vram[rank], self.slots[rank]
        flight.copied[rank] = frozenset(i for i in fail if i < len(order.slots))
        if isinstance(order, PackOrder):
            self.carry_out_pack(flight, rank, bool(fail))
            return
        if isinstance(order, DemoteOrder | PromoteOrder):
            self.read_or_write(order, rank, fail)
            return
        for i, (block, slot) in enumerate(zip(order.blocks, order.slots, strict=True)):
            if isinstance(order, SaveOrder):
                slots[slot] = b"torn" if i in fail else self.transported(vram[block])
            else:
                key = flight.pages[i].key
                vram[block] = b"torn" if i in fail else self.content(rank, key, slot)

    def read_or_write(self, order: DemoteOrder | PromoteOrder, rank: int, fail: set[int]) -> None:
        ssd, slots = self.ssd[rank], self.slots[rank]
        for i, (key, slot) in enumerate(zip(order.keys, order.slots, strict=True)):
            if isinstance(order, DemoteOrder):
                if i not in fail:
                    ssd[key] = self.content(rank, key, slot)
            else:
                slots[slot] = b"torn" if i in fail else ssd[key]

    def deliver(self, arriving: list[tuple[Flight, int]]) -> None:
        """Merge these reports by order, as vLLM does, and check the orders that they finish."""
        reports: dict[OrderId, OrderReport] = {}
        for flight, rank in arriving:
            flight.reported.add(rank)
            failed = flight.copied[rank]
            good = len(flight.order.slots) - len(failed)
            kept = flight.kept([rank])
            report = OrderReport(1, failed, good * PAGE_BYTES, 1e-6 * good, kept)
            order_id = flight.order.order_id
            known = reports.get(order_id)
            reports[order_id] = known.merge(report) if known else report

        settled = self.planner.settle(reports)

        complete = [self.flights[i] for i in reports if len(self.flights[i].reported) == self.world]
        assert {done.order for done in settled} == {flight.order for flight in complete}
        for done in settled:
            self.check_settled(done, self.flights[done.order.order_id])

    def transported(self, content: bytes) -> bytes:
        """Return the bytes of a page as they arrive after a copy. Subclasses may corrupt them."""
        return content

    def check_settled(self, done: Settled[Any], flight: Flight) -> None:
        assert done.failed == flight.failed
        assert done.abandoned is flight.abandoned
        assert list(done.keys) == [page.key for page in flight.pages]
        if (bundle := flight.bundle) is not None and not done.failed:
            del bundle.slots[flight.kept(self.ranks) :]
        for i, page in enumerate(flight.pages):
            if self.is_save(flight) or isinstance(flight.order, PackOrder | PromoteOrder):
                if i in flight.failed:
                    self.forget(page)
                else:
                    page.whole = True
                bad = isinstance(flight.order, PromoteOrder) and i in flight.failed
                if bad and not flight.abandoned:
                    self.on_ssd.pop(page.key, None)
            elif isinstance(flight.order, DemoteOrder):
                if i not in flight.failed and not flight.abandoned:
                    self.on_ssd[page.key] = page.serial
            # The key may have a newer page, but losing that page is better than reading wrong
            # bytes.
            elif i in flight.failed:
                self.pages.pop(page.key, None)
            else:
                for rank in self.ranks:
                    found = self.vram[rank][flight.order.blocks[i]]
                    assert found == page.bytes_of(rank), f"a wrong page: {found!r}"
        self.end(flight)

    # -- invariants -----------------------------------------------------------------------

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.index.check_integrity()
        assert self.index.free_slots == self.index.num_slots - len(self.slots_in_use())

    @invariant()
    def the_index_knows_what_the_model_knows(self) -> None:
        assert len(self.index) == len(self.pages)
        for key in KEYS:
            page = self.pages.get(key)
            expected = page.state if page is not None else PageState.MISSING
            assert self.index.state(key) is expected
            assert self.index.readable(key) is expected.readable
        end = next((i for i, key in enumerate(KEYS) if not self.readable(key)), len(KEYS))
        assert self.index.readable_prefix(KEYS, 0, len(KEYS)) == end

    @invariant()
    def what_can_be_read_is_whole_on_every_rank(self) -> None:
        for page in self.pages.values():
            if self.index.readable(page.key):
                for rank in self.ranks:
                    found = self.content(rank, page.key, page.place)
                    assert found == page.bytes_of(rank), f"a wrong page is readable: {found!r}"

    @invariant()
    def what_is_on_ssd_is_whole_on_every_rank(self) -> None:
        assert len(self.planner.stores[SSD].index) == len(self.on_ssd)
        for key, serial in self.on_ssd.items():
            assert key in self.planner.stores[SSD].index
            for rank in self.ranks:
                assert self.ssd[rank][key] == Page(key, serial, 0).bytes_of(rank)

    @invariant()
    def orders_in_flight_are_counted(self) -> None:
        assert self.planner.in_flight == len(self.flights)
        assert self.planner.bandwidth > 0

    def teardown(self) -> None:
        """Report all unfinished orders. Asserts that every remaining page can then be read, and
        that every slot is free once the index is cleared."""
        if not hasattr(self, "planner") or sys.exc_info()[0] is not None:
            return  # the machine was never initialised, or has already failed
        for flight in list(self.flights.values()):
            for rank in set(self.ranks) - set(flight.copied):
                flight.copied[rank] = frozenset(range(len(flight.order.slots)))
            late = self.world - len(flight.reported)
            report = OrderReport(late, flight.failed, 0, 0.0, flight.kept(self.ranks))
            for done in self.planner.settle({flight.order.order_id: report}):
                self.check_settled(done, flight)
        assert self.planner.in_flight == 0
        assert not any(self.held.values())
        self.every_slot_has_one_owner()
        self.what_can_be_read_is_whole_on_every_rank()
        self.index.clear()
        assert self.index.free_slots == self.index.num_slots
