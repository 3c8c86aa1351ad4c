"""Analysis of a shell command: which commands run, how often, and the time bounds that they set."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .shell_lexer import SUBSTITUTED, Kind, Token, tokens
from .wrappers import LONGEST_S, SHELLS, SOME_TIMES, seconds, unwrap

MAX_SEGMENTS = 64
MAX_TOKENS = 500
"""Maximum number of tokens read of a script, including nested scripts. The rest is ignored."""

_MAX_DEPTH = 3
_TOKENS_PER_SCRIPT = 10
"""Number of tokens by which each nested script reduces ``MAX_TOKENS``, because reading a script
takes time even if it is short."""
_MAX_TIMES = 10_000
_MAX_WORDS = 64


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The shell executes these commands itself, immediately, so a turn never waits for them.
_SILENT = _names(
    "cd export source . set alias unset pushd popd trap umask ulimit declare local readonly "
    "typeset shopt : true read shift return break continue exit case function"
)
# These commands are so short that they do not change a time bound set by another command.
_AT_ONCE = _names(
    "echo printf pwd test [ [[ false date which type basename dirname cat head tail wc ls mkdir "
    "touch rm cp mv kill pkill stat file"
)
# Commands that end when their input from the pipe ends.
_FILTERS = _names(
    "head tail grep egrep rg cat tee sort wc awk gawk sed cut less more jq uniq tr column nl tac "
    "fold fmt paste rev strings hexdump xxd od base64 md5sum sha256sum"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One command of a script.

    Attributes:
        words: name and arguments, without wrappers and redirections.
        times: number of runs.
        most_s: time limit set by ``timeout``, seconds.
        sleep_s: duration of a ``sleep``, seconds; None for other commands and if unknown.
    """

    words: tuple[str, ...]
    times: int = 1
    most_s: float = math.inf
    sleep_s: float | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """The commands that run, one after another, until a command line has finished.

    Attributes:
        segments: the commands, at most ``MAX_SEGMENTS``. Background commands, shell builtins, and
            filters after a pipe are omitted.
        least_s, most_s: bounds of the total duration, set by ``sleep`` and ``timeout``, seconds.
    """

    segments: tuple[Segment, ...]
    least_s: float
    most_s: float


def take_apart(command: str) -> Script:
    """Analyse a command line in linear time. Any text is accepted; if it is not a command line, its
    words become commands."""
    reader = _Reader()
    reader.read(command)
    bounded = 0 < reader.most_s < math.inf
    most_s = min(reader.most_s, LONGEST_S) if bounded else math.inf
    least_s = min(reader.least_s, most_s, LONGEST_S)
    return Script(tuple(reader.segments[:MAX_SEGMENTS]), least_s, most_s)


class _Mark(NamedTuple):
    """Position in a script: the number of segments and the time bounds before it."""

    segments: int = 0
    least_s: float = 0.0
    most_s: float = 0.0


class _Group(NamedTuple):
    """A group whose end has not been read yet: ``( … )``, ``{ … }``, or the body of a loop or of an
    ``if``.

    Attributes:
        opening: word or character that started the group.
        times: number of runs; None if it is unknown and may be 0.
        mark: start of the command list that contains the group.
        least_s, most_s: time bounds of the script before the group, seconds.
    """

    opening: str
    times: int | None
    mark: _Mark
    least_s: float
    most_s: float


_CLOSERS = {"}": "{", ")": "(", "done": "do", "fi": "then", "esac": "case"}
_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")


class _Reader:
    """Reader of one script. Each nested script has its own reader."""

    def __init__(self, outer: _Reader | None = None) -> None:
        self._depth: int = outer._depth + 1 if outer else 0  # noqa: SLF001 - its own class
        self._tokens_left: int = outer._tokens_left if outer else MAX_TOKENS  # noqa: SLF001
        self.segments: list[Segment] = []
        self.least_s = self.most_s = 0.0
        self._pipe_least_s = self._pipe_most_s = 0.0
        self._fed = False
        self._sure = True
        self._words: list[str] = []
        self._inner: list[str] = []
        self._groups: list[_Group] = []
        self._mark = _Mark()
        self._loop_times: int | None = 1
        self._background: list[Segment] = []
        self._background_least_s = self._background_most_s = 0.0

    def read(self, script: str) -> None:
        for token in tokens(script):
            if len(self.segments) + len(self._background) >= MAX_SEGMENTS or self._tokens_left <= 0:
                return
            self._tokens_left -= 1
            if token.kind is Kind.WORD:
                self._word(token)
            elif token.kind is Kind.HEREDOC:
                if self._words and self._words[0] in SHELLS:
                    self._words.clear()
                    self._nested(token.text, math.inf)
            else:
                self._operator(token.text)
        self._end_command()
        self._end_pipe()

    def _word(self, token: Token) -> None:
        if not self._words and not token.quoted and self._reserved(token.text):
            return
        if len(self._words) < _MAX_WORDS:
            self._words.append(token.text)
        self._inner += token.inner

    def _reserved(self, word: str) -> bool:
        """Handle a reserved word of the shell's grammar at the start of a command. Returns False
        for any other word."""
        if word in ("while", "until"):
            self._loop_times = None
        elif word == "do":
            self._open(word, self._loop_times)
            self._loop_times = 1
        elif word in ("then", "{"):
            self._open(word, None if word == "then" else 1)
        elif word == "else":
            self._close("then")
            self._open("then", None)
        elif word == "elif":
            self._close("then")
        elif word in _CLOSERS:
            self._close(_CLOSERS[word])
        elif word not in ("if", "!"):
            return False
        return True

    def _operator(self, operator: str) -> None:
        if self._words[:1] == ["[["] and self._words[-1] != "]]":
            return
        if operator == "(":
            self._words.clear()  # a function's name
            self._open("(", 1)
            return
        if operator == ")" and not (self._groups and self._groups[-1].opening == "("):
            self._words.clear()  # a pattern of ``case``
            return
        self._end_command()
        if operator in ("|", "|&"):
            self._fed = True
            return
        self._end_pipe()
        if operator == ")":
            self._close("(")
        elif operator == "||":
            self._sure = False
        elif operator != "&&":
            if operator == "&":
                self._to_background()
            self._sure = True
            self._mark = _Mark(len(self.segments), self.least_s, self.most_s)

    def _open(self, opening: str, times: int | None) -> None:
        """Start a group that runs ``times`` times; None if the number is unknown and may be 0."""
        self._end_pipe()
        self._groups.append(_Group(opening, times, self._mark, self.least_s, self.most_s))
        self.least_s = self.most_s = 0.0
        self._mark = _Mark(len(self.segments))

    def _close(self, opening: str) -> None:
        self._end_command()
        self._end_pipe()
        if not self._groups or self._groups[-1].opening != opening:
            return
        group = self._groups.pop()
        times: float = 1 if opening == "then" else math.inf if group.times is None else group.times
        self.most_s = group.most_s + (self.most_s * times if self.most_s and times else 0.0)
        self.least_s = group.least_s + self.least_s * (group.times or 0)
        self._mark = group.mark

    def _end_command(self) -> None:
        words, scripts = self._words, self._inner
        self._words, self._inner = [], []
        for script in scripts:
            self._nested(script, math.inf)
        if not words:
            return
        if words[0] in ("for", "select"):
            self._loop_times = _times(words)
            return
        run = unwrap(words)
        if run.script is not None:
            self._nested(run.script, run.most_s)
        elif run.words:
            if run.by_xargs:
                self._fed = False
            self._command(run.words, run.most_s, run.times)

    def _command(self, words: tuple[str, ...], most_s: float, times: int = 1) -> None:
        name = words[0]
        if name == "wait":
            self.segments += self._background
            self._add_bounds(self._background_least_s, self._background_most_s)
            self._background, self._background_least_s, self._background_most_s = [], 0.0, 0.0
        elif name == "sleep" and times == 1:
            slept = [seconds(word) for word in words[1:]]
            known = [s for s in slept if s is not None]
            sleep_s = min(sum(known), LONGEST_S, most_s) if len(known) == len(slept) > 0 else None
            self._add_segment(Segment(words, most_s=most_s, sleep_s=sleep_s))
            self._add_bounds(sleep_s or 0.0, most_s if sleep_s is None else sleep_s)
        elif name not in _SILENT and not (self._fed and name in _FILTERS):
            self._add_segment(Segment(words, times, most_s))
            self._add_bounds(0.0, 0.0 if name in _AT_ONCE else most_s)
            if name == "find":
                self._found(words)

    def _found(self, words: tuple[str, ...]) -> None:
        """Add the command of ``find -exec``, which runs once for all files found if it ends with
        ``+``, otherwise once per file."""
        for n, word in enumerate(words):
            if word in ("-exec", "-execdir"):
                inner = words[n + 1 :]
                ends = [inner.index(end) for end in (";", "+") if end in inner]
                last = min(ends, default=len(inner))
                run = unwrap(inner[:last])
                if run.words:
                    each = inner[last : last + 1] != ("+",)
                    self._command(run.words, math.inf, SOME_TIMES if each else 1)
                return

    def _nested(self, script: str, most_s: float) -> None:
        """Read a nested script that runs for at most ``most_s`` seconds."""
        self._tokens_left -= _TOKENS_PER_SCRIPT
        if self._depth >= _MAX_DEPTH or self._tokens_left <= 0:
            return
        reader = _Reader(self)
        reader.read(script)
        self._tokens_left = reader._tokens_left
        for segment in reader.segments:
            self._add_segment(replace(segment, most_s=min(segment.most_s, most_s)))
        self._add_bounds(min(reader.least_s, most_s), min(reader.most_s, most_s))

    def _add_segment(self, segment: Segment) -> None:
        times = segment.times
        for group in self._groups:
            if group.opening == "do":
                times *= SOME_TIMES if group.times is None else group.times
        if times > 0:
            self.segments.append(replace(segment, times=min(times, _MAX_TIMES)))

    def _add_bounds(self, least_s: float, most_s: float) -> None:
        """Add the bounds of a command. Commands of one pipeline run concurrently."""
        self._pipe_least_s = max(self._pipe_least_s, least_s)
        self._pipe_most_s = max(self._pipe_most_s, most_s)

    def _end_pipe(self) -> None:
        self.least_s += self._pipe_least_s if self._sure else 0.0
        self.most_s += self._pipe_most_s
        self._pipe_least_s = self._pipe_most_s = 0.0
        self._fed = False

    def _to_background(self) -> None:
        """Move the commands of the list that just ended to the background."""
        self._background += self.segments[self._mark.segments :]
        least_s, most_s = self.least_s - self._mark.least_s, self.most_s
        most_s -= self._mark.most_s if most_s < math.inf else 0.0
        self._background_least_s = max(self._background_least_s, least_s)
        self._background_most_s = max(self._background_most_s, most_s)
        del self.segments[self._mark.segments :]
        self.least_s, self.most_s = self._mark.least_s, self._mark.most_s


def _times(words: Sequence[str]) -> int | None:
    """Return the number of iterations of a loop ``for name in …``; None if it is known only at run
    time."""
    if len(words) < 3 or words[2] != "in":
        return None
    times = 0
    for word in words[3:]:
        if SUBSTITUTED in word or any(c in word for c in "$*?["):
            return None
        span = _RANGE.fullmatch(word)
        times += abs(int(span[2]) - int(span[1])) + 1 if span else 1
    return times
