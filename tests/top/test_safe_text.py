"""Text from a server is escaped, so that it has no effect on the terminal."""

from __future__ import annotations

from tiered_kv.top.safe_text import MOST_CHARS, harmless, harmless_json


def test_characters_that_move_the_cursor_or_hide_are_escaped() -> None:
    assert harmless("ticket-4711 / ü 日本 🎉") == "ticket-4711 / ü 日本 🎉"
    assert harmless("\x00\x1b\x7f\x9b\n") == "\\x00\\x1b\\x7f\\x9b\\x0a"
    assert harmless("\u202ea\u05d0\u0300\u200b") == "\\u202ea\\u05d0\\u0300\\u200b"
    assert harmless("\ud800\U000e0001") == "\\ud800\\U000e0001"
    assert harmless("x" * MOST_CHARS) == "x" * MOST_CHARS
    assert harmless("x" * (MOST_CHARS + 1)) == "x" * MOST_CHARS + "…"
    assert harmless("\x1b" * 10**6) == "\\x1b" * MOST_CHARS + "…"


def test_texts_are_escaped_wherever_they_are_in_an_answer() -> None:
    said = {"\x1b": ["\x1b", 1, None, {"a": "\x1b", "b": 1.5, "c": True}]}
    safe = ["\\x1b", 1, None, {"a": "\\x1b", "b": 1.5, "c": True}]
    assert harmless_json(said) == {"\\x1b": safe}
