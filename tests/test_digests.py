"""File digests are correct, and unchanged large files are not read again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tiered_kv import digests
from tiered_kv.digests import default_cache, digest_files, model_files


@pytest.fixture
def all_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the digests of files of any size."""
    monkeypatch.setattr(digests, "CACHED_BYTES", 0)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each file when its bytes are read."""
    names: list[str] = []
    real = digests.digest_file

    def spy(path: Path) -> str:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(digests, "digest_file", spy)
    return names


def weights(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in contents.items():
        path = folder / f"{name}.safetensors"
        path.write_bytes(content)
        paths.append(path)
    return paths


def test_the_digest_is_of_contents_and_names_wherever_the_files_lie(tmp_path: Path) -> None:
    here = digest_files(weights(tmp_path / "here", a=b"1", b=b"2"))
    there = digest_files(weights(tmp_path / "there", a=b"1", b=b"2"))
    assert here == there
    assert here != digest_files(weights(tmp_path / "swapped", a=b"2", b=b"1"))
    assert here != digest_files(weights(tmp_path / "other", a=b"1", c=b"2"))
    assert here != digest_files(weights(tmp_path / "fewer", a=b"1"))


def test_files_larger_than_a_chunk_are_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", 8)
    first = digest_files(weights(tmp_path / "1", a=b"x" * 20 + b"1"))
    second = digest_files(weights(tmp_path / "2", a=b"x" * 20 + b"2"))
    assert first != second


@pytest.mark.usefixtures("all_are_cached")
def test_the_second_time_nothing_is_read(tmp_path: Path, read: list[str]) -> None:
    paths, cache = weights(tmp_path, a=b"1", b=b"2"), tmp_path / "cache" / "digests.json"

    first = digest_files(paths, cache)
    assert digest_files(paths, cache) == first

    assert read == ["a.safetensors", "b.safetensors"]


@pytest.mark.usefixtures("all_are_cached")
def test_a_change_that_keeps_the_size_is_noticed_by_its_time(
    tmp_path: Path, read: list[str]
) -> None:
    (path,) = weights(tmp_path, a=b"old")
    cache = tmp_path / "digests.json"
    before = digest_files([path], cache)
    was = path.stat().st_mtime_ns

    path.write_bytes(b"new")
    os.utime(path, ns=(was, was + 1))

    assert digest_files([path], cache) != before
    assert len(read) == 2


@pytest.mark.usefixtures("all_are_cached")
def test_a_change_that_keeps_the_time_is_noticed_by_its_size(tmp_path: Path) -> None:
    (path,) = weights(tmp_path, a=b"old")
    cache = tmp_path / "digests.json"
    before = digest_files([path], cache)
    was = path.stat().st_mtime_ns

    path.write_bytes(b"longer")
    os.utime(path, ns=(was, was))

    assert digest_files([path], cache) != before


@pytest.mark.usefixtures("all_are_cached")
def test_a_new_file_does_not_cost_the_old_ones(tmp_path: Path, read: list[str]) -> None:
    cache = tmp_path / "digests.json"
    digest_files(weights(tmp_path, a=b"1"), cache)
    digest_files(weights(tmp_path, b=b"2"), cache)

    digest_files(sorted(tmp_path.glob("*.safetensors")), cache)

    assert read == ["a.safetensors", "b.safetensors"]


def test_small_files_are_read_each_time_and_leave_nothing_in_the_cache(
    tmp_path: Path, read: list[str]
) -> None:
    paths, cache = weights(tmp_path, small=b"1", large=b""), tmp_path / "digests.json"
    os.truncate(paths[1], digests.CACHED_BYTES)
    assert digest_files(paths, cache) == digest_files(paths, cache)
    assert read == ["small.safetensors", "large.safetensors", "small.safetensors"]
    assert set(json.loads(cache.read_text())) == {str(paths[1].resolve())}


@pytest.mark.usefixtures("all_are_cached")
def test_deleted_files_leave_the_cache(tmp_path: Path) -> None:
    paths, cache = weights(tmp_path, a=b"1", b=b"2"), tmp_path / "digests.json"
    digest_files(paths[:1], cache)
    paths[0].unlink()
    digest_files(paths[1:], cache)
    assert set(json.loads(cache.read_text())) == {str(paths[1].resolve())}


JUNK = [b"", b"{", b"\xff\xfe", b"[]", b"3", b'"text"', b"null", b'{"/a": 3}', b'{"/a": [1, 2]}']
JUNK.append(b"[" * 200_000)


@pytest.mark.usefixtures("all_are_cached")
@pytest.mark.parametrize("junk", JUNK)
def test_a_corrupt_cache_is_ignored_and_replaced(
    tmp_path: Path, junk: bytes, read: list[str]
) -> None:
    paths, cache = weights(tmp_path, a=b"1"), tmp_path / "digests.json"
    cache.write_bytes(junk)

    assert digest_files(paths, cache) == digest_files(paths)

    digest_files(paths, cache)
    assert len(read) == 2, "once with the corrupt cache, once without any"
    assert set(json.loads(cache.read_text())) == {str(paths[0].resolve())}


@pytest.mark.usefixtures("all_are_cached")
@pytest.mark.parametrize("digest", [None, 7, ["x"]])
def test_a_corrupt_entry_is_ignored(tmp_path: Path, digest: object) -> None:
    """A cached digest that is not a string is ignored. Otherwise, two models whose cached digest is
    ``null`` would share pages."""
    (path,) = weights(tmp_path, a=b"1")
    cache, stat = tmp_path / "digests.json", path.stat()
    cache.write_text(json.dumps({str(path.resolve()): [stat.st_size, stat.st_mtime_ns, digest]}))

    assert digest_files([path], cache) == digest_files([path])


@pytest.mark.usefixtures("all_are_cached")
def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, read: list[str]) -> None:
    (path,) = weights(tmp_path, a=b"1")
    nowhere = path / "is a file" / "digests.json"

    assert digest_files([path], nowhere) == digest_files([path], nowhere)

    assert len(read) == 2


@pytest.mark.usefixtures("all_are_cached")
def test_a_cache_that_cannot_be_replaced_leaves_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    (path,) = weights(tmp_path, a=b"1")
    monkeypatch.setattr(Path, "replace", full)
    digest_files([path], tmp_path / "cache" / "digests.json")
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_files([tmp_path / "gone.safetensors"])


def test_a_model_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "model-2.safetensors",
        "model-1.safetensors",
        "sub/more.bin",
        "tokenizer.json",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    found = [str(path.relative_to(tmp_path)) for path in model_files(tmp_path)]

    assert found == ["config.json", "model-1.safetensors", "model-2.safetensors", "sub/more.bin"]


def test_a_single_weight_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    assert model_files(path) == [path]


def test_files_of_the_hub_cache_are_links_and_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "sha").write_bytes(b"1")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to("../blobs/sha")

    (path,) = model_files(snapshot)
    assert digest_files([path]) == digest_files(weights(tmp_path / "copy", model=b"1"))


def test_the_cache_is_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tiered-kv" / "digests.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "tiered-kv" / "digests.json"
