"""Names that users, scripts and dashboards rely on, collected from the program."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from tests.cli.test_documented_commands import parser_of
from tests.deploy.test_documented_metrics import ENGINE, Exported, everything
from tests.golden.written import FINGERPRINT, FORMAT, keys_of, page
from tiered_kv.bench.sim.what_if.answer import WhatIf
from tiered_kv.cli.app import app
from tiered_kv.codecs.base import ELEMENTS, PageFormat, Section
from tiered_kv.codecs.out_of_tree import OUT_OF_TREE_ID
from tiered_kv.codecs.registry import CODECS, parse
from tiered_kv.config import ADMIN_TOKEN, ENV_PREFIX, EventConsumer, Mode, TierConfig
from tiered_kv.keys import FORMAT_VERSION, Fingerprint, page_keys, rekeyed, tail_key
from tiered_kv.metrics import WOULD_HAVE_SAVED
from tiered_kv.orders import OrderKind
from tiered_kv.policies.base import GapClass, Tier
from tiered_kv.policies.registry import EVICTION, POLICIES
from tiered_kv.remote.address import SCHEMES
from tiered_kv.status import JobState, Where
from tiered_kv.storage.remote_pages import PAGE_PREFIX, TABLE_PREFIX
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.trace_header import SCHEMA, TraceHeader
from tiered_kv.trace.turn_record import TurnRecord

ROOT = Path(__file__).resolve().parents[2]
_OF_ALL = (*ENGINE, "le")


def metrics() -> dict[str, Any]:
    """Return the metric families on ``/metrics``: type, labels of each series, and histogram
    buckets."""
    exported = Exported()
    exported.metrics.observe({**everything(), **dict.fromkeys(WOULD_HAVE_SAVED, 1)}, 0)
    found: dict[str, Any] = {"labels of every series": ENGINE}
    for family in text_string_to_metric_families(exported.page()):
        samples = [one for one in family.samples if not one.name.endswith("_created")]
        samples = [one for one in samples if one.labels["engine"] == "0"]
        if not samples:
            continue
        bounds = sorted({float(one.labels["le"]) for one in samples if "le" in one.labels})
        found[family.name + ("_total" if family.type == "counter" else "")] = {
            "type": family.type,
            "series": sorted({_labels(one.labels) for one in samples}),
            **({"buckets": list(map(str, bounds))} if bounds else {}),
        }
    return found


def _labels(labels: Mapping[str, str]) -> str:
    own = [f"{name}={value}" for name, value in sorted(labels.items()) if name not in _OF_ALL]
    return ",".join(own)


def settings() -> dict[str, Any]:
    """Return every setting with its variable, key and default, and the words that some settings
    accept."""
    default = TierConfig()
    found = {
        field.name: {
            "variable": ENV_PREFIX + field.name.upper(),
            "default": _plain(getattr(default, field.name)),
        }
        for field in dataclasses.fields(TierConfig)
    }
    words = {
        "events": [one.value for one in EventConsumer],
        "mode": [one.value for one in Mode],
        "policy": sorted(POLICIES),
        "eviction": sorted(EVICTION),
        "codec": ["auto", *sorted(CODECS)],
        "remote": sorted(SCHEMES),
    }
    secrets = [ADMIN_TOKEN, f"{ENV_PREFIX}REMOTE_PASSWORD", f"{ENV_PREFIX}REMOTE_PASSWORD_FILE"]
    return {"settings": found, "words": words, "secrets": secrets}


def commands() -> dict[str, Any]:
    """Return the subcommands and options of ``tiered-kv``."""
    return dict(_walk("tiered-kv", get_command(app)))


def benchmarks() -> dict[str, Any]:
    """Return the options of each ``python -m bench.NAME``."""
    found: dict[str, Any] = {}
    for path in sorted((ROOT / "bench").iterdir()):
        is_command = (
            (path / "__main__.py").exists() if path.is_dir() else "def main(" in _text(path)
        )
        if is_command:
            name = f"bench.{path.stem}"
            found |= _walk(f"python -m {name}", parser_of(name))
    return found


def benchmark_results() -> dict[str, Any]:
    """Return the names in the results of benchmarks, which take minutes to run.

    The names are the keys of the dicts that the code returns, or assigns to a result. Some are only
    passed between functions.
    """
    found: dict[str, Any] = {}
    for path in sorted((ROOT / "bench").iterdir()):
        sources = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        names = {name for one in sources if one.suffix == ".py" for name in _result_keys(one)}
        if names:
            found[path.stem] = sorted(names)
    return found


def _result_keys(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Return(value=ast.Dict(keys=keys)):
                yield from _texts(keys)
            case ast.Assign(
                targets=[ast.Name(id="result") | ast.Attribute(attr="result")],
                value=ast.Dict(keys=keys),
            ):
                yield from _texts(keys)
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="result"), slice=ast.Constant() as key)]
            ):
                yield from _texts([key])


def _texts(nodes: Iterable[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _text(path: Path) -> str:
    return path.read_text() if path.suffix == ".py" else ""


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, [_parameter(one) for one in command.params if "--help" not in one.opts]
    for verb, inner in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {verb}", inner)


def _parameter(one: Any) -> str:
    """Describe an option or an argument: whether it takes a value, is required, or may be
    repeated."""
    is_option = one.param_type_name == "option"
    names = "/".join([*one.opts, *one.secondary_opts]) if is_option else one.metavar or one.name
    takes_value = is_option and not one.is_flag
    many = one.multiple or one.nargs != 1
    words = [*["VALUE"] * takes_value, *["required"] * one.required, *["repeated"] * many]
    return " ".join([names, *words])


def trace() -> dict[str, Any]:
    """Return the fields of every type of trace record, and their types."""
    records = {"header": TraceHeader, "turn": TurnRecord, "step": StepRecord}
    return {"schema": SCHEMA, **{name: _described(kind) for name, kind in records.items()}}


def _described(kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: _described(hints[field.name]) for field in dataclasses.fields(kind)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [one.value for one in kind]
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        inner = [_described(one) for one in parts]
        return inner if any(not isinstance(one, str) for one in inner) else " | ".join(inner)
    if typing.get_origin(kind) in (tuple, list):
        return [_described(parts[0])]
    if parts:
        return {"any name": _described(parts[1])}
    return "null" if kind is type(None) else kind.__name__


def what_if() -> dict[str, Any]:
    """Return the fields of ``tiered-kv trace analyze --what-if POLICY --json``."""
    return dict(_described(WhatIf))


def words() -> dict[str, Any]:
    """Return the enumerated words in the routes' answers."""
    kinds: Mapping[str, type[Enum]] = {"job state": JobState, "where": Where, "mode": Mode}
    decisions: Mapping[str, type[Enum]] = {"tier": Tier, "class": GapClass}
    found = {name: [one.value for one in kind] for name, kind in {**kinds, **decisions}.items()}
    return {**found, "transfers": sorted(kind.status_name for kind in OrderKind)}


_PARTS: Mapping[str, Any] = {
    "model": "a" * 32,
    "adapter": "",
    "dtype": "bfloat16",
    "cache_dtype": "auto",
    "kv_scales": "checkpoint",
    "config": {"rope_theta": 10000.0, "rope_scaling": {"factor": 2.0, "rope_type": "yarn"}},
    "group": 0,
    "block_size": 16,
    "layout": "3x4096",
    "ranks": 1,
    "hash_algorithm": "sha256/",
    "generation": "",
}
_OTHERS: Mapping[str, Any] = {
    "model": "b" * 32,
    "adapter": "c" * 32,
    "dtype": "float16",
    "cache_dtype": "fp8",
    "kv_scales": "dynamic",
    "config": {},
    "group": 1,
    "block_size": 32,
    "layout": "3x8192",
    "ranks": 2,
    "hash_algorithm": "sha256_cbor/",
    "generation": "5f",
}


def keys() -> dict[str, Any]:
    """Return the bytes of fingerprints and page keys, and the key prefixes in a remote store."""
    base = Fingerprint(**_PARTS)
    digests = {name: Fingerprint(**{**_PARTS, name: one}) for name, one in _OTHERS.items()}
    parent = page_keys(FINGERPRINT, [bytes(32)])[0]
    tails = {
        "one token": tail_key(parent, [1], None),
        "large tokens": tail_key(parent, [70_000, 2**31 - 1], None),
        "no tokens": tail_key(parent, [], None),
        "extra keys": tail_key(parent, [1, 2, 70_000], ("salt",)),
        "after no page": tail_key(FINGERPRINT, [1], None),
    }
    return {
        "version": FORMAT_VERSION,
        "fingerprint": base.digest().hex(),
        "fingerprint with another": {name: one.digest().hex() for name, one in digests.items()},
        "full block": parent.hex(),
        "under another fingerprint": rekeyed(parent, bytes(16)).hex(),
        "partial blocks": {name: one.hex() for name, one in tails.items()},
        "remote names": {"page": PAGE_PREFIX.decode(), "table": TABLE_PREFIX.decode()},
    }


def codecs() -> dict[str, Any]:
    """Return the ids and levels of codecs, their tables, and the ids of element types."""
    found: dict[str, Any] = {"out of tree": OUT_OF_TREE_ID}
    for name, kind in CODECS.items():
        found[name] = {
            "codec ids": [cls.codec_id for cls in kind.classes],
            "levels": list(kind.levels),
            "tables": {one.value: _table(name, PageFormat(one, 2048, 16)) for one in ELEMENTS},
            "table of sections": _table(name, _SECTIONS),
        }
    trained = parse("centred")(FORMAT).trained([page(key) for key in keys_of(0, 20)])
    found["trained table"] = trained.table.hex()
    return {"codecs": found, "element types": [one.value for one in ELEMENTS]}


_SECTIONS = PageFormat.of([Section(one, 640) for one in ELEMENTS[1:]], 16)


def _table(name: str, page_format: PageFormat) -> str:
    """Return the table of an untrained codec, in hexadecimal."""
    try:
        return parse(name)(page_format).table.hex()
    except ValueError:
        return "does not serve such pages"


def entry_points() -> dict[str, Any]:
    """Return the names by which vLLM and a shell find the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classes = (
        "tiered_kv.connectors.vllm.connector:TieredContinuumConnector",
        "tiered_kv.connectors.vllm.engine_scheduler:ContinuumScheduler",
        "tiered_kv.connectors.vllm.middleware:JobMiddleware",
    )
    for one in classes:
        module, _, name = one.partition(":")
        assert hasattr(importlib.import_module(module), name), f"there is no {one}"
    return {
        "scripts": project["scripts"],
        "entry points": project["entry-points"],
        "classes": list(classes),
    }


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


GATHERED: Mapping[str, Callable[[], dict[str, Any]]] = {
    "metrics": metrics,
    "settings": settings,
    "commands": commands,
    "benchmarks": benchmarks,
    "benchmark_results": benchmark_results,
    "trace": trace,
    "what_if": what_if,
    "words": words,
    "keys": keys,
    "codecs": codecs,
    "entry_points": entry_points,
}
