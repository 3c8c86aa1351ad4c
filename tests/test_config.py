"""Settings are read from two sources into one frozen configuration. An error names a valid
value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.config import GIB, Mode, TierConfig, check_cpu_size, load_config
from tiered_kv.errors import ConfigError, TieredKVError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def refusal(env: dict[str, str] | None = None, extra: dict[str, object] | None = None) -> str:
    """Return the message of the error that a configuration raises."""
    with pytest.raises(ConfigError) as caught:
        load_config(env or {}, extra)
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    config = load_config({"PATH": "/bin", "TIERED": "no"})
    assert config == TierConfig(cpu_gib=4.0, pin_fraction=1.0, trace=None)


def test_settings_come_from_the_environment_or_from_the_extra_config(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    env = {
        "TIERED_KV_CPU_GIB": "0.5",
        "TIERED_KV_PIN_FRACTION": "1",
        "TIERED_KV_TRACE": str(trace),
    }
    extra: dict[str, object] = {"cpu_gib": 0.5, "pin_fraction": 1, "trace": str(trace)}

    assert (
        load_config(env)
        == load_config({}, extra)
        == TierConfig(cpu_gib=0.5, pin_fraction=1.0, trace=trace)
    )


def test_the_extra_config_wins_over_the_environment() -> None:
    env = {"TIERED_KV_CPU_GIB": "8", "TIERED_KV_PIN_FRACTION": "0.1"}
    assert load_config(env, {"cpu_gib": 2}) == TierConfig(cpu_gib=2.0, pin_fraction=0.1)


def test_an_engine_is_managed_unless_it_is_to_be_observed(tmp_path: Path) -> None:
    ssd = str(tmp_path / "ssd")
    managed = load_config({"TIERED_KV_SSD_PATH": ssd})
    observed = load_config({"TIERED_KV_SSD_PATH": ssd, "TIERED_KV_MODE": "observe"})
    assert (managed.mode, observed.mode) == (Mode.MANAGE, Mode.OBSERVE)
    assert load_config({"TIERED_KV_MODE": "observe"}, {"mode": "manage"}).mode is Mode.MANAGE
    assert not managed.observes
    assert managed.notes_path == managed.ssd_path
    assert observed.observes
    assert observed.notes_path is None, "no file is made there"


@pytest.mark.parametrize("wrong", ["", "Observe", "dry-run", "1"])
def test_an_unknown_mode_is_refused(wrong: str) -> None:
    said = refusal({"TIERED_KV_MODE": wrong})
    assert said == f"TIERED_KV_MODE={wrong!r} is not valid: set it to manage or observe."


def test_a_number_may_be_written_as_text_in_the_extra_config() -> None:
    assert load_config({}, {"cpu_gib": "0.25"}).cpu_gib == 0.25


def test_zero_turns_the_cpu_tier_or_pinning_off() -> None:
    config = load_config({}, {"cpu_gib": 0, "pin_fraction": 0})
    assert config.cpu_bytes_per_rank(1) == 0
    assert config.pin_fraction == 0


def test_a_misspelt_key_is_refused_with_the_one_that_was_meant() -> None:
    sentence = refusal({"TIERED_KV_CPU_GB": "4"})
    assert sentence == (
        "unknown setting 'cpu_gb' (TIERED_KV_CPU_GB): did you mean cpu_gib? If not, remove the "
        "setting."
    )
    sentence = refusal(extra={"TIERED_KV_CPU_GIB": 4})
    assert "(TIERED_KV_CPU_GIB): did you mean cpu_gib?" in sentence


def test_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    said = {
        "TIERED_KV_SERVICE_HOST": "10.0.0.1",
        "TIERED_KV_SERVICE_PORT": "8000",
        "TIERED_KV_SERVICE_PORT_HTTP": "8000",
        "TIERED_KV_PORT": "tcp://10.0.0.1:8000",
        "TIERED_KV_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load_config(said) == TierConfig()


def test_the_admin_token_is_not_a_setting_and_is_not_kept() -> None:
    assert load_config({"TIERED_KV_ADMIN_TOKEN": "s3cret"}) == TierConfig()
    assert "unknown setting" in refusal(extra={"admin_token": "s3cret"})


def test_an_unknown_key_is_refused_with_the_known_keys() -> None:
    sentence = refusal(extra={"colour": "blue"})
    assert "unknown setting 'colour'" in sentence
    for field in dataclasses.fields(TierConfig):
        assert field.name in sentence


@pytest.mark.parametrize("value", ["", "4GB", "four", None, True, [4], {"gib": 4}])
def test_what_is_not_a_number_is_refused_with_a_valid_one(value: object) -> None:
    sentence = refusal(extra={"cpu_gib": value})
    assert sentence == (
        f"TIERED_KV_CPU_GIB={value!r} is not a number. Set a number, for example "
        "TIERED_KV_CPU_GIB=4."
    )


@pytest.mark.parametrize("value", [-1, -0.001, "1e9", "nan", "inf", "-inf", float("nan")])
def test_an_impossible_size_is_refused_with_one_that_works(value: object) -> None:
    sentence = refusal(extra={"cpu_gib": value})
    assert sentence == (
        f"TIERED_KV_CPU_GIB={value} is not between 0 and 1,048,576 GiB. Set a value in this range, "
        "for example TIERED_KV_CPU_GIB=4."
    )


def test_a_number_too_large_for_a_float_is_refused_like_any_other() -> None:
    assert "for example TIERED_KV_CPU_GIB=4." in refusal(extra={"cpu_gib": 10**400})


@pytest.mark.parametrize("value", [-0.1, 1.01, 50])
def test_a_pin_fraction_is_between_0_and_1(value: float) -> None:
    sentence = refusal(extra={"pin_fraction": value})
    assert "is not between 0 and 1 (a fraction)" in sentence
    assert sentence.endswith("for example TIERED_KV_PIN_FRACTION=1.")


@pytest.mark.parametrize("value", [3, True, ["trace.jsonl"]])
def test_a_trace_that_is_no_path_is_refused(value: object) -> None:
    assert refusal(extra={"trace": value}).endswith(
        "is not a path. Set the path of a file, for example TIERED_KV_TRACE=trace.jsonl."
    )


def test_a_trace_is_a_file_in_a_folder_that_exists(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "missing" / "trace.jsonl"):
        sentence = refusal({"TIERED_KV_TRACE": str(wrong)})
        assert sentence.startswith(f"TIERED_KV_TRACE={wrong} cannot be written")
        assert sentence.endswith("set the path of a file in an existing folder.")


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_trace_is_refused(value: str | None) -> None:
    assert load_config({}, {"trace": value}).trace is None


def test_steps_are_traced_if_enabled(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.jsonl")
    on, off = ("1", True, 1, "true", "True"), ("0", "", False, 0, "false", "FALSE")
    for said, steps in ((said, said in on) for said in (*on, *off)):
        config = load_config({"TIERED_KV_TRACE": trace}, {"trace_steps": said})
        assert config.trace_steps is steps
    assert not load_config({"TIERED_KV_TRACE": trace}).trace_steps


@pytest.mark.parametrize("value", ["yes", 2, -1, [1]])
def test_a_switch_that_is_neither_on_nor_off_is_refused(value: object) -> None:
    sentence = refusal(extra={"trace_steps": value})
    name = "TIERED_KV_TRACE_STEPS"
    assert sentence.endswith(f"is neither 0 nor 1: set {name}=0 or {name}=1.")


@pytest.mark.parametrize(
    "name", [one.name for one in dataclasses.fields(TierConfig) if one.type == "bool"]
)
def test_every_setting_that_is_on_or_off_can_be_turned_off_in_words(name: str) -> None:
    for off in ("false", "False", "0"):
        config = load_config({f"TIERED_KV_{name.upper()}": off})
        assert getattr(config, name) is False


def test_tracing_steps_requires_a_trace() -> None:
    sentence = refusal({"TIERED_KV_TRACE_STEPS": "1"})
    assert sentence == (
        "TIERED_KV_TRACE_STEPS=1 needs a trace file. Set one, for example "
        "TIERED_KV_TRACE=trace.jsonl."
    )


@given(st.dictionaries(st.sampled_from(["cpu_gib", "pin_fraction", "trace", "x"]), JSON_VALUES))
def test_any_json_is_accepted_or_refused(extra: dict[str, object]) -> None:
    try:
        config = load_config({}, extra)
    except ConfigError:
        return  # any other exception fails the test
    assert 0 <= config.pin_fraction <= 1
    assert config.cpu_bytes_per_rank(1) >= 0


def test_sizes_are_for_the_engine_and_split_over_its_ranks() -> None:
    config = TierConfig(cpu_gib=4)
    assert [config.cpu_bytes_per_rank(ranks) for ranks in (1, 2, 3)] == [
        4 * GIB,
        2 * GIB,
        4 * GIB // 3,
    ]


@pytest.mark.parametrize("value", [0.5, "2.7"])
def test_a_fractional_number_of_threads_is_refused(value: object) -> None:
    sentence = refusal(extra={"io_threads": value})
    assert sentence == (
        f"TIERED_KV_IO_THREADS={value} is not a whole number. Set a whole number, for example "
        "TIERED_KV_IO_THREADS=0."
    )


def test_a_cpu_tier_that_fits_is_accepted() -> None:
    check_cpu_size(TierConfig(cpu_gib=4), 2, 2, 4 * GIB, 2 * GIB)


def test_a_cpu_tier_that_does_not_fit_is_refused_with_a_size_that_does() -> None:
    config = TierConfig(cpu_gib=4)
    with pytest.raises(ConfigError, match="does not fit") as caught:
        check_cpu_size(config, 2, 2, 8 * GIB, GIB)
    sentence = str(caught.value)
    assert (
        "2 of 2 ranks run on a machine with 8.0 GiB of memory, of which 1.0 GiB is available"
        in sentence
    )
    assert sentence.endswith("set at most 0.8.")
    check_cpu_size(TierConfig(cpu_gib=0.8), 2, 2, 8 * GIB, GIB)


def test_all_ranks_of_a_machine_share_its_memory() -> None:
    """A CPU tier needs 375 GiB per rank, and each rank sees 500 GiB available. The tier is refused
    if eight ranks share this memory, and accepted if each rank has a machine of its own."""
    config = TierConfig(cpu_gib=3000)
    with pytest.raises(ConfigError, match="8 of 8 ranks"):
        check_cpu_size(config, 8, 8, 512 * GIB, 500 * GIB)
    check_cpu_size(config, 8, 1, 512 * GIB, 500 * GIB)  # one machine per rank


def test_all_errors_of_this_project_share_a_base_class() -> None:
    assert issubclass(ConfigError, TieredKVError)
    assert issubclass(ConfigError, ValueError)


# -- SSD ------------------------------------------------------------------------------


def test_pages_go_to_ssd_only_where_a_folder_is_named(tmp_path: Path) -> None:
    assert load_config({}).ssd_path is None
    config = load_config({"TIERED_KV_SSD_PATH": str(tmp_path / "new"), "TIERED_KV_SSD_GIB": "1.5"})
    assert config.ssd_path == tmp_path / "new"
    assert config.ssd_bytes == 3 * GIB // 2
    assert not (tmp_path / "new").exists(), "reading settings makes nothing"


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, advice in {
        "file": "is not a folder: set the path of a folder, which need not exist yet.",
        "link": "is not a folder: set the path of a folder, which need not exist yet.",
        "file/ssd": f"cannot be created, because the folder {tmp_path}/file does not exist: "
        "create that folder, or set another path.",
        "missing/ssd": f"cannot be created, because the folder {tmp_path}/missing does not "
        "exist: create that folder, or set another path.",
        "n" * 300: "cannot be used (File name too long): set a folder that the server's user can "
        "access.",
    }.items():
        wrong = tmp_path / name
        sentence = refusal({"TIERED_KV_SSD_PATH": str(wrong)})
        assert sentence == f"TIERED_KV_SSD_PATH={wrong} {advice}"


def test_an_ssd_tier_needs_cpu_memory(tmp_path: Path) -> None:
    sentence = refusal({"TIERED_KV_SSD_PATH": str(tmp_path), "TIERED_KV_CPU_GIB": "0"})
    assert "set TIERED_KV_CPU_GIB above 0" in sentence


@pytest.mark.parametrize("name", ["auto", "raw", "zstd", "zstd:3", "centred"])
def test_codecs_are_named(name: str) -> None:
    assert load_config({"TIERED_KV_CODEC": name}).codec == name


def test_a_codec_of_another_package_is_found_when_settings_are_read() -> None:
    name = "tests.codecs.shuffled:Shuffled"
    assert load_config({"TIERED_KV_CODEC": name}).codec == name
    assert "cannot be imported" in refusal({"TIERED_KV_CODEC": "no_such_package:Codec"})


@pytest.mark.parametrize("name", ["", "lz4", "zstd:", "Raw", 3, None])
def test_an_unknown_codec_is_refused(name: object) -> None:
    said = refusal(extra={"codec": name})
    assert said.startswith("TIERED_KV_CODEC: ")
    assert "set raw, zstd, zstd:LEVEL (1 to 22), centred, or your own module:Class" in said
    assert said.endswith("or set auto.")


@pytest.mark.parametrize("level", [0, 23])
def test_a_level_that_a_codec_does_not_have_is_refused(level: int) -> None:
    said = refusal({"TIERED_KV_CODEC": f"zstd:{level}"})
    assert said == (
        f"TIERED_KV_CODEC: zstd has no level {level}: set a level from zstd:1 to zstd:22, or zstd "
        "for its default level; or set auto."
    )


def test_jobs_are_held_under_the_default_policy_only() -> None:
    assert load_config({}).admission == "auto"
    assert load_config({"TIERED_KV_ADMISSION": "off"}).admission == "off"
    assert (
        load_config({"TIERED_KV_POLICY": "lru", "TIERED_KV_ADMISSION": "auto"}).admission == "off"
    )
    with pytest.raises(ConfigError, match="set it to auto or off"):
        load_config({"TIERED_KV_ADMISSION": "yes"})
