"""Parser of calls written in Python, such as ``[f(a=1), g(b="x")]``. Nothing is evaluated.

The module ``ast`` is not used, because it rejects truncated calls and prints warnings about
escapes.
"""

from __future__ import annotations

import re

Call = tuple[str, dict[str, object]]

_HEAD = re.compile(r"[\s,;\[]*([A-Za-z_][\w.]{0,127})\s{0,8}\(")
_PIECE = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*(?:"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z))"""
    r"""|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>,)|[^"'()\[\]{},]+""",
    re.DOTALL,
)
_KEYWORD = re.compile(r"\s*(\w{1,64})\s{0,8}=(?!=)\s*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "\n": ""}


def _literal(text: str) -> object:
    """Return the value of a Python literal: a string literal without its quotes, a number as a
    float, and any other text unchanged."""
    if text[:1] in ('"', "'"):
        quote = text[0]
        inner = text[1:-1] if len(text) > 1 and text.endswith(quote) else text[1:]
        return _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), inner)
    try:
        return float(text)
    except ValueError:
        return text


def _arguments(text: str, start: int) -> tuple[dict[str, object], int]:
    """Parse keyword arguments from ``start`` up to the closing parenthesis. Returns the arguments
    and the position after the parenthesis."""
    arguments: dict[str, object] = {}
    begins, depth, end = start, 0, len(text)

    def take(stop: int) -> None:
        keyword = _KEYWORD.match(text, begins, stop)
        if keyword:
            arguments[keyword[1]] = _literal(text[keyword.end() : stop].rstrip())

    for piece in _PIECE.finditer(text, start):
        if piece.lastgroup == "open":
            depth += 1
        elif piece.lastgroup == "close":
            if depth == 0:
                take(piece.start())
                return arguments, piece.end()
            depth -= 1
        elif piece.lastgroup == "comma" and depth == 0:
            take(piece.start())
            begins = piece.end()
    take(end)
    return arguments, end


def read_calls(text: str, most: int) -> tuple[list[Call], int]:
    """Parse at most ``most`` calls at the start of ``text``. Returns the calls, and the position
    after the last call and the bracket that closes the list."""
    calls: list[Call] = []
    position = 0
    while len(calls) < most:
        head = _HEAD.match(text, position)
        if not head:
            break
        arguments, position = _arguments(text, head.end())
        calls.append((head[1], arguments))
    if calls:
        rest = re.compile(r"\s*\]").match(text, position)
        position = rest.end() if rest else position
    return calls, position
