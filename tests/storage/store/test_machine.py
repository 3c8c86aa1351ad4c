"""Any sequence of calls on a store and a dict gives the same result, on a real disk and with
restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiered_kv.codecs.base import Bytes, Codec, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.segment_store import ToyCodec, store_options

NAMES = st.integers(0, 60)


def codec_from(codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
    return RawCodec(page_format) if codec_id == 0 else ToyCodec(page_format, table)


class StoreMachine(RuleBasedStateMachine):
    """A state machine that compares a store with a dict. Pages in ``stored`` must exist. Pages in
    ``dropped`` may exist again after a restart, in any of their versions."""

    @initialize(trained=st.booleans(), threads=st.integers(1, 3), segments=st.integers(4, 20))
    def begin(self, trained: bool, threads: int, segments: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="store-machine-"))
        options = store_options(self.root, io_threads=threads)
        self.options = store_options(
            self.root,
            io_threads=threads,
            capacity_bytes=segments * store_options(self.root, capacity_bytes=0).segment_bytes,
        )
        assert self.options.segment_bytes <= options.segment_bytes
        self.codec: Codec = ToyCodec(PAGE_FORMAT) if trained else RawCodec(PAGE_FORMAT)
        self.stored: dict[PageKey, Bytes] = {}
        self.history: dict[PageKey, list[Bytes]] = {}
        self.version = 0
        self.open()

    def open(self) -> None:
        self.store = SegmentStore(self.options, self.codec, codec_from)

    @rule(names=st.lists(NAMES, min_size=1, max_size=30))
    def put(self, names: list[int]) -> None:
        self.version += 1
        keys = [page_key(name) for name in names]
        pages = [(key, page_bytes(key, self.version)) for key in keys]

        failed = self.store.put(pages)

        for i, (key, page) in enumerate(pages):
            self.history.setdefault(key, []).append(page)
            if i not in failed:
                self.stored[key] = page

    @rule(names=st.lists(NAMES, min_size=1, max_size=20))
    def get(self, names: list[int]) -> None:
        keys = [page_key(name) for name in names]
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]

        failed = self.store.get(wanted)

        assert failed == {i for i, key in enumerate(keys) if key not in self.stored}
        for i, (key, out) in enumerate(wanted):
            assert i in failed or np.array_equal(out, self.stored[key])

    @rule(names=st.sets(NAMES, max_size=20))
    def drop(self, names: set[int]) -> None:
        keys = [page_key(name) for name in names]
        self.store.drop(keys)
        for key in keys:
            self.stored.pop(key, None)

    @rule(keep=st.integers(1, 5))
    def make_room(self, keep: int) -> None:
        proposal = self.store.proposal()
        if proposal is None:
            return
        assert set(proposal.keys) <= self.stored.keys()
        survivors = proposal.keys[::keep] if keep > 1 else ()

        gone = self.store.reclaim(proposal.segment, survivors)

        assert set(gone) >= set(proposal.keys) - set(survivors)
        assert self.store.stats.pages_bad == 0
        for key in gone:
            del self.stored[key]

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.stored.clear()
        self.history.clear()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()
        revived = sorted(set(self.store.keys()) - self.stored.keys())
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in revived]
        assert self.store.get(wanted) == frozenset()
        for key, out in wanted:
            assert any(np.array_equal(out, page) for page in self.history.get(key, ()))
            self.stored[key] = out

    @invariant()
    def the_store_holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        assert set(self.store.keys()) == self.stored.keys()
        assert len(self.store) == len(self.stored)
        assert all(key in self.store for key in self.stored)
        assert self.store.raw_bytes == len(self.stored) * PAGE_FORMAT.page_bytes

    @invariant()
    def the_disk_holds_no_more_than_its_capacity(self) -> None:
        if hasattr(self, "store"):
            nbytes = sum(path.stat().st_size for path in self.options.folder.glob("*.seg"))
            assert nbytes <= self.options.capacity_bytes

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.restart()
            self.get(list(range(61)))
            self.store.close()
            shutil.rmtree(self.root)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStoreMachine = StoreMachine.TestCase
