"""A trace as Parquet, read back and compared with its records."""

from __future__ import annotations

import sys
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner, Result

from tests.trace.records import HEADER, record, records
from tiered_kv.cli.app import app
from tiered_kv.trace.exports import parquet_file
from tiered_kv.trace.exports.parquet_file import parquet_columns, write_parquet
from tiered_kv.trace.turn_record import (
    PricedDecision,
    TurnRecord,
    TurnTokens,
)

SCHEMA = {
    "job": "string",
    "turn": "int64 not null",
    "arrived": "double not null",
    "tool": "list<element: string> not null",
    "times_admitted_s": "double",
    "times_end_s": "double not null",
    "tokens_prompt": "int64 not null",
    "decision_tiers_s": "map<string, double> not null",
    "pin_end": "string",
    "gap_end": "string not null",
    "gap_in_vram": "bool not null",
}
"""Some columns of every kind."""


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def as_row(one: TurnRecord) -> dict[str, Any]:
    """A record as a row, the other way round than the export makes it."""
    row = dict[str, Any]()
    for column in parquet_columns():
        value = attrgetter(column.path)(one)
        if isinstance(value, Enum):
            value = value.value
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, dict):
            value = list(value.items())
        row[column.name] = value
    return row


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", "export", *map(str, arguments)])


def test_every_field_of_the_schema_is_a_column_of_its_type(tmp_path: Path) -> None:
    write_parquet([record()], tmp_path / "turns")
    fields = {
        field.name: f"{field.type}{'' if field.nullable else ' not null'}"
        for field in parquet.read_schema(tmp_path / "turns")
    }
    assert {name: fields[name].replace(f" ('{name}')", "") for name in SCHEMA} == SCHEMA
    assert list(fields) == [one.name for one in parquet_columns()], "no two of one name"
    assert list(fields)[:5] == ["job", "client", "replica", "turn", "request"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(records, max_size=6))
def test_any_record_is_read_back_as_it_was(turns: list[TurnRecord], tmp_path: Path) -> None:
    assert write_parquet(turns, tmp_path / "turns") == len(turns)
    assert read(tmp_path / "turns") == [as_row(one) for one in turns]


def test_rows_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more records are ever asked for than a group holds, before that is written."""
    monkeypatch.setattr(parquet_file, "ROWS", 100)
    path, sizes = tmp_path / "turns", list[int]()

    def passing() -> Any:
        for n in range(1_050):
            if n % 100 == 50 and n > 100:
                sizes.append(path.stat().st_size)
            yield record(n, tokens=TurnTokens(prompt=n * n % 9973))

    assert write_parquet(passing(), path) == 1_050
    found = parquet.ParquetFile(path)
    assert [found.metadata.row_group(at).num_rows for at in range(found.num_row_groups)] == [
        *[100] * 10,
        50,
    ]
    assert sizes == sorted({*sizes}), "the file grows while records come"
    assert [row["request"] for row in read(path)] == [f"r{n}" for n in range(1_050)]


def test_the_command_writes_a_private_file(tmp_path: Path) -> None:
    turns = [record(n, decision=PricedDecision("cpu", tiers_s={"ssd": 0.5})) for n in range(7)]
    trace, out = tmp_path / "trace.jsonl", tmp_path / "turns.parquet"
    trace.write_text(
        "".join(f"{line}\n" for line in [HEADER.to_line(), *[one.to_line() for one in turns]])
    )
    result = export(trace, "--parquet", out)
    assert result.exit_code == 0, result.output
    assert read(out) == [as_row(one) for one in turns]
    assert out.stat().st_mode & 0o777 == 0o600


def test_halves_of_characters_do_not_end_an_export(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "turns.parquet"
    trace.write_text(
        '{"job":"a\\ud800b","turn":1,"request":"r","arrived":1.0,"tool":["\\udfff"]}\n'
    )
    result = export(trace, "--parquet", out)
    assert result.exit_code == 0, result.output
    (row,) = read(out)
    assert (row["job"], row["tool"]) == ("a?b", ["?"])


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "turns.parquet"
    result = export(trace, "--parquet", out)
    assert (result.exit_code, "there is no trace" in result.stderr) == (2, True)
    trace.write_text(f"{HEADER.to_line()}\n")
    for more, said in (
        (["--perfetto"], "say for which program"),
        (["-o", tmp_path / "other"], "leave -o out"),
    ):
        result = export(trace, "--parquet", out, *more)
        assert (result.exit_code, said in result.stderr) == (2, True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = export(trace, "--parquet", out)
    assert result.exit_code == 2
    assert "pip install 'tiered-kv[parquet]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()
