"""Pages in a real remote store: the conformance suite, and values changed by others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, CodedPage
from tiered_kv.codecs.registry import from_table, parse
from tiered_kv.config import load_config
from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.remote.address import parse_address
from tiered_kv.remote.page_record import HEADER_BYTES, table_name
from tiered_kv.remote.valkey.valkey_store import ValkeyStore
from tiered_kv.storage import remote_pages
from tiered_kv.storage.base import PageStore, StoreSite
from tiered_kv.storage.remote_pages import (
    PAGE_PREFIX,
    TABLE_PREFIX,
    THREAD_NAME,
    NoPages,
    RemotePages,
)
from tiered_kv.storage.remote_tier import RemoteTier, make_store, measure_link
from tiered_kv.storage.shared_root.own_folder import (
    FolderContents,
    FolderReader,
    pack_name,
)
from tiered_kv.testing.conformance.store import (
    FINGERPRINT,
    PAGE_FORMAT,
    StoreConformance,
    page_bytes,
    page_key,
)
from tiered_kv.testing.valkey import ValkeyServer
from tiered_kv.tiers import Knowledge

SITE = StoreSite(FINGERPRINT, 0, 1, 0, True, PAGE_FORMAT, 1)
BANDWIDTH = 1e9


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a slow machine more time per call."""
    monkeypatch.setattr(remote_pages, "CALL_S", 60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        yield server


def open_pages(server: ValkeyServer, codec: str = "raw", site: StoreSite = SITE) -> RemotePages:
    way = partial(make_store, server.address)
    return RemotePages(way, site, parse(codec)(PAGE_FORMAT), from_table, BANDWIDTH)


def name_of(key: PageKey, rank: int = 0) -> bytes:
    return PAGE_PREFIX + key + rank.to_bytes(2, "big")


def value_of(server: ValkeyServer, name: bytes) -> bytes:
    said = server.talk(b"GET", name)
    return said[said.index(b"\r\n") + 2 : -2]


def smooth_page(number: int) -> Bytes:
    """Return a page like real KV, which varies little between tokens."""
    rng = np.random.default_rng(number)
    channel = rng.standard_normal(PAGE_FORMAT.page_bytes // 2 // PAGE_FORMAT.tokens) * 10
    rows = channel + rng.standard_normal((PAGE_FORMAT.tokens, len(channel))) / 100
    return (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).ravel()


def trained(pages: RemotePages) -> Codec:
    """Return the codec of new pages once it is trained, which happens concurrently with writes."""
    until = time.monotonic() + 60.0
    while (codec := pages.codec_of_new_pages) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return codec


class RemoteConformance(StoreConformance):
    """The conformance suite of page stores, with a store on a Valkey server of its own."""

    knowledge = Knowledge.ASKED
    codec = "raw"

    @pytest.fixture(autouse=True)
    def serve(self, server: ValkeyServer) -> None:
        self.server = server

    def make_store(self, root: Path) -> PageStore:
        return open_pages(self.server, self.codec)

    def damage(self, root: Path, key: PageKey) -> None:
        value = bytearray(value_of(self.server, name_of(key)))
        value[-7] ^= 1
        self.server.talk(b"SET", name_of(key), bytes(value))


class TestRawPages(RemoteConformance):
    codec = "raw"


class TestZstdPages(RemoteConformance):
    codec = "zstd"


class TestCentredPages(RemoteConformance):
    codec = "centred"


class SharedRootConformance(StoreConformance):
    """The conformance suite of page stores, with a store in a shared folder."""

    knowledge = Knowledge.ASKED
    codec = "raw"

    def make_store(self, root: Path) -> PageStore:
        root.mkdir(exist_ok=True)
        way = partial(make_store, parse_address(f"{root.as_uri()}?gib=1"))
        return RemotePages(way, SITE, parse(self.codec)(PAGE_FORMAT), from_table, BANDWIDTH)

    def damage(self, root: Path, key: PageKey) -> None:
        place = read_folder(next(root.iterdir())).places[name_of(key)]
        pack = next(root.glob(f"*/{pack_name(place.pack)}"))
        content = bytearray(pack.read_bytes())
        content[place.offset + place.nbytes - 7] ^= 1
        pack.write_bytes(content)


class TestRawPagesInAFolder(SharedRootConformance):
    codec = "raw"


class TestCentredPagesInAFolder(SharedRootConformance):
    codec = "centred"


def read_folder(folder: Path) -> FolderContents:
    reader = FolderReader(folder)
    reader.refresh()
    return reader.contents


def test_no_change_of_a_value_gives_a_wrong_page(server: ValkeyServer) -> None:
    pages, key = open_pages(server), page_key(1)
    good, out = page_bytes(key), np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    assert not pages.put([(key, good), (page_key(2), page_bytes(page_key(2)))])
    value = value_of(server, name_of(key))
    changed = [value[:at] for at in (0, 1, HEADER_BYTES, len(value) // 2, len(value) - 1)]
    changed += [value + b"x", b"foreign", value_of(server, name_of(page_key(2)))]
    for at in range(0, len(value), 97):
        flipped = bytearray(value)
        flipped[at] ^= 0x10
        changed.append(bytes(flipped))
    for bad in changed:
        server.talk(b"SET", name_of(key), bad)
        assert pages.get([(key, out)]) == {0}
    assert pages.counters()["remote_pages_bad"] == len(changed)
    assert not pages.put([(key, good)]), "it is rewritten"
    assert not pages.get([(key, out)])
    assert np.array_equal(out, good)
    pages.close()


def test_pages_of_a_trained_codec_are_read_elsewhere(server: ValkeyServer) -> None:
    ours = open_pages(server, "centred")
    pages = [(page_key(number), smooth_page(number)) for number in range(40)]
    assert not ours.put(pages[:20])
    assert trained(ours).table
    assert not ours.put(pages[20:])
    theirs = open_pages(server, "raw")
    out = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key, _ in pages]
    assert not theirs.get(out)
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(out, pages, strict=True))
    assert theirs.exists([key for key, _ in pages], 20.0) == frozenset()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("encoded", [False, True])
def test_training_the_codec_during_a_write_damages_no_page(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, encoded: bool
) -> None:
    """A codec is trained while a page that the untrained codec encoded is written. Another engine
    reads the page correctly, so the page's record does not name the new table."""
    before = parse("centred")(PAGE_FORMAT)
    after = before.trained([smooth_page(number) for number in range(20)])
    assert before.table != after.table

    class Training:
        """Returns the untrained codec at the first access, and the trained one afterwards."""

        wanted = False
        looks = 0

        @property
        def codec(self) -> Codec:
            self.looks += 1
            return before if self.looks == 1 else after

    ours, theirs = open_pages(server), open_pages(server)
    monkeypatch.setattr(ours, "_training", Training())
    page, out = smooth_page(50), np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    if encoded:
        assert not ours.put_coded([(page_key(1), CodedPage(before, before.encode(page)))])
    else:
        assert not ours.put([(page_key(1), page)])
    assert not theirs.get([(page_key(1), out)])
    assert np.array_equal(out, page)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("fault", ["lost", "flipped"])
def test_pages_without_their_table_are_missing(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ours = open_pages(server, "centred")
    pages = [(page_key(number), smooth_page(number)) for number in range(20)]
    assert not ours.put(pages)
    codec = trained(ours)
    assert not ours.put(pages)
    name = TABLE_PREFIX + FINGERPRINT + table_name(codec.codec_id, codec.table)
    value = bytearray(value_of(server, name))
    value[40] ^= 1
    if fault == "lost":
        server.talk(b"DEL", name)
    else:
        server.talk(b"SET", name, bytes(value))
    theirs = open_pages(server)
    out = np.zeros((20, PAGE_FORMAT.page_bytes), np.uint8)
    wanted = [(key, out[at]) for at, (key, _) in enumerate(pages)]
    assert theirs.get(wanted) == frozenset(range(20))
    monkeypatch.setattr(remote_pages, "AGAIN_S", 0.0)
    assert not ours.put(pages[:1]), "the table is put again before long"
    again = open_pages(server)
    assert not again.get(wanted)
    assert all(np.array_equal(out[at], page) for at, (_, page) in enumerate(pages))
    for one in (ours, theirs, again):
        one.close()


def test_ranks_have_their_own_pages_and_the_first_is_queried(server: ValkeyServer) -> None:
    first, second = (open_pages(server, site=replace(SITE, rank=rank)) for rank in range(2))
    key = page_key(1)
    assert not first.put([(key, page_bytes(key))])
    out = np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    assert first.exists([key, page_key(2)], 20.0) == {1}
    assert second.exists([key, page_key(2)], 20.0) == frozenset(), "the first rank asks"
    assert second.get([(key, out)]) == {0}, "and reading tells"
    first.close()
    second.close()


def test_a_reset_deletes_only_this_engines_pages(server: ValkeyServer) -> None:
    ours, theirs = open_pages(server), open_pages(server)
    assert not ours.put([(page_key(1), page_bytes(page_key(1)))])
    assert not theirs.put([(page_key(2), page_bytes(page_key(2)))])
    ours.clear()
    assert theirs.exists([page_key(1), page_key(2)], 20.0) == {0}
    ours.close()
    theirs.close()


def test_a_reset_while_the_store_is_down_is_completed_later(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store does not answer during a reset. The page is deleted once the store answers again,
    so that no engine finds a page of old weights."""
    monkeypatch.setattr(remote_pages, "CALL_S", 0.2)
    ours, theirs, key = open_pages(server), open_pages(server), page_key(1)
    assert not ours.put([(key, page_bytes(key))])
    server.pause()
    ours.clear()
    ours.close()
    server.go_on()
    (thread,) = (one for one in threading.enumerate() if one.name == THREAD_NAME)
    thread.join(60.0)
    assert not thread.is_alive()
    assert theirs.exists([key], 20.0) == {0}
    assert "1 page from before the cache reset could not be deleted" in caplog.text
    theirs.close()


def test_a_server_that_stops_in_a_read_touches_no_slot_later(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pages, "CALL_S", 0.2)
    pages, key = open_pages(server), page_key(1)
    assert not pages.put([(key, page_bytes(key))])
    server.pause()
    slot = np.full(PAGE_FORMAT.page_bytes, 0xA5, np.uint8)
    began = time.monotonic()
    assert pages.get([(key, slot)]) == {0}
    assert time.monotonic() - began < 5.0
    server.go_on()
    while pages.get([(key, out := np.zeros_like(slot))]):
        time.sleep(0.05)
    assert (slot == 0xA5).all()
    assert np.array_equal(out, page_bytes(key))
    pages.close()


def test_three_quarters_of_the_bandwidth_are_for_restores(server: ValkeyServer) -> None:
    pages = open_pages(server)
    assert pages.rest_s == 0.0
    began = time.monotonic()
    pages.put([(page_key(number), page_bytes(page_key(number))) for number in range(50)])
    assert 0 < pages.rest_s <= 3 * (time.monotonic() - began)
    pages.close()


def test_there_is_no_pause_after_a_failed_write(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write fails because the server is paused. The store requests no pause, which would delay
    the next order, and so the engine."""
    monkeypatch.setattr(remote_pages, "CALL_S", 0.2)
    pages, key = open_pages(server), page_key(1)
    server.pause()
    assert pages.put([(key, page_bytes(key))]) == {0}
    assert pages.rest_s == 0.0
    server.go_on()
    pages.close()


# -- the tier ---------------------------------------------------------------------


def test_the_link_is_measured_and_nothing_is_left(server: ValkeyServer) -> None:
    tier = RemoteTier(load_config({"TIERED_KV_REMOTE": server.url, "TIERED_KV_CODEC": "raw"}))
    assert (tier.spec.shared, tier.spec.in_runs) == (True, True), "it may be a cluster"
    pages = tier.open(SITE)
    assert 1e6 < tier.bandwidth < 1e11
    assert server.talk(b"DBSIZE") == b":0\r\n"
    key = page_key(1)
    assert not pages.put([(key, page_bytes(key))])
    pages.close()


def test_pages_that_no_other_engine_may_find_stay_here(server: ValkeyServer) -> None:
    tier = RemoteTier(load_config({"TIERED_KV_REMOTE": server.url}))
    pages, key = tier.open(replace(SITE, lasting=False)), page_key(1)
    assert isinstance(pages, NoPages)
    assert pages.put([(key, page_bytes(key))]) == pages.get([(key, page_bytes(key))]) == {0}
    assert pages.exists([key], 1.0) == {0}
    assert server.talk(b"DBSIZE") == b":0\r\n"


def test_a_store_that_starts_later_is_used_then(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    tier = RemoteTier(load_config({"TIERED_KV_REMOTE": server.url, "TIERED_KV_CODEC": "raw"}))
    pages, key = tier.open(SITE), page_key(1)
    assert pages.put([(key, page_bytes(key))]) == {0}
    with server:
        until = time.monotonic() + 60.0
        while pages.put([(key, page_bytes(key))]):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert measure_link(ValkeyStore(server.address)).read > 1e6
    pages.close()


def test_a_read_only_server_is_read_and_refused_writes_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica serves old pages, and refuses new pages, which are counted. Its bandwidth is
    measured, not assumed to be the lowest possible."""
    (tmp_path / "primary").mkdir()
    (tmp_path / "replica").mkdir()
    old, new, out = page_key(1), page_key(2), np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    primary, replica = ValkeyServer(tmp_path / "primary"), ValkeyServer(tmp_path / "replica")
    with primary, replica:
        ours = open_pages(primary)
        assert not ours.put([(old, page_bytes(old))])
        ours.close()
        replica.talk(b"REPLICAOF", b"127.0.0.1", b"%d" % primary.port)
        until = time.monotonic() + 60.0
        while replica.talk(b"DBSIZE") != b":1\r\n":
            assert time.monotonic() < until
            time.sleep(0.05)
        settings = {"TIERED_KV_REMOTE": replica.url, "TIERED_KV_CODEC": "raw"}
        tier = RemoteTier(load_config(settings))
        pages = tier.open(SITE)
        assert tier.bandwidth > 1e7
        assert "rejects writes" in caplog.text
        assert pages.put([(new, page_bytes(new))]) == {0}
        assert pages.exists([old, new], 20.0) == {1}
        assert not pages.get([(old, out)])
        assert np.array_equal(out, page_bytes(old))
        counters = pages.counters()
        assert (counters["remote_pages_refused"], counters["remote_calls_failed"]) == (1, 0)
        pages.close()


def test_a_server_that_rejects_the_login_stops_the_startup(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, password="hunter2") as server:
        env = {"TIERED_KV_REMOTE": server.url, "TIERED_KV_REMOTE_PASSWORD": "wrong"}
        tier = RemoteTier(load_config(env))
        with pytest.raises(ConfigError, match="TIERED_KV_REMOTE_PASSWORD_FILE") as caught:
            tier.open(SITE)
        assert "hunter2" not in str(caught.value)
        with pytest.raises(ConfigError, match="set TIERED_KV_REMOTE"):
            RemoteTier(load_config({}))
