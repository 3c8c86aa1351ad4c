"""The index of a writer's folder: any bytes are parsed, up to the first incomplete entry."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.storage.shared_root.index_entries import (
    Entry,
    Kind,
    Place,
    head_of,
    number_in,
    pack_entries,
    parse_entries,
)
from tiered_kv.storage.shared_root.own_folder import FolderContents

NUMBER = bytes(range(16))

ENTRIES = st.lists(
    st.builds(
        Entry,
        st.sampled_from(Kind),
        st.binary(max_size=80),
        st.builds(Place, st.integers(0, 2**32 - 1), st.integers(0, 2**61), st.integers(0, 2**61)),
    ),
    max_size=20,
)


@given(ENTRIES, st.binary(max_size=60))
def test_entries_are_read_up_to_the_first_incomplete_one(
    entries: Sequence[Entry], tail: bytes
) -> None:
    data = pack_entries(entries, NUMBER)
    found, nbytes = parse_entries(data + tail, NUMBER)
    assert found[: len(entries)] == entries
    assert nbytes >= len(data)
    for cut in range(0, len(data), 13):
        found, nbytes = parse_entries(data[:cut], NUMBER)
        assert found == entries[: len(found)]
        assert nbytes <= cut


@given(st.binary(max_size=400))
def test_any_bytes_are_read(data: bytes) -> None:
    entries, nbytes = parse_entries(data, NUMBER)
    assert pack_entries(entries, NUMBER) == data[:nbytes]
    number_in(data[:32])


def test_entries_of_another_index_are_ignored() -> None:
    entry = Entry(Kind.VALUE, b"page", Place(1, 0, 5))
    assert parse_entries(pack_entries([entry], NUMBER), bytes(16)) == ([], 0)
    assert number_in(head_of(NUMBER)) == NUMBER


@given(ENTRIES)
def test_the_newest_entry_of_a_name_counts(entries: Sequence[Entry]) -> None:
    contents, expected = FolderContents(), dict[bytes, Place]()
    contents.apply(entries)
    for kind, name, place in entries:
        if kind is Kind.VALUE:
            expected[name] = place
        elif kind is Kind.DELETED:
            expected.pop(name, None)
        else:
            expected = {n: p for n, p in expected.items() if p.pack != place.pack}
    assert contents.places == expected
