"""Structure and prose rules that a program can check, each with its reason.

A rule checks one module, or all of them together, and yields each violation. Every rule is tested
on an example that breaks it. ``TO_DO`` lists modules that are exempt from a rule for now.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {
    "connectors": "tiered_kv.connectors",
    "policies": "tiered_kv.policies",
    "bench": "tiered_kv.bench",
}
"""Top-level folders, and the package names that they are installed under."""
FOLDERS = ("connectors", "policies", "tiered_kv", "bench", "tests")


@dataclass(frozen=True, slots=True)
class Module:
    """Installed name and source text of a module."""

    name: str
    text: str

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_test(self) -> bool:
        return self.name.startswith("tests.")

    def imports(self) -> Iterator[tuple[int, str]]:
        """Return the level (number of leading dots) and the module name of every import in the
        module, nested ones included."""
        return iter(_imports(self.text))


@cache
def _imports(text: str) -> list[tuple[int, str]]:
    found = list[tuple[int, str]]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
    return found


def modules() -> Iterator[Module]:
    for folder in FOLDERS:
        # Skip the symbolic links in tiered_kv, because their targets are top-level folders.
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[0] == "tiered_kv" and parts[1] in INSTALLED:
                continue
            name = ".".join((INSTALLED.get(parts[0], parts[0]), *parts[1:]))
            yield Module(name, path.read_text(encoding="utf-8"))


@cache
def defined_names() -> dict[str, frozenset[str]]:
    """Return the names that each module defines itself. Other modules may import only these from
    it."""
    return {module.name: frozenset(_defined(ast.parse(module.text).body)) for module in modules()}


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found = [name for target in targets for name in ast.walk(target)]
                yield from (name.id for name in found if isinstance(name, ast.Name))
            case ast.If() | ast.Try():
                handlers = node.handlers if isinstance(node, ast.Try) else []
                for part in (node.body, node.orelse, *(handler.body for handler in handlers)):
                    yield from _defined(part)


def absolute_sibling(module: Module) -> Iterator[str]:
    """Modules import siblings relatively, so that a folder can be moved and its dependencies stand
    out. Tests and bench commands use absolute imports."""
    if module.is_test or _is_bench_command(module):
        return
    for level, name in module.imports():
        if not level and name.rpartition(".")[0] == module.package:
            yield f"{name} is a sibling: from .{name.rpartition('.')[2]}"


def sibling_loaded_twice(module: Module) -> Iterator[str]:
    """Bench commands have no relative imports. ``python -m bench.sim`` runs its module in the
    package ``bench``, so a relative import would load a sibling a second time, under another
    name."""
    for level, name in module.imports() if _is_bench_command(module) else ():
        if level:
            yield f"{'.' * level}{name}: write tiered_kv.bench..."


def _is_bench_command(module: Module) -> bool:
    ours = module.name.startswith("tiered_kv.bench.")
    return ours and 'if __name__ == "__main__":' in module.text


def relative_stranger(module: Module) -> Iterator[str]:
    """Modules outside the folder are imported by their full name, so that their importers can be
    found by search."""
    for level, name in module.imports():
        if level > 1 or (level and "." in name):
            yield f"{'.' * level}{name} is no sibling"


def uninstalled_name(module: Module) -> Iterator[str]:
    """Top-level folders are imported by their installed names. Their own names can be imported only
    in a checkout."""
    for level, name in module.imports():
        top = name.partition(".")[0]
        if not level and top in INSTALLED:
            yield f"{name} is installed as {INSTALLED[top]}"


def stray_vllm(module: Module) -> Iterator[str]:
    """Only the vLLM connector, its tests and the benchmarks import vLLM."""
    known = ("tiered_kv.connectors.vllm.", "tiered_kv.testing.vllm.", "tiered_kv.bench.", "tests.")
    for level, name in module.imports():
        is_vllm = not level and name.partition(".")[0] == "vllm"
        if is_vllm and not module.name.startswith(known):
            yield f"{name} is imported outside connectors/vllm"


def upward_arrow(module: Module) -> Iterator[str]:
    """Imports go from an engine's connector to the runtime to the policies to the core, never back.
    Test helpers may import all of them."""
    connectors = ("tiered_kv.connectors.runtime", "tiered_kv.connectors.vllm")
    layers = ("tiered_kv", "tiered_kv.policies", *connectors, "tiered_kv.bench")

    def layer(name: str) -> int:
        return max(at for at, top in enumerate(layers) if f"{name}.".startswith(f"{top}."))

    if module.name.startswith(("tiered_kv.testing", "tests.")):
        return
    for level, name in module.imports():
        ours = not level and name.partition(".")[0] == "tiered_kv"
        if ours and layer(name) > layer(module.name):
            yield f"{name} is built on {module.package}"


def code_in_package(module: Module) -> Iterator[str]:
    """A package's ``__init__`` contains a docstring and no code except ``__version__``."""
    if not module.name.endswith(".__init__"):
        return
    for node in ast.parse(module.text).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and ast.unparse(node).partition(" = ")[0] != "__version__":
            yield ast.unparse(node)


def borrowed_name(module: Module) -> Iterator[str]:
    """A name is imported from the module that defines it, so that it has one import path."""
    for node in ast.walk(ast.parse(module.text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = f"{module.package}.{node.module}" if node.level else node.module or ""
        defined = defined_names().get(source)
        if defined is not None:
            strange = [alias.name for alias in node.names if alias.name not in defined]
            yield from (f"{source} does not define {name}" for name in strange)


QUESTION = re.compile(r"(What|How|Of|Whether)\b")
NO_SUBJECT = re.compile(
    r"(After|And|As|Before|But|By|For|From|How|If|In|Is|It|No|Not|Nothing|Of|On|Once|So|Somebody|"
    r"Such|That|These|They|This|Those|To|Until|What|Whatever|When|Where|Whether|Which|While|Who|"
    r"Whoever|Whose|Why|With)\b"
)
"""Words that a docstring must not start with."""


def docstring_without_subject(module: Module) -> Iterator[str]:
    """A public docstring starts with a noun phrase or an imperative. A test's docstring may start
    with other words, because it can continue the sentence of the test's name."""
    wrong = QUESTION if module.is_test else NO_SUBJECT
    for name, text in _docstrings(ast.parse(module.text)):
        if wrong.match(text.strip()):
            yield f"{name or 'the module'}: {text.strip().partition(chr(10))[0]}"


def _docstrings(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the public docstrings, by name, of modules, classes, functions and attributes."""
    if (text := ast.get_docstring(node)) is not None:
        yield prefix.rstrip("."), text
    for before, here in zip([None, *node.body], node.body, strict=False):
        match before, here:
            case _, ast.ClassDef() if not here.name.startswith("_"):
                yield from _docstrings(here, f"{prefix}{here.name}.")
            case _, ast.FunctionDef() | ast.AsyncFunctionDef():
                if not here.name.startswith("_") and (text := ast.get_docstring(here)):
                    yield f"{prefix}{here.name}", text
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                name = ast.unparse(before).partition("=")[0].partition(":")[0].strip()
                if not name.startswith("_"):
                    yield f"{prefix}{name}", text


def shared_name(all_modules: list[Module]) -> Iterator[str]:
    """No two modules share a name, because they would be confused. ``testing`` repeats the names of
    the modules that it tests. Every contract is in ``base`` and every table of names in
    ``registry``."""
    homes: dict[str, list[str]] = {}
    for module in all_modules:
        name = module.name.rpartition(".")[2]
        product = module.name.startswith("tiered_kv.")
        if product and not module.name.startswith(("tiered_kv.testing.", "tiered_kv.bench.")):
            homes.setdefault(name, []).append(module.package)
    for name, packages in homes.items():
        if len(packages) > 1 and name not in ("__init__", "base", "registry"):
            yield f"{name}: {', '.join(packages)}"


def import_circle(all_modules: list[Module]) -> Iterator[str]:
    """Modules and subfolders of a folder do not import each other in a circle, so that they can be
    read bottom-up."""
    names = {module.name for module in all_modules}
    arrows: dict[str, dict[str, set[str]]] = {}
    for module in all_modules:
        if module.is_test or module.name.endswith(".__init__"):
            continue
        ours = module.name.split(".")
        for level, name in module.imports():
            theirs = (f"{module.package}.{name}" if level else name).split(".")
            pairs = zip(ours, theirs, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if ".".join(theirs) in names and theirs != ours:
                graph = arrows.setdefault(".".join(ours[:shared]), {})
                graph.setdefault(ours[shared], set()).add(theirs[shared])
    for folder, graph in arrows.items():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"{folder}: {' → '.join(reversed(error.args[1]))}"


def contract_without_suite(all_modules: list[Module]) -> Iterator[str]:
    """Every public contract has a conformance suite, which takes the class to test. The engine port
    needs none, because its tests run on two engines."""
    suites = [m for m in all_modules if m.package == "tiered_kv.testing.conformance"]
    tested = {
        alias.name
        for suite in suites
        for node in ast.walk(ast.parse(suite.text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for module in all_modules:
        if module.name.endswith(".base") and module.package != "tiered_kv.connectors.runtime":
            contracts = {
                node.name
                for node in ast.parse(module.text).body
                if isinstance(node, ast.ClassDef)
                and {"ABC", "Protocol"} & {ast.unparse(base) for base in node.bases}
            }
            if contracts and not contracts & tested:
                yield f"{module.name}: {', '.join(sorted(contracts))}"


Rule = Callable[[Module], Iterator[str]]
RULES: dict[Rule, Module] = {
    absolute_sibling: Module("tiered_kv.codecs.zstd", "from tiered_kv.codecs.base import Codec"),
    sibling_loaded_twice: Module(
        "tiered_kv.bench.scale",
        'from .overhead import ratios\nif __name__ == "__main__":\n    print(ratios)\n',
    ),
    relative_stranger: Module("tiered_kv.codecs.zstd", "from ..keys import PageKey"),
    uninstalled_name: Module("tiered_kv.testing.conformance.index", "import policies.eviction"),
    upward_arrow: Module(
        "tiered_kv.pages.cpu_index", "from tiered_kv.policies.cache.eviction import ByWorth"
    ),
    code_in_package: Module("tiered_kv.codecs.__init__", "from .base import Codec"),
    borrowed_name: Module("tiered_kv.codecs.zstd", "from tiered_kv.keys import NewType"),
    docstring_without_subject: Module("tiered_kv.keys", 'LIMIT = 3\n"""Of all keys."""'),
}
"""Each rule, with a module that breaks it."""

WholeRule = Callable[[list[Module]], Iterator[str]]
WHOLE_RULES: dict[WholeRule, list[Module]] = {
    import_circle: [
        Module("tiered_kv.pages.index", "from tiered_kv.codecs.raw import RawCodec"),
        Module("tiered_kv.codecs.raw", "from tiered_kv.pages.index import PageIndex"),
    ],
    contract_without_suite: [
        Module("tiered_kv.codecs.base", "class Codec(Protocol): ..."),
        Module("tiered_kv.testing.conformance.codec", ""),
    ],
    shared_name: [Module("tiered_kv.pages.index", ""), Module("tiered_kv.storage.index", "")],
}
"""Each rule about all modules together, with modules that break it."""

TO_DO: dict[Rule | WholeRule, tuple[str, ...]] = {}
"""Prefixes of known violations, by rule."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_is_kept_by_every_module(rule: Rule) -> None:
    found = [f"{module.name}: {said}" for module in modules() for said in rule(module)]
    broken = [one for one in found if not one.startswith(TO_DO.get(rule, ()))]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", WHOLE_RULES, ids=lambda rule: rule.__name__)
def test_a_rule_is_kept_by_all_modules_together(rule: WholeRule) -> None:
    broken = [one for one in rule(list(modules())) if not one.startswith(TO_DO.get(rule, ()))]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_breaks_it(rule: Rule) -> None:
    assert list(rule(RULES[rule]))


@pytest.mark.parametrize("rule", WHOLE_RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_modules_that_break_it_together(rule: WholeRule) -> None:
    assert list(rule(WHOLE_RULES[rule]))


def test_all_of_the_code_is_checked() -> None:
    names = {module.name for module in modules()}
    assert {
        "tiered_kv.connectors.runtime.pins.pin_table",
        "tiered_kv.policies.pricing.pin_ttl",
        "tiered_kv.bench.sim.engine.driver",
    } <= names


def test_pages_name_files_that_exist() -> None:
    files = [f"/{module.name.replace('.', '/')}.py" for module in modules()]
    missing = [
        f"{page.name}: {name}"
        for page in sorted((ROOT / "docs").glob("*.md"))
        for line in page.read_text(encoding="utf-8").splitlines()
        if "the code is at" not in line  # the line refers to an earlier commit
        for name in re.findall(r"`([\w/]+\.py)`", line)
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not missing


def test_nothing_but_vllms_connector_needs_vllm() -> None:
    """Every module of the runtime, the policies and the core can be imported without vLLM."""
    code = """
import importlib, pkgutil, sys
sys.modules["vllm"] = None
import tiered_kv, tiered_kv.connectors.runtime as runtime, tiered_kv.policies as policies
needs_it = ("tiered_kv.connectors.vllm", "tiered_kv.testing.vllm", "tiered_kv.bench")
seen = 0
for package in (tiered_kv, policies, runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(needs_it):
            importlib.import_module(module.name)
            seen += 1
print(seen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
