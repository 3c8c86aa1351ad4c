"""Reading of vLLM's configuration, and the configurations that are refused at startup. The tests
need no vLLM."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tiered_kv.codecs.base import ElementType
from tiered_kv.connectors.runtime.base import EngineFacts, EngineLimits
from tiered_kv.connectors.vllm import engine_config as engine
from tiered_kv.connectors.vllm.engine_config import (
    check_version,
    read_engine,
    refuse_unsupported,
    report_block_size,
)
from tiered_kv.connectors.vllm.kv_groups import why_not_offloadable
from tiered_kv.errors import TieredKVError, UnsupportedError
from tiered_kv.page_group import PageGroup, Placement, page_layout

# -- versions ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nobody_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "warned_versions", set())


@pytest.mark.parametrize(
    "version", ["0.30.0", "0.31", "0.32.0", "0.33.1rc2", "0.30.0.dev5+g1a2b3c4.cpu", "0.31.0+cu130"]
)
def test_tested_versions_are_accepted_without_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.29.3", "0.9.2", "0.8", "0.0.1"])
def test_older_versions_are_refused_with_one_sentence(version: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_version(version)
    assert str(caught.value) == (
        f"vLLM {version} is too old for TieredContinuumConnector: install vLLM 0.30 or newer."
    )


@pytest.mark.parametrize("version", ["0.34.0", "0.100.0", "1.0.0"])
def test_newer_versions_cause_one_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        check_version(version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert version in record.getMessage()
    assert "tested with vLLM 0.30 to 0.33" in record.getMessage()


@pytest.mark.parametrize("version", ["", "dev", "main-1a2b3c4", "unknown"])
def test_an_unreadable_version_causes_a_warning_and_is_accepted(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(version)
    assert "compatibility is not checked" in caplog.text


# -- configurations -----------------------------------------------------------------------


def config(**changes: Any) -> SimpleNamespace:
    """Return a valid configuration with changes. In names of nested fields, two underscores stand
    for the dot."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            world_size=2,
            data_parallel_index=0,
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
        speculative_config=None,
        kv_events_config=None,
        scheduler_config=SimpleNamespace(
            async_scheduling=False,
            scheduler_cls=None,
            policy="fcfs",
            max_num_batched_tokens=2048,
            max_num_seqs=64,
        ),
        use_v2_model_runner=False,
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=16, cache_dtype="auto"),
        model_config=SimpleNamespace(max_model_len=4096, dtype="torch.bfloat16"),
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        setattr(getattr(made, section) if key else made, key or section, value)
    return made


def test_an_ordinary_configuration_is_accepted() -> None:
    refuse_unsupported(config())


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"parallel_config__decode_context_parallel_size": 2},
        "does not support context parallelism",
        "remove --decode-context-parallel-size and --prefill-context-parallel-size.",
    ),
    (
        {"parallel_config__prefill_context_parallel_size": 4},
        "does not support context parallelism",
        "remove --decode-context-parallel-size and --prefill-context-parallel-size.",
    ),
    (
        {"model_config__is_encoder_decoder": True},
        "does not support encoder-decoder models",
        "remove --kv-transfer-config.",
    ),
    (
        {"diffusion_config": SimpleNamespace(canvas_length=32)},
        "does not support diffusion models",
        "remove --kv-transfer-config.",
    ),
    (
        {"model_config__is_diffusion": True},
        "does not support diffusion models",
        "remove --kv-transfer-config.",
    ),
    (
        {"kv_transfer_config__kv_role": "kv_producer"},
        'which "kv_role":"kv_producer" does not allow',
        'set "kv_role":"kv_both".',
    ),
    (
        {"kv_transfer_config__kv_load_failure_policy": "fail"},
        "vLLM fails a request if a page cannot be restored",
        'add "kv_load_failure_policy":"recompute" to --kv-transfer-config.',
    ),
    (
        {"cache_config__enable_prefix_caching": False},
        "needs prefix caching",
        "For some models vLLM turns prefix caching off: serve them without this connector.",
    ),
]


@pytest.mark.parametrize(("changes", "what", "instead"), REFUSALS)
def test_unsupported_configurations_are_refused_with_a_remedy(
    changes: dict[str, Any], what: str, instead: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(config(**changes))
    sentence = str(caught.value)
    assert what in sentence
    assert sentence.endswith(instead)
    assert "\n" not in sentence
    assert isinstance(caught.value, TieredKVError)


def test_a_vllm_without_prefill_context_parallelism_is_accepted() -> None:
    old = config()
    del old.parallel_config.prefill_context_parallel_size
    refuse_unsupported(old)


def test_the_load_failure_policy_must_be_set() -> None:
    """If the policy is not set, the configuration is refused, because vLLM's default is to fail the
    request."""
    silent = config()
    del silent.kv_transfer_config.kv_load_failure_policy
    with pytest.raises(UnsupportedError, match="kv_load_failure_policy"):
        refuse_unsupported(silent)


# -- facts ----------------------------------------------------------------------------------


class FullAttentionSpec:
    block_size = 16


class SlidingWindowSpec(FullAttentionSpec):
    sliding_window = 100
    page_size_bytes = 64


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size = 64


class MambaSpec(FullAttentionSpec):
    mamba_cache_mode = "align"
    shapes = ((4,), (2, 5))
    dtypes = (SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4))
    real_page_size_bytes = 48


class RunningStateSpec(MambaSpec):
    mamba_cache_mode = "none"


class CrossAttentionSpec:
    block_size = 16


class CoarseSpec(FullAttentionSpec):
    block_size = 32


def kv_config(*specs: Callable[[], Any], host_resident: bool = False) -> SimpleNamespace:
    tensor = SimpleNamespace(
        layers=["l0", "l1"],
        layer_stride=640,
        block_stride=64,
        offset=0,
        host_resident=host_resident,
    )
    return SimpleNamespace(
        num_blocks=10,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec(), layer_names=["l0", "l1"]) for spec in specs
        ],
        kv_cache_tensors=[tensor],
    )


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the parts of vLLM that are needed to read the engine configuration with fakes."""
    module = ModuleType("vllm.v1.kv_cache_interface")
    module.is_full_attention_spec = (  # type: ignore[attr-defined]
        lambda spec: type(spec) in (FullAttentionSpec, CoarseSpec)
    )
    for kind in (SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("without_vllm")
def test_an_engine_configuration_is_read_into_facts_for_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = read_engine(config(), kv_config(FullAttentionSpec))
    assert facts == EngineFacts(
        ranks=2,
        block_size=16,
        hash_tokens=16,
        hit_tokens=16,
        num_blocks=10,
        groups=(
            PageGroup(
                index=0,
                block_size=16,
                layout=page_layout([Placement(2, 640, 64, 0)], 10),
                element=ElementType.BF16,
                arrangement=facts.groups[0].arrangement,
            ),
        ),
        placeholders=1,
        limits=EngineLimits(step_tokens=2048, running=64, context_tokens=4096),
    )
    assert facts.usable_blocks == 9
    assert facts.slot_bytes == 128
    assert not caplog.records


class ContinuumScheduler:
    """A class with the name of the package's scheduler. vLLM may be given the class itself instead
    of its name."""


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(
    ("scheduler", "policy", "in_order"),
    [
        ("tiered_kv.connectors.vllm.engine_scheduler.ContinuumScheduler", "fcfs", True),
        (ContinuumScheduler, "fcfs", True),
        (ContinuumScheduler, "priority", False),
        ("vllm.v1.core.sched.scheduler.Scheduler", "fcfs", False),
    ],
)
def test_requests_run_in_job_order_with_the_packages_scheduler(
    scheduler: object, policy: str, in_order: bool
) -> None:
    said = config(scheduler_config__scheduler_cls=scheduler, scheduler_config__policy=policy)
    limits = read_engine(said, kv_config(FullAttentionSpec)).limits
    assert limits.job_order is in_order


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(
    ("max_len", "specs", "advised"),
    [
        (4096, [FullAttentionSpec], False),
        (1 << 20, [FullAttentionSpec], True),
        (1 << 20, [SlidingWindowSpec], False),
        (1 << 20, [SlidingWindowSpec, FullAttentionSpec], True),
    ],
)
def test_longer_blocks_are_recommended_at_startup_for_long_contexts(
    max_len: int, specs: list[Any], advised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said = config(model_config__max_model_len=max_len)
    with caplog.at_level(logging.INFO, "tiered_kv"):
        report_block_size(read_engine(said, kv_config(*specs)))
    assert ["--block-size 128" in record.getMessage() for record in caplog.records] == [
        True
    ] * advised


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(
    ("changes", "ahead", "sync"),
    [
        ({}, False, True),
        ({"scheduler_config__async_scheduling": True}, True, False),
        ({"use_v2_model_runner": True}, False, False),
        ({"parallel_config__pipeline_parallel_size": 2}, True, False),
    ],
)
def test_restores_are_sync_only_where_vllm_can_revert_them(
    changes: dict[str, Any], ahead: bool, sync: bool
) -> None:
    facts = read_engine(config(**changes), kv_config(FullAttentionSpec))
    assert (facts.ahead, facts.sync_restores) == (ahead, sync)


@pytest.mark.usefixtures("without_vllm")
def test_blocks_of_one_size_can_be_arranged_differently() -> None:
    """Within a block, heads can come before tokens or after them. The layout of the blocks is the
    same, but pages of the two arrangements must not be mixed."""
    one, other = kv_config(FullAttentionSpec), kv_config(FullAttentionSpec)
    one.kv_cache_layout, other.kv_cache_layout = "LBNHC", "LBHNC"
    (mine,), (theirs,) = (read_engine(config(), cache).groups for cache in (one, other))
    assert mine.layout == theirs.layout
    assert mine.arrangement != theirs.arrangement


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (kv_config(FullAttentionSpec, CrossAttentionSpec), "its CrossAttentionSpec is not"),
        (kv_config(RunningStateSpec), "mamba_cache_mode none"),
        (kv_config(CoarseSpec), "its block size differs from the block size of its block hashes"),
        (kv_config(FullAttentionSpec, host_resident=True), "is already in CPU memory"),
    ],
)
def test_kv_that_cannot_be_offloaded_is_left_to_vllm_with_a_reason(
    cache: SimpleNamespace, reason: str
) -> None:
    facts = read_engine(config(), cache)
    assert facts.groups == ()
    assert facts.slot_bytes == facts.slots(1 << 30) == 0
    assert reason in str(why_not_offloadable(config(), cache))


@pytest.mark.usefixtures("without_vllm")
def test_groups_have_the_reach_of_a_hit_and_full_attention_is_first() -> None:
    cache = kv_config(SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec, FullAttentionSpec)
    groups = read_engine(config(), cache).groups
    assert [group.index for group in groups] == [3, 0, 1, 2]
    assert [list(group.needs(200)) for group in groups] == [
        list(range(13)),
        [6, 7, 8, 9, 10, 11, 12],
        [12],
        [12],
    ]
    assert groups[3].page_bytes == 2 * 48, "not the padding"
    assert [section.nbytes for section in groups[3].sections] == [8, 40, 8, 40]


@pytest.mark.usefixtures("without_vllm")
def test_restores_with_several_groups_are_async() -> None:
    assert not read_engine(config(), kv_config(FullAttentionSpec, MambaSpec)).sync_restores
    assert not read_engine(config(), kv_config(SlidingWindowSpec)).sync_restores


class Drafter:
    """A fake of vLLM's speculative decoding configuration."""

    def __init__(self, *, takes_next_token: bool, modules: int = 1) -> None:
        self._takes_next_token = takes_next_token
        self.num_speculative_tokens = modules

    def use_eagle(self) -> bool:
        return self._takes_next_token

    def use_multi_module_mtp(self) -> bool:
        return self.num_speculative_tokens > 1


@pytest.mark.usefixtures("without_vllm")
def test_kv_of_draft_models_that_take_the_next_token_depends_on_it() -> None:
    ngram, eagle = (Drafter(takes_next_token=takes) for takes in (False, True))
    facts = read_engine(config(speculative_config=ngram), kv_config(FullAttentionSpec))
    assert facts.speculates
    assert not facts.draft_tokens
    cache = kv_config(FullAttentionSpec, MambaSpec)
    facts = read_engine(config(speculative_config=eagle), cache)
    assert [group.draft_tokens for group in facts.groups] == [1, 0], "states have none"
    cache.kv_cache_groups[0].is_eagle_group = True
    facts = read_engine(config(speculative_config=eagle), cache)
    assert [group.draft_tokens for group in facts.groups] == [1, 0]
    chain = Drafter(takes_next_token=True, modules=3)
    facts = read_engine(config(speculative_config=chain), cache)
    assert facts.groups[0].draft_tokens == 3, "vLLM 0.30 does not say it"
    said = config(speculative_config=chain, num_prefill_lookahead_tokens=2)
    assert read_engine(said, cache).groups[0].draft_tokens == 2


def test_slots_are_whole_pages_of_the_given_memory() -> None:
    small, large = (
        PageGroup(i, 16, page_layout([Placement(2, 640, size, 0)], 10))
        for i, size in enumerate((32, 64))
    )
    facts = EngineFacts(1, 16, 16, 16, 10, (small, large))
    assert [facts.slots(nbytes) for nbytes in (0, 127, 128, 1000)] == [0, 0, 1, 7]
