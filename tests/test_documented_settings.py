"""The configuration page lists every setting with its default, in short table cells."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from tiered_kv.config import ENV_PREFIX, TierConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
ROW = re.compile(rf"^\| `{ENV_PREFIX}(?P<name>[A-Z_]+)` \| (?P<default>\S+) \| (.+) \|$", re.M)
LONGEST_CELL = 20


def settings() -> dict[str, str]:
    """Return the defaults in the page's settings table, by name."""
    table = PAGE.read_text(encoding="utf-8").partition("## Settings")[2].partition("###")[0]
    return {row["name"].lower(): row["default"] for row in ROW.finditer(table)}


def written(default: object) -> str:
    """Return a default in the page's notation."""
    match default:
        case None | ():
            return "unset"
        case bool():
            return str(int(default))
        case float():
            return f"{default:g}"
    return str(getattr(default, "value", default))


def test_every_setting_is_documented_with_its_default() -> None:
    defaults = TierConfig()
    expected = {one.name: written(getattr(defaults, one.name)) for one in fields(TierConfig)}
    assert settings() == expected


def test_cells_are_short() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").split("\n") if line[:1] == "|"]
    cells = [re.sub(r"\]\([^)]*\)", "", cell) for line in lines for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > LONGEST_CELL] == []
