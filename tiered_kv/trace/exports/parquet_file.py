"""Export of a trace to Parquet: a row a turn, a column a field of the schema.

A field of a part is named by both, as ``tokens_prompt``. Columns and their types are read from the
dataclasses of the schema, so that a new field is a new column.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from tiered_kv.errors import TieredKVError
from tiered_kv.trace.turn_record import TurnRecord

ROWS = 16_384
"""Rows of a group: so many records are in memory at once."""


class PyArrowMissing(TieredKVError):
    """pyarrow, which writes Parquet, is not installed."""


@dataclass(frozen=True, slots=True)
class ParquetColumn:
    """A column.

    Attributes:
        name: of the part and the field, with ``_`` between them.
        path: where a record has it, with dots.
        kind: what its values are: bool, int, float, str, tuple or dict.
        item: what is in a tuple, or in a dict under texts: str, int or float.
        nullable: True if a value may be null.
    """

    name: str
    path: str
    kind: type
    item: type
    nullable: bool


def parquet_columns(kind: Any = TurnRecord, before: str = "") -> Iterator[ParquetColumn]:
    """The columns of a record, in the order of the schema."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        hint, path = hints[field.name], f"{before}{field.name}"
        if is_dataclass(hint):
            yield from parquet_columns(hint, f"{path}.")
            continue
        nullable = isinstance(hint, types.UnionType)
        if nullable:
            (hint,) = (one for one in hint.__args__ if one is not types.NoneType)
        yield ParquetColumn(path.replace(".", "_"), path, *_kind(hint), nullable)


def _kind(hint: Any) -> tuple[type, type]:
    """Kind of a hint's values, and of what is in them; twice the same for a plain one."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple, inner[0]
    if origin is not None:
        return dict, inner[1]
    plain = str if issubclass(hint, Enum) else hint
    return plain, plain


def write_parquet(records: Iterable[TurnRecord], path: Path) -> int:
    """Write records to a file that only its owner can read. Returns their number.

    Raises:
        PyArrowMissing: pyarrow is not installed.
        OSError: the trace cannot be read, and no file was begun; or the file cannot be written.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise PyArrowMissing(
            "an export to Parquet needs pyarrow: pip install 'tiered-kv[parquet]'"
        ) from None
    columns = list(parquet_columns())
    plain: Mapping[type, Any] = {
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
    }

    def type_of(column: ParquetColumn) -> Any:
        item = plain[column.item]
        if column.kind is tuple:
            return pa.list_(item)
        return pa.map_(pa.string(), item) if column.kind is dict else item

    schema = pa.schema([pa.field(one.name, type_of(one), one.nullable) for one in columns])
    records = iter(records)
    rows, count = list(islice(records, ROWS)), 0
    path.touch(mode=0o600)
    with path.open("wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while rows:
            arrays = [pa.array(_values(rows, one), type=type_of(one)) for one in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema), row_group_size=ROWS)
            count += len(rows)
            rows = list(islice(records, ROWS))
    return count


def _values(rows: Iterable[TurnRecord], column: ParquetColumn) -> list[Any]:
    """Values of a column, as pyarrow takes them."""
    found = map(attrgetter(column.path), rows)
    if column.kind is tuple:
        return [[_text(one) for one in value] if column.item is str else value for value in found]
    if column.kind is dict:
        return [[(_text(name), number) for name, number in value.items()] for value in found]
    if column.kind is str:
        return [None if value is None else _text(value) for value in found]
    return list(found)


def _text(value: Any) -> str:
    """A text as UTF-8 knows it: JSON may hold halves of characters, which become question marks."""
    text: str = value.value if isinstance(value, Enum) else value
    return text.encode("utf-8", "replace").decode()
