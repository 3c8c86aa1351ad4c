"""Compressed pages in a memory file: which pages the next engine finds, for every moment at which
an engine can be killed.

To simulate a killed engine, a test copies the memory file while the engine has it open, because a
killed process leaves the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.transfer.memory_file.made_memory import GEOMETRY, PAGE, as_killed, key_of, open_in
from tiered_kv.codecs.base import Codec, CodecError, ElementType, PageFormat
from tiered_kv.codecs.registry import parse
from tiered_kv.connectors.runtime.worker import lasting_pages
from tiered_kv.connectors.runtime.worker.lasting_pages import PackNote, adopt_bundles
from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedBundle
from tiered_kv.orders import OrderId, PackOrder
from tiered_kv.storage.bundles import Bundles
from tiered_kv.transfer.memory_file import slot_table
from tiered_kv.transfer.memory_file.memory_files import list_memory
from tiered_kv.transfer.memory_file.memory_format import SlotHeader
from tiered_kv.transfer.memory_file.slot_table import SlotTable

FORMAT = PageFormat(ElementType.OPAQUE, PAGE, 16)


def page_of(key: PageKey) -> NDArray[np.uint8]:
    """Return a page that compresses to about a third, and differs for each key."""
    page = np.full(PAGE, key[-1], np.uint8)
    page[: PAGE // 4] = np.random.default_rng(list(key)).integers(0, 256, PAGE // 4)
    return page


def noise_of(key: PageKey) -> NDArray[np.uint8]:
    return np.random.default_rng(list(key)).integers(0, 256, PAGE, dtype=np.uint8)


class Engine:
    """An engine's memory file and its bundles."""

    def __init__(self, folder: Path, codec: str = "zstd", num_slots: int = GEOMETRY.slots) -> None:
        self.memory = open_in(folder)
        slots = self.memory.view.reshape(-1, GEOMETRY.slot_bytes)
        self.slots = slots
        self.bundles = Bundles(slots, self.codec(codec))
        groups = {0: self.bundles}
        self.adopted = adopt_bundles(self.memory, groups, num_slots, trusted=codec)

    def codec(self, name: str) -> Codec:
        return parse(name)(FORMAT)

    def save(self, slots: Sequence[int], names: Sequence[int], make: Any = page_of) -> None:
        self.memory.invalidate(slots)
        for slot, name in zip(slots, names, strict=True):
            self.slots[slot, :PAGE] = make(key_of(name))
            header = SlotHeader(key_of(name), PAGE, name, self.memory.digest(slot, PAGE))
            assert self.memory.validate(slot, self.memory.ticket(slot), header)

    def note(self, slots: Sequence[int], names: Sequence[int]) -> PackNote:
        order = PackOrder(OrderId(1), 0, tuple(slots), tuple(map(key_of, names)))
        pages = map(self.memory.valid, slots)
        saved = {page.key: page.saved for page in pages if page is not None}
        return PackNote(self.memory, order, saved)

    def pack(self, slots: Sequence[int], names: Sequence[int]) -> int:
        """Compress pages into a bundle, and let other pages overwrite the freed slots. Returns the
        bundle's number of slots."""
        note = self.note(slots, names)
        kept = self.bundles.pack([*map(key_of, names)], slots, map, note)
        self.memory.invalidate(slots[kept:])
        self.slots[list(slots[kept:])] = 0x5A
        return kept

    def found(self) -> dict[int, bool]:
        """Return, by page name, whether each adopted page could be read. Asserts that every
        readable page has the right bytes."""
        known = {key_of(name): name for name in range(100)}
        good = dict[int, bool]()
        for bundle in self.adopted:
            for key in bundle.keys:
                out = np.zeros(PAGE, np.uint8)
                good[known[key]] = self.bundles.read(bundle.slots[0], key, out)
                assert not good[known[key]] or np.array_equal(out, page_of(key))
        for slot, page in self.memory.adopted.items():
            right = self.memory.digest(slot, PAGE) == page.digest
            assert not right or self.slots[slot, :PAGE].tobytes() in (
                page_of(page.key).tobytes(),
                noise_of(page.key).tobytes(),
            )
            good[known[page.key]] = right
        return good

    def close(self) -> None:
        self.slots = np.empty((0, 1), np.uint8)
        self.memory.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "memory")
    yield made
    made.close()


def after(engine: Engine, to: Path, **more: Any) -> Engine:
    """Open the next engine on a copy of this engine's memory file, as if this engine had been
    killed."""
    return Engine(as_killed(engine.memory, to), **more)


def all_good(*names: int) -> dict[int, bool]:
    return dict.fromkeys(names, True)


def test_the_next_engine_finds_compressed_pages(engine: Engine, tmp_path: Path) -> None:
    engine.save([3, 9, 1, 7, 5, 0], range(6))
    assert engine.pack([3, 9, 1, 7, 5], range(5)) < 5
    second = after(engine, tmp_path / "killed")
    assert second.found() == all_good(0, 1, 2, 3, 4, 5)
    (bundle,) = second.adopted
    assert bundle.slots[0] == 3
    assert bundle == AdoptedBundle(bundle.slots, (*map(key_of, range(5)),), (0, 1, 2, 3, 4))
    listed = list_memory(tmp_path / "killed").files[0]
    assert (listed.pages, listed.newest, listed.torn) == (6, 5, 0)
    second.close()
    third = Engine(tmp_path / "killed")
    assert third.found() == all_good(*range(6)), "nothing was lost by being found"
    third.close()


def test_an_overwritten_bundle_is_not_found_but_its_neighbour_is(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save(range(12), range(12))
    engine.pack(range(6), range(6))
    engine.pack(range(6, 12), range(6, 12))
    engine.save([1], [50])  # overwrites the second slot of the first bundle, which is evicted
    second = after(engine, tmp_path / "killed")
    assert second.found() == all_good(50, 6, 7, 8, 9, 10, 11)
    assert "torn" not in caplog.text
    second.save([0, 2, 3], [51, 52, 53])
    third = after(second, tmp_path / "again")
    assert third.found() == all_good(50, 51, 52, 53, 6, 7, 8, 9, 10, 11)
    for one in (second, third):
        one.close()


@pytest.mark.parametrize("late", [False, True], ids=["before", "while it packs"])
def test_nothing_is_found_after_a_reset(engine: Engine, tmp_path: Path, *, late: bool) -> None:
    engine.save(range(6), range(6))
    note = engine.note(range(6), range(6))
    if late:
        engine.memory.clear()
    engine.bundles.pack([*map(key_of, range(6))], range(6), map, note)
    if not late:
        engine.memory.clear()
    second = after(engine, tmp_path / "killed")
    assert second.found() == {}
    second.close()


def test_pages_that_do_not_shrink_are_found_in_their_slots(engine: Engine, tmp_path: Path) -> None:
    engine.save(range(5), range(5), noise_of)
    assert engine.pack(range(5), range(5)) == 5
    second = after(engine, tmp_path / "killed")
    assert second.adopted == ()
    assert second.found() == all_good(*range(5))
    second.close()


def test_a_page_that_may_be_incomplete_is_not_recorded(engine: Engine, tmp_path: Path) -> None:
    engine.save(range(6), range(6))
    engine.memory.invalidate([2])
    engine.pack(range(6), range(6))
    engine.save(range(10, 14), range(10, 14))
    engine.memory.invalidate(range(10, 14))
    engine.pack(range(10, 14), range(10, 14))
    second = after(engine, tmp_path / "killed")
    assert second.found() == all_good(0, 1, 3, 4, 5)
    second.close()


def test_a_damaged_note_or_record_gives_no_wrong_page(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save(range(18), range(18))
    for begin in (0, 6, 12):
        engine.pack(range(begin, begin + 6), range(begin, begin + 6))
    engine.slots[6, 30] ^= 1  # in the note of the second bundle
    engine.slots[13] ^= 0xFF  # in the records of the third bundle
    second = after(engine, tmp_path / "killed")
    assert "the bundle's record is damaged" in caplog.text
    found = second.found()
    assert [found.get(name) for name in range(6)] == [True] * 6
    assert not any(name in found for name in range(6, 12))
    assert not all(found[name] for name in range(12, 18))
    second.close()


def test_a_note_that_does_not_fit_into_a_slot_costs_no_page(engine: Engine, tmp_path: Path) -> None:
    engine.save(range(5), range(5))
    note = engine.note(range(5), range(5))
    engine.memory.slot_bytes = 100
    kept = engine.bundles.pack([*map(key_of, range(5))], range(5), map, note)
    engine.memory.slot_bytes = GEOMETRY.slot_bytes
    assert kept < 5
    assert all(engine.bundles.read(0, key_of(name), np.zeros(PAGE, np.uint8)) for name in range(5))
    second = after(engine, tmp_path / "killed")
    assert second.found() == {}
    second.close()


def test_unreadable_bundles_are_ignored(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.save(range(5), range(5))
    engine.pack([4, 3, 2, 1, 0], [4, 3, 2, 1, 0])
    engine.memory.keep = True
    engine.close()
    folder = tmp_path / "memory"
    memory = open_in(folder)
    assert adopt_bundles(memory, {}, GEOMETRY.slots, "raw") == (), "nothing is compressed now"
    memory.keep = True
    memory.close()
    fewer = Engine(folder, num_slots=4)
    assert fewer.adopted == (), "its first slot is not for pages any more"
    fewer.close()

    def unknown(*_: object) -> Codec:
        raise CodecError("unknown codec 99")

    with monkeypatch.context() as patch:
        patch.setattr(lasting_pages, "from_table", unknown)
        stranger = Engine(folder)
    assert stranger.adopted == ()
    assert "cannot be read: unknown codec 99" in caplog.text
    stranger.close()
    knows = Engine(folder)
    assert knows.found() == all_good(*range(5)), "whoever can finds it still"
    knows.close()


def test_no_wrong_page_is_found_whenever_the_engine_is_killed(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory file is copied before each header is written and before each slot is reused. An
    engine that starts with one of these copies finds only right pages."""
    copies, invalidate = list[Path](), SlotTable.invalidate

    def look() -> None:
        copies.append(as_killed(engine.memory, tmp_path / str(len(copies))))

    def looked(real: Callable[..., bytes]) -> Callable[..., bytes]:
        def packed(*args: Any) -> bytes:
            look()
            return real(*args)

        return packed

    def invalidated(self: SlotTable, slots: Sequence[int]) -> None:
        look()
        invalidate(self, slots)

    for name in ("pack_slot_header", "pack_bundle_header"):
        monkeypatch.setattr(slot_table, name, looked(getattr(slot_table, name)))
    monkeypatch.setattr(SlotTable, "invalidate", invalidated)
    for round_ in range(3):
        names = range(10 * round_, 10 * round_ + 6)
        slots = [(5 * round_ + at) % 8 for at in range(6)]
        engine.save(slots, names)
        engine.pack(slots, names)
    look()
    monkeypatch.undo()
    counts = set[int]()
    for folder in copies:
        one = Engine(folder)
        found = one.found()
        assert all(found.values()), "what is found is whole"
        counts.add(len(found))
        one.close()
    assert max(counts) >= 6
    assert 0 in counts


def test_a_closed_memory_file_accepts_no_note(engine: Engine) -> None:
    engine.save(range(5), range(5))
    note = engine.note(range(5), range(5))
    memory = engine.memory
    keys = [*map(key_of, range(5))]
    slots = engine.slots.copy()
    engine.close()
    assert Bundles(slots, engine.codec("zstd")).pack(keys, range(5), map, note) < 5
    assert memory.valid(0) is None
