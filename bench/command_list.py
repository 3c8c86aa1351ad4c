"""The 200 commands of ``bench.commands``: what coding agents run, on toys of several sizes.

As many of each kind, some of most kinds on either side of 1 and of 5 seconds. Every line runs in
the folder of the toys, and may be run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run.

    Attributes:
        line: for bash.
        before: run first, and not timed.
    """

    line: str
    before: str = ""


_LISTING = """
ls
ls -a
ls -la src
ls -R src
ls -la src/package_03/inner
ls -1 repo/lib | wc -l
ls -lh data
ls -lt native | head -5
ls src/*/inner/*.py | tail -3
ls -la /usr/bin | grep python
ls -d src/package_1*
ls -laR src | grep -c module
ls suite suite/tests
ls -la repo repo/.git
ls -lS src/package_*/*.py | head
ls no_such_folder || ls native
ls -lhR /usr/share | tail -1
pwd && ls -F
"""

_READING = """
cat src/README.md
cat src/setup.cfg src/README.md
cat src/package_00/module_00.py
cat src/package_*/module_00.py
cat repo/lib/part_03.py | head -50
cat data/medium.log
cat data/large.log | tail -20
cat data/large.log | wc -l
cat -n suite/tests/test_models.py
cat native/*.c | grep -c double
cat data/medium.log data/large.log | sort | uniq -c | sort -rn | head
cat src/package_1?/inner/*.py > all.txt
cat suite/pytest.ini; cat native/Makefile
cat data/large.log data/large.log > twice.log
cat data/large.log | sort -k3 -n | tail -5
cat data/medium.log | awk '{ print $2 }' | sort | uniq -c
cat data/large.log | sed 's/ok/fine/' | md5sum
cat -A native/Makefile | head -20
"""

_GREPPING = r"""
grep -rn 'def parse_' src
grep -rn "queue" src --include='*.py' | head -20
grep -rl 'worker_handler' src
grep -rniE '(alpha|beta)_[a-z]+ = .*queue' src
grep -rc 'import' src | grep -v ':0'
grep -n 'test_' suite/tests/*.py
grep -rnw 'total' repo/lib
grep -E 'queue 0\.9[0-9]+ ok' data/large.log | wc -l
grep -c 'worker' data/medium.log
grep -rn 'no_such_name' . --include='*.py'
grep -rnE '([a-z]+)_\1' src
grep -nE '([a-z]+) .*\1.* ok$' data/medium.log
grep -rnE '(([a-z])[a-z]*)_[a-z]*\2[a-z]* = .*\1' src
grep -rnoE '[0-9]{4}' src | sort | uniq -c | sort -rn | head -20
grep -rn 'TODO' native suite
grep -v 'ok' data/large.log
grep -A3 -B3 -rn 'def merge_' src/package_07
grep -rnE '\b(handler|thread)_\w+ = (parse|render)\(' src | cut -d: -f1 | sort -u
"""

_FINDING = r"""
find . -name '*.py' | head
find src -type f | wc -l
find . -name 'test_*.py'
find . -name settings.py -not -path './src/*'
find src -newer src/README.md -name '*.cfg'
find . -size +1M -exec ls -lh {} +
find src -name 'module_0*.py' -exec wc -l {} \;
find src -name '*.py' -exec grep -l 'queue_queue' {} \;
find src -name '*.py' -exec grep -c 'def ' {} +
find src -name '*.py' | xargs wc -l | tail -1
find src -name '*.py' | xargs grep -n 'def split_' | head
find src -name '*.py' | xargs -n1 md5sum | sort | tail -2
find src -name 'module_2*.py' -exec python -m py_compile {} +
find src/package_0* -name '*.py' -exec python -m py_compile {} \;
find suite -name '*.py' -exec python -m py_compile {} \;
find / -xdev -name 'pytest.ini' -not -path '/proc/*' 2>/dev/null
find /usr -name '*.so' 2>/dev/null | wc -l
find . -maxdepth 2 -type d
"""

_GIT = """
cd repo && git status
git -C repo log --oneline | head -20
git -C repo log -p | wc -l
cd repo && git log -S queue_total --oneline
cd repo && git diff
cd repo && git show HEAD~10
cd repo && git blame lib/part_03.py
cd repo && git grep -n 'def filter_'
cd repo && git stash && git stash pop
cd repo && git checkout -q HEAD~200 -- lib/part_07.py && git checkout -q HEAD -- lib/part_07.py
git clone -q repo copy_of_repo && rm -rf copy_of_repo
cd repo && git gc -q
cd repo && git gc -q --aggressive --prune=now
cd repo && git repack -q -a -d -f --depth=250 --window=250
cd repo && git fsck --full
cd repo && git format-patch -q -o ../patches HEAD~600
cd repo && for c in $(git log --format=%h -150); do git show --stat $c; done | wc -l
cd repo && git archive HEAD | tar tf - | wc -l
"""

_PYTHON = """
python -c 'print(1 + 1)'
python -c "import sys; print(sys.version)"
python -c 'import json; print(json.dumps({"a": [1, 2]}))'
python -c 'import numpy; print(numpy.__version__)'
python -c 'import numpy as np; print(np.linalg.svd(np.random.rand(400, 400))[1][0])'
python -c 'import sqlite3, ssl, email, http.client; print("ok")'
python -c 'import pathlib; print(sum(p.stat().st_size for p in pathlib.Path("src").rglob("*")))'
python -c 'import ast, pathlib; [ast.parse(p.read_text()) for p in pathlib.Path("src").rglob("x*")]'
python -c 'import re; print(len(re.findall("ok", open("data/large.log").read())))'
python -c 'print(sum(range(10**7)))'
python -c 'print(sum(i * i for i in range(10**7)))'
python -c 'print(sum(i % 7 for i in range(10**8)))'
python -c 'import time; time.sleep(2); print("done")'
python -c 'from decimal import Decimal; print(sum(Decimal(i).sqrt() for i in range(10**6)))'
python suite/script_00.py
python suite/script_01.py && python suite/script_02.py
python suite/script_03.py
PYTHONHASHSEED=0 python -X utf8 suite/script_02.py
"""

_SLEEPS = """
sleep 0.1
sleep 0.4
sleep 0.7
sleep 1.3
sleep 2
sleep 2.6
sleep 3.5
sleep 4.4
sleep 5.6
sleep 6.5
sleep 8
sleep 0.5 && ls
sleep 1 && cat data/small.log | tail -3
sleep 2; git -C repo status
sleep 0.3; sleep 0.4; echo done
for i in 1 2 3; do sleep 0.5; echo $i; done
for i in {1..6}; do sleep 1; done
timeout 1.5 sleep 30
"""

_TESTS = """
cd suite && pytest
cd suite && pytest -q
cd suite && pytest -x -q
cd suite && pytest -q tests/test_models.py
cd suite && pytest tests/test_views.py tests/test_forms.py
cd suite && python -m pytest tests/test_urls.py -q
cd suite && pytest -q tests/test_models.py::test_sum
cd suite && pytest tests/test_broken.py 2>&1 | tail -20
cd suite && pytest -q tests/test_cache.py
cd suite && pytest -q tests/test_cache.py::test_step_1
cd suite && pytest -v tests/test_client.py
cd suite && pytest -q tests/test_client.py::test_step_0 tests/test_client.py::test_step_2
cd suite && pytest -q tests/test_service.py
cd suite && pytest tests/test_service.py::test_step_3
cd suite && pytest -k 'sum and not urls' -q
cd suite && pytest --collect-only -q
cd suite && timeout 60 python -m pytest -q 2>&1 | tail -5
cd suite && timeout 3 pytest tests/test_service.py
"""

_CLEAN = "make -s -C native clean"
_BUILT = "make -s -C native"

_BUILDS = (
    Command("cd native && make", before=_CLEAN),
    Command("cd native && make", before=_BUILT),
    Command("cd native && make -j2", before=_CLEAN),
    Command("make -C native 2>&1 | tail -5", before=f"{_BUILT}; touch native/part_5.c"),
    Command("make -C native CFLAGS=-O0", before=_CLEAN),
    Command("cd native && make test", before=_BUILT),
    Command("cd native && make test", before=_CLEAN),
    Command("make -C native clean", before=_BUILT),
    Command("cd native && make clean && make"),
    Command("cd native && touch part_1.c part_2.c part_3.c && make", before=_BUILT),
    Command("cd native && make -n", before=_CLEAN),
    Command("cd native && gcc -c part_0.c -o /dev/null"),
    Command("cd native && gcc -O2 -c part_1.c -o part_1.o"),
    Command("cd native && gcc -Wall -Wextra -fsyntax-only part_3.c"),
    Command("cd native && gcc -O2 main.c part_*.c -o whole"),
    Command("cd native && gcc -O0 -g main.c part_*.c -o whole && ./whole"),
    Command("cd native && for f in part_*.c; do gcc -O1 -c $f -o ${f%.c}.o; done"),
    Command("cd native && gcc -O2 -c part_4.c part_5.c part_6.c"),
)

_TGZ = "test -f src.tgz || tar czf src.tgz src"
_TAR = "test -f src.tar || tar cf src.tar src"
_LOG_GZ = "test -f data/large.log.gz || gzip -k data/large.log"

_ARCHIVES = (
    Command("tar cf copy.tar src"),
    Command("tar czf copy.tgz src"),
    Command("tar -czf logs.tgz data/*.log"),
    Command("tar cjf copy.tbz src"),
    Command("tar cJf medium.txz data/medium.log"),
    Command("tar -cJf repo.txz repo"),
    Command("tar tzf src.tgz | head", before=_TGZ),
    Command("tar -tvf src.tar | wc -l", before=_TAR),
    Command("mkdir -p out && tar xzf src.tgz -C out", before=_TGZ),
    Command("mkdir -p out && tar -xf src.tar -C out && ls out", before=_TAR),
    Command("tar czf suite.tgz suite native/*.c"),
    Command("tar cf - src | gzip -9 > piped.tgz"),
    Command("tar --exclude='*.log' -czf all.tgz src suite data native"),
    Command("gzip -kf data/small.log"),
    Command("gzip -kf data/medium.log"),
    Command("gzip -kf data/large.log"),
    Command("gzip -9kf data/large.log"),
    Command("gzip -dc data/large.log.gz | wc -l", before=_LOG_GZ),
    Command("gzip -1c data/large.log > fast.gz"),
)

_CHAINS = (
    Command("bash -lc 'cd suite && pytest -q tests/test_models.py'"),
    Command("timeout 60 make -C native", before=_CLEAN),
    Command("nice -n 5 gcc -O2 -c native/part_4.c -o part_4.o"),
    Command("time tar czf both.tgz src data/small.log"),
    Command("cd src && grep -rn 'def alpha_' . | head -3 && ls"),
    Command("bash -c 'sleep 1.5; echo done'"),
    Command("timeout 2 sleep 20 || echo stopped"),
    Command("nohup sleep 6 > /dev/null 2>&1 &"),
    Command("export CFLAGS=-O1; make -C native clean && make -C native"),
    Command("cat <<'EOF' > hello.py\nprint('hello')\nEOF\npython hello.py"),
    Command("cd repo && git status --short && git log --oneline -5 && git diff | head"),
    Command("(cd native && make -s) && echo built", before=_CLEAN),
    Command("for t in models views; do (cd suite && pytest -q tests/test_$t.py); done"),
    Command("find src -name '*.py' | head -200 | xargs cat | grep -c def"),
    Command("mkdir -p kept && cp -r src kept/ && ls kept && rm -rf kept"),
    Command("sleep 4 & sleep 1; echo started"),
    Command("python -c 'import time; time.sleep(0.5)' && sleep 0.2 && ls"),
    Command("if [ -f native/Makefile ]; then make -C native -s; else echo no; fi", before=_CLEAN),
    Command("test -d src && find src -name '*.py' -exec md5sum {} + | sort | head"),
)


def _lines(text: str) -> Iterator[Command]:
    return map(Command, text.strip().splitlines())


COMMANDS: dict[str, tuple[Command, ...]] = {
    "ls": tuple(_lines(_LISTING)),
    "cat": tuple(_lines(_READING)),
    "grep": tuple(_lines(_GREPPING)),
    "find": tuple(_lines(_FINDING)),
    "git": tuple(_lines(_GIT)),
    "python": tuple(_lines(_PYTHON)),
    "sleep": tuple(_lines(_SLEEPS)),
    "pytest": tuple(_lines(_TESTS)),
    "make, gcc": _BUILDS,
    "tar, gzip": _ARCHIVES,
    "chains": _CHAINS,
}
"""By kind."""
