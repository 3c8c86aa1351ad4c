"""Lexer of shell scripts, as far as needed to determine which commands run.

Follows the token rules of POSIX.1-2017, XCU 2, and bash's extensions. Text that no shell would
accept also yields tokens. ``shlex`` supports neither substitutions nor here-documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    WORD = "word"
    OPERATOR = "operator"
    HEREDOC = "heredoc"
    """Body of a here-document. Its token precedes the newline token of the line that started it."""


class Token(NamedTuple):
    """A token.

    Attributes:
        text: text without quotes, in which ``$()`` stands for each substitution.
        quoted: True if any part was quoted, so that the token is not a reserved word.
        inner: scripts of the command substitutions in the token.
    """

    kind: Kind
    text: str
    quoted: bool = False
    inner: tuple[str, ...] = ()


SUBSTITUTED = "$()"
_MAX_HEREDOCS = 4
"""Maximum number of here-documents per line. Each takes another pass over the rest of the
script."""

_TOKEN = re.compile(
    r"""
    (?P<blank>(?:[ \t\r\f\v]|\\\n)+)
    | (?P<comment>(?<![^\s;|&()])\#[^\n]*)
    | (?P<arithmetic>\$?\(\([^()\n]*\)\))
    | (?P<heredoc><<-?[ \t]*(?:"[^"\n]{1,64}"|'[^'\n]{1,64}'|\\?[\w.-]{1,64}))
    | (?P<substitution>\$\(|[<>]\(|`)
    | (?P<redirect>&>>?|>>|>\||<<<|<>|[<>]&\d*-?|[<>])
    | (?P<operator>\|\||&&|\|&|;;|[;&|\n()])
    | (?P<single>\$'(?:[^'\\]|\\.)*(?:'|\\?\Z)|'[^']*(?:'|\Z))
    | (?P<double>\$?")
    | (?P<escape>\\.)
    | (?P<variable>\$\{[^{}$\n]{0,64}\}|\$[\w@*?!-]{1,64})
    | (?P<plain>.[^\s\\'"`$;|&()<>\#]*)
    """,
    re.VERBOSE | re.DOTALL,
)
_LITERAL = frozenset({"plain", "variable", "arithmetic"})
_IN_DOUBLE = re.compile(
    r'(?P<end>")|(?P<escape>\\.)|(?P<substitution>\$\(|`)|(?P<plain>[^"\\`$]+|.)', re.DOTALL
)
_IN_PARENTHESES = re.compile(
    r"""[^()'"\\]*(?:(?P<open>\()|(?P<close>\))|'[^']*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|\\.|.)""",
    re.DOTALL,
)
_BACKTICK = re.compile(r"(?:[^`\\]|\\.)*", re.DOTALL)


def _substitution(text: str, start: int, backtick: bool) -> tuple[str, int]:
    """Return the script of a substitution, which begins at ``start``, and the position after the
    substitution.

    Args:
        backtick: True if the substitution is written with backticks.
    """
    if backtick:
        end = _BACKTICK.match(text, start).end()  # type: ignore[union-attr]  # always matches
        return text[start:end], end + 1
    depth = 1
    for part in _IN_PARENTHESES.finditer(text, start):
        if part.lastgroup == "open":
            depth += 1
        elif part.lastgroup == "close":
            depth -= 1
            if depth == 0:
                return text[start : part.start("close")], part.end()
    return text[start:], len(text)


@dataclass(slots=True)
class _Word:
    """A word under construction."""

    pieces: list[str] = field(default_factory=list)
    quoted: bool = False
    inner: list[str] = field(default_factory=list)

    def substitute(self, text: str, start: int, opening: str) -> int:
        script, end = _substitution(text, start, opening == "`")
        if script and not script.startswith("("):  # otherwise arithmetic
            self.inner.append(script)
        self.pieces.append(SUBSTITUTED)
        return end

    def double_quoted(self, text: str, start: int) -> int:
        """Read text in double quotes from ``start``. Returns the position after the closing
        quote."""
        self.quoted = True
        self.pieces.append("")
        position = start
        while part := _IN_DOUBLE.match(text, position):
            position = part.end()
            if part.lastgroup == "end":
                break
            if part.lastgroup == "substitution":
                position = self.substitute(text, position, part[0])
            elif part.lastgroup == "escape":
                self.pieces.append(part[0][1] if part[0][1] in '"\\$`' else part[0])
            else:
                self.pieces.append(part[0])
        return position


def tokens(script: str) -> Iterator[Token]:
    """Yield the tokens of a script, without redirections and comments. Takes linear time."""
    word, redirected = _Word(), False
    heredocs: list[str] = []
    position = 0
    while match := _TOKEN.match(script, position):
        kind, text, position = match.lastgroup, match[0], match.end()
        if kind in _LITERAL:
            word.pieces.append(text)
        elif kind in ("blank", "comment", "redirect", "heredoc", "operator"):
            if word.pieces:
                of_redirect = kind in ("redirect", "heredoc") and "".join(word.pieces).isdigit()
                assigns_list = text == "(" and word.pieces[-1].endswith("=")
                if not redirected and not of_redirect and not assigns_list:
                    yield Token(Kind.WORD, "".join(word.pieces), word.quoted, tuple(word.inner))
                elif word.inner:
                    yield Token(Kind.WORD, "", True, tuple(word.inner))
                word, redirected = _Word(), False
                if assigns_list:
                    _, position = _substitution(script, position, backtick=False)
                    continue
            if kind == "redirect":
                redirected = not text[-1].isdigit() and not text.endswith("-")
            elif kind == "heredoc" and len(heredocs) < _MAX_HEREDOCS:
                heredocs.append(text.lstrip("<- \t\\").strip("\"'"))
            elif kind == "operator":
                redirected = False
                if text == "\n":
                    for tag in heredocs:
                        body, position = _heredoc(script, position, tag)
                        yield Token(Kind.HEREDOC, body)
                    heredocs = []
                yield Token(Kind.OPERATOR, text)
        elif kind == "single":
            word.pieces.append(text.removeprefix("$")[1:].removesuffix("'"))
            word.quoted = True
        elif kind == "double":
            position = word.double_quoted(script, position)
        elif kind == "substitution":
            position = word.substitute(script, position, text)
        else:
            word.pieces.append(text[1:])  # an escape
    if word.pieces and not redirected:
        yield Token(Kind.WORD, "".join(word.pieces), word.quoted, tuple(word.inner))


def _heredoc(script: str, start: int, tag: str) -> tuple[str, int]:
    """Return the body of the here-document that starts at ``start``, and the end of the line that
    closes it."""
    position = start
    while position < len(script):
        found = script.find("\n", position)
        end = found if found >= 0 else len(script)
        if script[position:end].strip() == tag:
            return script[start:position], end
        position = end + 1
    return script[start:], len(script)
