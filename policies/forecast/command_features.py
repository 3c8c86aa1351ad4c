"""Features of a shell command for the learned trees, after ContextServe's description.

Plain string tests that take a few microseconds. Commands are a model's text; nothing is parsed.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence

FIRST_WORD_BUCKETS = 64

_MAX_CHARS = 2_000
_WORD = re.compile(r"[\w./+-]+")
_NUMBER = re.compile(r"\b\d+\b")


def _group(words: str) -> frozenset[str]:
    return frozenset(words.split())


_GROUPS = (
    _group("ls cat head tail pwd stat file wc du df tree less more echo which env date ps"),
    _group("grep rg ag find fd awk locate ack"),
    _group("sed tee patch mv cp rm mkdir touch chmod ln apply_patch edit"),
    _group("make cmake ninja gcc g++ clang javac tsc webpack vite gradle mvn bazel build compile"),
    _group("pytest tox nox jest mocha vitest unittest ctest test tests rspec phpunit check"),
    _group("install add sync ci upgrade apt apt-get yum dnf apk brew conda mamba"),
    _group("curl wget ssh scp rsync ping pull push fetch clone download upload publish"),
    _group("git hg svn gh"),
    _group("pip pip3 uv poetry npm npx yarn pnpm cargo go gem bundle composer"),
    _group("python python3 node deno bun ruby perl php java Rscript"),
    _group("docker podman kubectl helm terraform vagrant"),
    _group("sleep wait timeout watch"),
)
_MARKS = ("|", ">", "<<", ";", "&&", "||", "$(", "for ", "while ", "xargs", " -r", " -v", " -f")
_OPTIONS = (" -c ", " -m ", " -n ", " -k ", " -j", " --all", "/dev/null", "..", "*", "sudo ")

FEATURES = 6 + len(_GROUPS) + len(_MARKS) + len(_OPTIONS)


def features_of(tool: str, command: str) -> Sequence[float]:
    """Features of a tool's command: ``FEATURES`` numbers. The command may be empty."""
    text = command[:_MAX_CHARS]
    words = _WORD.findall(text)
    first = words[0].rpartition("/")[2] if words else ""
    names = set(words)
    found = [
        _bucket(tool),
        _bucket(first),
        math.log1p(len(text)),
        float(len(words)),
        float(text.count("\n")),
        float(len(_NUMBER.findall(text))),
    ]
    found += [float(not group.isdisjoint(names)) for group in _GROUPS]
    found += [float(text.count(mark)) for mark in _MARKS]
    found += [float(option in text) for option in _OPTIONS]
    return found


def _bucket(word: str) -> float:
    return float(zlib.crc32(word.encode("utf-8", "replace")) % FIRST_WORD_BUCKETS)
