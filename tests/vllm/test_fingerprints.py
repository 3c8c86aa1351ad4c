"""A page's fingerprint depends on everything that affects its KV, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.vllm.fingerprints import Fingerprints, base_fingerprints
from tiered_kv.keys import Fingerprint
from tiered_kv.page_group import CONTEXT, PageGroup
from tiered_kv.testing.vllm.rig import Rig


@pytest.fixture
def fingerprints(make_rig: MakeRig) -> Iterator[Fingerprints]:
    rig = make_rig()
    made = Fingerprints(base_fingerprints(rig.config, rig.half.facts))
    yield made
    made.close()


def fingerprint(rig: Rig) -> Fingerprint:
    """Return the fingerprint of the only page group."""
    (only,) = base_fingerprints(rig.config, rig.half.facts)
    return only


def adapter(path: Path | str, number: int = 1, *, in_place: bool = False, name: str = "a") -> Any:
    return SimpleNamespace(
        lora_int_id=number, lora_name=name, lora_path=str(path), load_inplace=in_place
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The weight file of an adapter, in the adapter's folder."""
    (tmp_path / "adapter").mkdir()
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.write_bytes(b"one" * 1000)
    return path


def digested(fingerprints: Fingerprints, request: Any) -> bytes | None:
    fingerprints.of(request, CONTEXT)
    fingerprints.drain()
    return fingerprints.of(request, CONTEXT)


def test_adapters_are_distinguished_by_their_files(
    fingerprints: Fingerprints, tmp_path: Path
) -> None:
    found = set()
    for number, weights in enumerate([b"one", b"two"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(weights)
        found.add(digested(fingerprints, adapter(folder, number)))
    assert len(found | {None, fingerprints.of(None, CONTEXT)}) == 4


@pytest.mark.parametrize("name", ["org/adapter", "empty"])
def test_kv_of_an_adapter_without_local_files_is_neither_saved_nor_restored(
    fingerprints: Fingerprints, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without local files, vLLM loads the adapter from a hub, where its files may change at any
    time."""
    (tmp_path / "empty").mkdir()
    request = adapter(tmp_path / name if name == "empty" else name)
    assert digested(fingerprints, request) is None
    assert "Load it from a local folder" in caplog.text


def test_an_adapter_in_the_home_folder_is_found(
    fingerprints: Fingerprints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    assert digested(fingerprints, adapter("~")) is not None


def test_an_adapter_loaded_in_place_has_keys_immediately_and_is_not_read_by_requests(
    fingerprints: Fingerprints, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps the load-in-place flag on every later request of the adapter. These requests do
    not read its files."""
    loaded = adapter(weights.parent, in_place=True)
    assert not fingerprints.on_load(loaded), "no KV of it can be there"
    monkeypatch.delattr("tiered_kv.connectors.vllm.fingerprints.digest_files")
    keys = {fingerprints.of(loaded, CONTEXT) for _ in range(100)}
    assert len(keys) == 1
    assert None not in keys
    assert fingerprints._threads._work_queue.qsize() <= 1  # noqa: SLF001 - what waits there
    assert fingerprints.on_load(loaded), "KV of the first load has the same hashes"
    assert fingerprints.of(loaded, CONTEXT) not in {*keys, None}


def test_weights_that_changed_before_the_first_request_are_noticed(
    fingerprints: Fingerprints, weights: Path
) -> None:
    first, second = adapter(weights.parent, 1), adapter(weights.parent, 2)
    assert not fingerprints.on_load(first)
    fingerprints.drain()
    weights.write_bytes(b"two" * 1000)
    fingerprints.on_unload(1)
    assert fingerprints.on_load(second), "vLLM may have KV of the first under these hashes"
    of_second = digested(fingerprints, second)
    assert of_second is not None
    fingerprints.on_unload(2)
    weights.write_bytes(b"one" * 1000)
    fingerprints.on_load(third := adapter(weights.parent, 3))
    assert digested(fingerprints, third) not in {of_second, None}


def test_an_adapter_whose_files_change_after_the_load_has_no_keys_until_the_next(
    fingerprints: Fingerprints, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may evict the adapter and read its files again without notice. After a change of the
    files, the adapter therefore has no keys until it is loaded again."""
    loaded = adapter(weights.parent)
    fingerprints.on_load(loaded)
    assert digested(fingerprints, loaded) is not None
    weights.write_bytes(b"two" * 1000)
    fingerprints.of(loaded, CONTEXT)
    fingerprints.drain()
    assert fingerprints.of(loaded, CONTEXT) is None
    assert digested(fingerprints, loaded) is None
    assert "changed after they were loaded" in caplog.text
    fingerprints.on_unload(1)
    fingerprints.on_load(loaded)
    assert digested(fingerprints, loaded) is not None


def test_files_that_change_while_they_are_digested_are_noticed(
    fingerprints: Fingerprints, weights: Path
) -> None:
    loaded = adapter(weights.parent)
    fingerprints.on_load(loaded)  # vLLM may be reading the files at this time
    weights.write_bytes(b"two" * 1000)
    fingerprints.drain()
    first = fingerprints.of(loaded, CONTEXT)
    fingerprints.drain()
    assert None in (first, fingerprints.of(loaded, CONTEXT)), "before or after the digest"


def test_an_adapter_loaded_without_a_call_in_place_of_another_has_no_keys(
    fingerprints: Fingerprints, weights: Path
) -> None:
    assert digested(fingerprints, adapter(weights.parent, 1)) is not None
    weights.write_bytes(b"two" * 1000)
    assert digested(fingerprints, adapter(weights.parent, 2)) is None


def test_adapters_differ_by_name_alone_if_vllm_hashes_nothing_else(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """vLLM 0.30 includes only the name of an adapter in block hashes. There, loading a second
    adapter of the same name reports that vLLM may have KV of the first under the same hashes."""
    rig = make_rig()
    for hashes_paths, stale in ((True, False), (False, True)):
        made = Fingerprints(
            base_fingerprints(rig.config, rig.half.facts), hashes_paths=hashes_paths
        )
        for number in (1, 2):
            (folder := tmp_path / f"{hashes_paths} {number}").mkdir()
            (folder / "adapter_model.safetensors").write_bytes(b"weights %d" % number)
            found = made.on_load(adapter(folder, number))
        assert found is stale
        made.close()


def test_old_adapter_loads_are_forgotten(
    fingerprints: Fingerprints, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.connectors.vllm.fingerprints.MOST_ADAPTERS", 8)
    for number in range(50):
        fingerprints.on_load(adapter(weights.parent, number, in_place=True))
    assert len(fingerprints._loads) == 8  # noqa: SLF001 - nothing else grows


def test_models_with_overridden_configurations_have_different_fingerprints(
    make_rig: MakeRig,
) -> None:
    """``--hf-overrides`` changes the configuration, and so the fingerprint, although the model's
    files are the same."""
    rig = make_rig()
    before = fingerprint(rig).config
    assert before == fingerprint(rig).config
    rig.config.model_config.hf_text_config.num_experts_per_tok = 4
    assert before != fingerprint(rig).config


@pytest.mark.parametrize(
    ("overrides", "told_apart"),
    [
        ({}, False),
        # The configuration of the text model already contains this override.
        ({"text_config": {"rope_theta": 1e6}}, False),
        ({"vision_config": {"patch_size": 16}}, True),
        (lambda config: config, True),
    ],
)
def test_overrides_outside_the_text_model_count_if_there_are_any(
    make_rig: MakeRig, overrides: Any, told_apart: bool
) -> None:
    """Overrides outside the text model change the fingerprint. Without such overrides the
    fingerprint stays the same, so that existing pages stay valid."""
    rig = make_rig()
    model = rig.config.model_config
    before = fingerprint(rig).digest()
    model.hf_config = SimpleNamespace(to_dict=lambda: {"vision_config": {"patch_size": 16}})
    model.hf_overrides = overrides
    assert (fingerprint(rig).digest() != before) == told_apart


@pytest.mark.parametrize(("load_format", "found"), [("auto", True), ("dummy", False)])
def test_weights_not_loaded_from_files_are_not_identified_by_files(
    make_rig: MakeRig, tmp_path: Path, load_format: str, found: bool
) -> None:
    """``--load-format dummy`` creates different weights at each start, whatever files exist. Each
    start therefore has a different fingerprint."""
    rig = make_rig()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    rig.config.load_config.load_format = load_format
    one, other = (fingerprint(rig) for _ in range(2))
    assert one.lasting is found
    assert (one == other) is found


def test_a_model_with_weights_elsewhere_is_not_identified_by_its_configuration(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """If the weights are not in the model's folder but, for example, in object storage, each start
    has a different fingerprint. A fine-tuned model could have the same configuration."""
    rig = make_rig()
    assert fingerprint(rig).lasting
    (tmp_path / "model" / "model.safetensors").unlink()
    one, other = (fingerprint(rig) for _ in range(2))
    assert not one.lasting
    assert one != other


def test_each_page_group_has_a_fingerprint_that_names_all_of_them(make_rig: MakeRig) -> None:
    """A group's fingerprint depends on all groups of the model, because a page of one group is
    useless without the pages of the other groups with which it was created."""
    rig = make_rig()
    (first,) = rig.half.facts.groups
    second = replace(first, index=1, block_size=first.block_size * 2)
    third = replace(second, arrangement="another")

    def of(*groups: PageGroup) -> list[bytes]:
        facts = replace(rig.half.facts, groups=groups)
        return [one.digest() for one in base_fingerprints(rig.config, facts)]

    assert len({*of(first), *of(first, second), *of(first, third)}) == 5
    assert of(first) == [fingerprint(rig).digest()]


def test_the_fingerprint_of_one_group_has_not_changed() -> None:
    """If the fingerprint changed, no page in any existing store would be found."""
    written = Fingerprint(
        model="m",
        adapter="",
        dtype="torch.bfloat16",
        cache_dtype="auto",
        kv_scales="checkpoint",
        config={"layers": 2},
        group=0,
        block_size=16,
        layout="2x64 NHD",
        ranks=1,
        hash_algorithm="sha256/0",
        generation="",
    )
    assert written.digest().hex() == "d52af457f1ac16555a959bbef6575bfd"
