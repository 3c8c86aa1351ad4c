from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tiered_kv.bench.servers import model as model_module
from tiered_kv.bench.servers.model import ModelError, small_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty cache, and the path of a GGUF file that need not exist. Returns the folder
    for converted models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_module, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    return tmp_path / "tiered-kv" / "models"


def test_concurrent_callers_share_one_conversion(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[Path] = []
    both_called = threading.Barrier(2)

    def convert(_source: Path, target: Path) -> None:
        conversions.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model_module, "convert_in_subprocess", convert)
    found: list[Path] = []

    def call() -> None:
        both_called.wait()
        found.append(small_model())

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert found[0] == found[1]
    assert (found[0] / "config.json").read_text() == "{}"
    assert found[0].parent == cache
    assert small_model() == found[0]
    assert len(conversions) == 1


def test_a_failed_conversion_leaves_no_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_source: Path, target: Path) -> None:
        (target / "half").touch()
        raise ModelError("no space left")

    monkeypatch.setattr(model_module, "convert_in_subprocess", fail)
    with pytest.raises(ModelError, match="no space left"):
        small_model()
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_leftovers_of_a_killed_conversion_are_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = cache / f".{model_module.prepared_path().name}-killed"
    leftover.mkdir(parents=True)
    monkeypatch.setattr(model_module, "convert_in_subprocess", lambda *_: None)
    small_model()
    assert not leftover.exists()


def test_the_message_of_a_failed_converter_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)converting none\.gguf failed.*Error"):
        model_module.convert_in_subprocess(tmp_path / "none.gguf", tmp_path / "out")
