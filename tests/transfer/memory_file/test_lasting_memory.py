"""Slot headers: tickets, checks, discards, agreement between ranks, and the hashing thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.memory_file.made_memory import (
    GEOMETRY,
    PAGE,
    key_of,
    keys_in,
    open_in,
    page_of,
    save,
    slot_of,
)
from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedPages
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.transfer.memory_file.lasting_memory import LandedPage, LastingMemory
from tiered_kv.transfer.memory_file.memory_format import (
    MAGIC,
    MAX_KEY_BYTES,
    FileHeader,
    ForeignError,
    Geometry,
    SlotHeader,
    pack_file_header,
    pack_slot_header,
    parse_file_header,
    parse_slot_header,
)
from tiered_kv.transfer.memory_file.validation import Validation, agreed


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[LastingMemory]:
    opened = open_in(tmp_path)
    yield opened
    opened.close()


def reopened(memory: LastingMemory) -> LastingMemory:
    memory.keep = True
    memory.close()
    return open_in(memory.path.parent)


# -- headers ------------------------------------------------------------------------


def test_pages_of_an_earlier_engine_are_adopted_if_their_bytes_are_right(
    memory: LastingMemory, caplog: pytest.LogCaptureFixture
) -> None:
    for slot in (0, 1, 2):
        save(memory, slot, slot)
    again = reopened(memory)
    slot_of(again, 1)[PAGE - 1] ^= 1
    again.check_adopted(2)
    assert keys_in(again) == {0: key_of(0), 2: key_of(2)}
    assert "ignored 1 damaged page" in caplog.text
    third = reopened(again)
    assert keys_in(third) == {0: key_of(0), 2: key_of(2)}, "and nobody will ask again"
    third.close()


def test_memory_in_a_file_is_not_registered_with_a_device(memory: LastingMemory) -> None:
    """Memory in a file is not pinned, because copies to and from it are staged."""
    assert not memory.pinned


def test_a_closed_memory_takes_no_header(memory: LastingMemory) -> None:
    view, ticket = memory.view, memory.ticket(0)
    memory.close()
    memory.invalidate([0])
    memory.clear()
    assert not memory.validate(0, ticket, SlotHeader(key_of(0), 1, 1, bytes(16)))
    view[:] = 1
    assert (view == 1).all(), "a view outlives the memory"


@pytest.mark.parametrize("key", [b"short", bytes(MAX_KEY_BYTES + 1)])
def test_a_key_that_does_not_fit_is_refused_and_the_slot_stays_invalid(
    memory: LastingMemory, key: bytes
) -> None:
    save(memory, 0, 0)
    memory.invalidate([0])
    with pytest.raises(ValueError, match="the key has"):
        memory.validate(0, memory.ticket(0), SlotHeader(PageKey(key), PAGE, 1, bytes(16)))
    assert not reopened(memory).adopted


HEADERS = st.builds(
    SlotHeader,
    st.binary(min_size=16, max_size=MAX_KEY_BYTES).map(PageKey),
    st.integers(1, GEOMETRY.slot_bytes),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=16, max_size=16),
)


@given(HEADERS, st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 40), st.data())
def test_a_slot_header_is_parsed_completely_or_not_at_all(
    header: SlotHeader, nonce: int, slot: int, data: st.DataObject
) -> None:
    entry = pack_slot_header(nonce, slot, header)
    assert len(entry) == 128
    assert parse_slot_header(nonce, slot, entry, GEOMETRY.slot_bytes) == header
    torn = bytearray(entry)
    torn[data.draw(st.integers(0, 127))] ^= data.draw(st.integers(1, 255))
    for n, at, found in ((nonce, slot, torn), (nonce ^ 1, slot, entry), (nonce, slot + 1, entry)):
        with pytest.raises(FormatError):
            parse_slot_header(n, at, bytes(found), GEOMETRY.slot_bytes)


@given(st.integers(0, 200), st.integers(1, 255), st.binary(max_size=300))
def test_a_file_header_is_parsed_completely_or_not_at_all(at: int, flip: int, noise: bytes) -> None:
    header = FileHeader(GEOMETRY, 7, 8, GEOMETRY.nbytes + 12)
    packed = pack_file_header(header)
    assert parse_file_header(packed.ljust(4096, b"\0")) == header
    torn = bytearray(packed)
    torn[at % len(torn)] ^= flip
    with pytest.raises(FormatError):
        parse_file_header(bytes(torn))
    with pytest.raises(FormatError):
        parse_file_header(packed[: at % len(packed)])
    with pytest.raises(FormatError if noise.startswith(MAGIC) else ForeignError):
        parse_file_header(noise)


def test_a_header_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(FormatError, match="inconsistent"):
        parse_file_header(pack_file_header(FileHeader(GEOMETRY, 7, 8, GEOMETRY.nbytes - 1)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("sidcr"), st.integers(0, 5)), max_size=40))
def test_the_page_saved_last_is_found_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Saves, late validations, discards, resets and restarts occur in any order. After each
    restart, the memory has exactly the pages that were saved last and not discarded."""
    memory = open_in(tmp_path_factory.mktemp("memory"))
    expected = dict[int, PageKey]()
    for name, (step, slot) in enumerate(steps):
        late, header = memory.ticket(slot), SlotHeader(key_of(name), PAGE, name, bytes(16))
        if step == "s":
            expected[slot] = save(memory, slot, name)
        elif step == "i":
            memory.invalidate([slot, (slot + 1) % 6])
            slot_of(memory, slot)[:] = 0
            assert not memory.validate(slot, late, header)
            expected.pop(slot, None)
            expected.pop((slot + 1) % 6, None)
        elif step == "d":
            memory.invalidate([slot])
            expected.pop(slot, None)
        elif step == "c":
            memory.clear()
            assert not memory.validate(slot, late, header)
            expected.clear()
        else:
            memory = reopened(memory)
            assert keys_in(memory) == expected
            memory.check_adopted(1)
            assert keys_in(memory) == expected
    memory = reopened(memory)
    assert keys_in(memory) == expected
    memory.close()


# -- ranks --------------------------------------------------------------------------


def pages(*there: tuple[int, int, int]) -> AdoptedPages:
    """Return the adopted pages of a rank, given the slot, name and save time of each."""
    return AdoptedPages(
        tuple(slot for slot, _, _ in there),
        tuple(key_of(name) for _, name, _ in there),
        tuple(saved for _, _, saved in there),
    )


def test_a_page_is_adopted_where_all_ranks_have_it_from_the_same_save() -> None:
    first = pages((0, 0, 10), (1, 1, 11), (2, 2, 12), (3, 3, 13), (5, 5, 9))
    second = pages((0, 0, 10), (1, 1, 8), (2, 7, 12), (4, 3, 13), (5, 5, 9))
    assert list(agreed([first, second]).items()) == [(key_of(5), 5), (key_of(0), 0)]
    assert agreed([first, AdoptedPages()]) == {}
    assert agreed([]) == {}


def test_the_later_of_two_copies_of_a_page_is_adopted() -> None:
    there = pages((0, 1, 10), (1, 1, 30), (2, 1, 20), (3, 2, 5))
    assert list(agreed([there]).items()) == [(key_of(2), 3), (key_of(1), 1)]


# -- the thread ---------------------------------------------------------------------


def test_pages_are_validated_in_the_background(memory: LastingMemory) -> None:
    validation = Validation(memory)
    for slot in range(10):
        memory.invalidate([slot])
        slot_of(memory, slot)[:] = page_of(key_of(slot))
    validation.landed(LandedPage(slot, key_of(slot), PAGE, slot) for slot in range(10))
    assert validation.wait_idle(10.0)
    validation.close()
    validation.close()
    again = reopened(memory)
    assert keys_in(again) == {slot: key_of(slot) for slot in range(10)}
    again.check_adopted(1)
    assert len(again.adopted) == 10
    again.close()


def test_a_page_that_cannot_be_validated_stops_no_other(
    memory: LastingMemory, caplog: pytest.LogCaptureFixture
) -> None:
    validation = Validation(memory)
    validation.landed([LandedPage(0, PageKey(b"short"), PAGE, 0)])
    validation.landed([LandedPage(1, key_of(1), PAGE, 0)])
    validation.close(10.0)
    assert "cannot be validated" in caplog.text
    assert keys_in(reopened(memory)) == {1: key_of(1)}


def test_pages_that_wait_for_validation_at_close_are_not_adopted(
    memory: LastingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = LastingMemory.digest

    def slow(memory: LastingMemory, slot: int, nbytes: int) -> bytes:
        begun.set()
        go_on.wait(10.0)
        return real(memory, slot, nbytes)

    monkeypatch.setattr(LastingMemory, "digest", slow)
    validation = Validation(memory)
    validation.landed(LandedPage(slot, key_of(slot), PAGE, slot) for slot in range(3))
    assert begun.wait(10.0)
    memory.invalidate([0])  # while the page is hashed
    ending = threading.Thread(target=validation.close)
    ending.start()
    assert validation.ending.wait(10.0)
    go_on.set()
    ending.join(10.0)
    assert not reopened(memory).adopted


def test_a_page_that_is_overwritten_before_its_turn_is_not_hashed(
    memory: LastingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, real = list[int](), LastingMemory.digest
    go_on = threading.Event()

    def watched(memory: LastingMemory, slot: int, nbytes: int) -> bytes:
        hashed.append(slot)
        go_on.wait(10.0)
        return real(memory, slot, nbytes)

    monkeypatch.setattr(LastingMemory, "digest", watched)
    validation = Validation(memory)
    validation.landed(LandedPage(slot, key_of(slot), PAGE, slot) for slot in range(3))
    memory.invalidate([2])
    go_on.set()
    validation.close(10.0)
    assert hashed == [0, 1]


def test_slots_overwritten_while_they_are_hashed_are_never_wrong(memory: LastingMemory) -> None:
    validation, chance = Validation(memory), np.random.default_rng(5)
    for name in range(1500):
        slot = int(chance.integers(GEOMETRY.slots))
        memory.invalidate([slot])
        slot_of(memory, slot)[:] = page_of(key_of(name))
        validation.landed([LandedPage(slot, key_of(name), PAGE, name)])
    validation.close(30.0)
    again = reopened(memory)
    assert len(again.adopted) > GEOMETRY.slots // 2
    for slot, key in keys_in(again).items():
        assert (slot_of(again, slot) == page_of(key)).all()
    again.close()


def test_the_geometry_determines_where_slots_are() -> None:
    one = Geometry(bytes(16), 0, 1, 0, slots=33, slot_bytes=100)
    assert one.slots_at == 4096 + 8192
    assert one.nbytes == 4096 + 8192 + 3300
