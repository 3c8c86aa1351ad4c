"""Toy projects on which shell commands run for real: sources, a repository, tests, a C build.

Everything is made from one seed, without network, in a second or two.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

FOLDERS, FILES_PER_FOLDER, LINES = 40, 25, 300
"""The source tree: 1,000 files, some 14 MB."""

COMMITS = 1_500
C_FILES, C_FUNCTIONS = 8, 150
_VOCABULARY = (
    "alpha beta gamma delta value result index total count buffer queue thread worker handler "
    "parse render update remove insert select filter merge split encode decode config option"
)
_WORDS = _VOCABULARY.split()


def make_toys(root: Path) -> None:
    """Fill an existing, empty folder: ``src``, ``repo``, ``suite``, ``native``, ``data``.

    Raises:
        subprocess.CalledProcessError: git or make failed.
    """
    rng = random.Random(7)
    _make_sources(root / "src", rng)
    _make_repository(root / "repo", rng)
    _make_suite(root / "suite")
    _make_native(root / "native")
    _make_data(root / "data", rng)


def _line(rng: random.Random) -> str:
    a, b, c = rng.choices(_WORDS, k=3)
    return f"    {a}_{b} = {c}({rng.randrange(10_000)}, {a!r})  # {b} of {c}\n"


def _source(rng: random.Random, lines: int) -> str:
    body = [_line(rng) for _ in range(lines)]
    for n in range(0, lines, 25):
        body[n] = f"def {rng.choice(_WORDS)}_{n}({rng.choice(_WORDS)}):\n"
    return "".join(body)


def _make_sources(folder: Path, rng: random.Random) -> None:
    for n in range(FOLDERS):
        package = folder / f"package_{n:02}" / "inner"
        package.mkdir(parents=True)
        for k in range(FILES_PER_FOLDER):
            where = package if k % 2 else package.parent
            (where / f"module_{k:02}.py").write_text(_source(rng, LINES))
    (folder / "README.md").write_text("# Toy\n\nSources to search.\n")
    (folder / "setup.cfg").write_text("[metadata]\nname = toy\n")


def _history(rng: random.Random) -> Iterator[str]:
    """A repository's history for ``git fast-import``."""
    names = [f"lib/part_{n:02}.py" for n in range(30)]
    for commit in range(COMMITS):
        name = names[commit] if commit < len(names) else rng.choice(names)
        text = _source(rng, 120)
        message = f"Change {rng.choice(_WORDS)} {commit}\n"
        yield "commit refs/heads/main\n"
        yield f"committer Toy <toy@example.org> {1_600_000_000 + 600 * commit} +0000\n"
        yield f"data {len(message)}\n{message}"
        yield f"M 644 inline {name}\ndata {len(text)}\n{text}\n"


def _make_repository(folder: Path, rng: random.Random) -> None:
    folder.mkdir()

    def git(*words: str, stdin: str = "") -> None:
        subprocess.run(
            ["git", *words], cwd=folder, input=stdin, text=True, check=True, capture_output=True
        )

    git("init", "-q", "-b", "main")
    git("fast-import", "--quiet", stdin="".join(_history(rng)))
    git("reset", "-q", "--hard")
    (folder / "lib" / "part_00.py").write_text(_source(rng, 60))


_FAST = "import pytest\n\n@pytest.mark.parametrize('n', range(40))\ndef test_sum(n):\n"
_FAST += "    assert sum(range(n)) == n * (n - 1) // 2\n"


def _waiting_test(seconds: float, tests: int) -> str:
    """Tests that wait for something, as tests of services do."""
    return "import time\n" + "".join(
        f"\ndef test_step_{n}():\n    time.sleep({seconds})\n" for n in range(tests)
    )


def _make_suite(folder: Path) -> None:
    tests = folder / "tests"
    tests.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for name in ("models", "views", "forms", "urls"):
        (tests / f"test_{name}.py").write_text(_FAST)
    (tests / "test_broken.py").write_text("def test_broken():\n    assert 1 == 2\n")
    (tests / "test_cache.py").write_text(_waiting_test(0.15, 4))
    (tests / "test_client.py").write_text(_waiting_test(0.5, 3))
    (tests / "test_service.py").write_text(_waiting_test(1.5, 4))
    for n in range(12):
        (folder / f"script_{n:02}.py").write_text(f"print(sum(range({10 ** (n % 4 + 4)})))\n")


def _c_file(number: int) -> str:
    functions = [
        f"double part_{number}_{n}(const double *x, int n) {{\n"
        f"    double s = {n}.0, t = 1.0;\n"
        "    for (int i = 0; i < n; i++) {\n"
        f"        s += x[i] * t; t = s > {n + 2}.0 ? t * 0.5 : t + x[(i * 7) % n];\n"
        "        if (i % 3 == 0) s -= t; else if (i % 5 == 0) t += s / (i + 1.0);\n"
        "    }\n    return s + t;\n}\n"
        for n in range(C_FUNCTIONS)
    ]
    return "".join(functions)


_MAKEFILE = """\
CFLAGS ?= -O2
OBJECTS = {objects}
all: program
program: $(OBJECTS) main.o
\tgcc $^ -o $@
%.o: %.c
\tgcc $(CFLAGS) -c $< -o $@
test: program
\t./program
clean:
\trm -f *.o program
.PHONY: all test clean
"""


def _make_native(folder: Path) -> None:
    folder.mkdir()
    for number in range(C_FILES):
        (folder / f"part_{number}.c").write_text(_c_file(number))
    declared = "".join(
        f"double part_{number}_0(const double *, int);\n" for number in range(C_FILES)
    )
    called = " + ".join(f"part_{number}_0(x, 3)" for number in range(C_FILES))
    (folder / "main.c").write_text(
        f"{declared}int main(void) {{ double x[3] = {{1, 2, 3}}; return {called} < 0; }}\n"
    )
    objects = " ".join(f"part_{number}.o" for number in range(C_FILES))
    (folder / "Makefile").write_text(_MAKEFILE.format(objects=objects))


def _make_data(folder: Path, rng: random.Random) -> None:
    """Logs of several sizes, of lines that compress as logs do."""
    folder.mkdir()
    lines = [
        f"2026-01-01T00:{n % 60:02}:{n % 59:02} {rng.choice(_WORDS)} {rng.random():.6f} ok\n"
        for n in range(20_000)
    ]
    block = "".join(lines)
    for name, blocks in (("small", 1), ("medium", 12), ("large", 60)):
        (folder / f"{name}.log").write_text(block * blocks)
