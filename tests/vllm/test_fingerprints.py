"""Pages are found again by what made them, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.vllm.fingerprints import Fingerprints, base_fingerprint


@pytest.fixture
def fingerprints(make_rig: MakeRig) -> Iterator[Fingerprints]:
    rig = make_rig()
    made = Fingerprints(base_fingerprint(rig.config, rig.half.facts))
    yield made
    made.close()


def adapter(path: Path | str, number: int = 1) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path))


def digested(fingerprints: Fingerprints, request: Any) -> bytes | None:
    fingerprints.of(request)
    fingerprints._threads.submit(int).result()  # behind the digest, on the same thread
    return fingerprints.of(request)


def test_adapters_are_told_apart_by_their_files(fingerprints: Fingerprints, tmp_path: Path) -> None:
    found = set()
    for number, weights in enumerate([b"one", b"two"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(weights)
        found.add(digested(fingerprints, adapter(folder, number)))
    assert len(found | {None, fingerprints.of(None)}) == 4


@pytest.mark.parametrize("name", ["org/adapter", "empty"])
def test_an_adapter_without_files_here_is_neither_saved_nor_restored(
    fingerprints: Fingerprints, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker looks it up on a hub, where it may be another one tomorrow."""
    (tmp_path / "empty").mkdir()
    request = adapter(tmp_path / name if name == "empty" else name)
    assert digested(fingerprints, request) is None
    assert "load it by its local folder" in caplog.text


def test_an_adapter_in_the_home_folder_is_found(
    fingerprints: Fingerprints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    assert digested(fingerprints, adapter("~")) is not None


def test_models_whose_configuration_was_overridden_are_told_apart(make_rig: MakeRig) -> None:
    """By ``--hf-overrides``: the files are the same."""
    rig = make_rig()
    before = base_fingerprint(rig.config, rig.half.facts).config
    assert before == base_fingerprint(rig.config, rig.half.facts).config
    rig.config.model_config.hf_text_config.num_experts_per_tok = 4
    assert before != base_fingerprint(rig.config, rig.half.facts).config


@pytest.mark.parametrize(
    ("overrides", "told_apart"),
    [
        ({}, False),
        ({"text_config": {"rope_theta": 1e6}}, False),  # the text model's own says so
        ({"vision_config": {"patch_size": 16}}, True),
        (lambda config: config, True),
    ],
)
def test_overrides_beside_the_text_model_count_where_there_are_any(
    make_rig: MakeRig, overrides: Any, told_apart: bool
) -> None:
    """And nowhere else: pages of others stay valid."""
    rig = make_rig()
    model = rig.config.model_config
    before = base_fingerprint(rig.config, rig.half.facts).digest()
    model.hf_config = SimpleNamespace(to_dict=lambda: {"vision_config": {"patch_size": 16}})
    model.hf_overrides = overrides
    assert (base_fingerprint(rig.config, rig.half.facts).digest() != before) == told_apart


@pytest.mark.parametrize(("load_format", "found"), [("auto", True), ("dummy", False)])
def test_weights_that_were_not_loaded_from_their_files_are_not_told_by_them(
    make_rig: MakeRig, tmp_path: Path, load_format: str, found: bool
) -> None:
    """``--load-format dummy`` makes other weights every time, whatever lies beside the model."""
    rig = make_rig()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    rig.config.load_config.load_format = load_format
    one, other = (base_fingerprint(rig.config, rig.half.facts) for _ in range(2))
    assert one.lasting is found
    assert (one == other) is found


def test_a_model_whose_weights_lie_elsewhere_is_not_told_by_its_configuration(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """As of one in object storage: what was trained further has the same configuration."""
    rig = make_rig()
    assert base_fingerprint(rig.config, rig.half.facts).lasting
    (tmp_path / "model" / "model.safetensors").unlink()
    one, other = (base_fingerprint(rig.config, rig.half.facts) for _ in range(2))
    assert not one.lasting
    assert one != other
