"""The rules of structure that a program can check, each with its reason.

A rule looks at one module, and names what breaks it. Every rule is shown a module that does.
"""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {"connectors": "tiered_kv.connectors", "policies": "tiered_kv.policies"}
"""Folders at the top, and the packages that they are installed as."""
FOLDERS = ("connectors", "policies", "tiered_kv", "bench")


@dataclass(frozen=True, slots=True)
class Module:
    """A module's name, as it is installed, and its text."""

    name: str
    text: str

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]

    def imports(self) -> Iterator[tuple[int, str]]:
        """Level (dots before it) and name of every module that is imported, anywhere."""
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.ImportFrom):
                yield node.level, node.module or ""
            elif isinstance(node, ast.Import):
                yield from ((0, alias.name) for alias in node.names)


def modules() -> Iterator[Module]:
    for folder in FOLDERS:
        # Symbolic links lead to the folders at the top, which are looked at by themselves.
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[0] == "tiered_kv" and parts[1] in INSTALLED:
                continue
            name = ".".join((INSTALLED.get(parts[0], parts[0]), *parts[1:]))
            yield Module(name, path.read_text(encoding="utf-8"))


def absolute_sibling(module: Module) -> Iterator[str]:
    """Siblings are imported relatively, so that a folder can move and its arrows are seen."""
    for level, name in module.imports():
        if not level and name.rpartition(".")[0] == module.package:
            yield f"{name} is a sibling: from .{name.rpartition('.')[2]}"


def relative_stranger(module: Module) -> Iterator[str]:
    """Everything else is imported by its whole name, so that it can be searched for."""
    for level, name in module.imports():
        if level > 1 or (level and "." in name):
            yield f"{'.' * level}{name} is no sibling"


def uninstalled_name(module: Module) -> Iterator[str]:
    """A folder's own name works in a checkout only."""
    for level, name in module.imports():
        top = name.partition(".")[0]
        if not level and top in INSTALLED:
            yield f"{name} is installed as {INSTALLED[top]}"


def stray_vllm(module: Module) -> Iterator[str]:
    """An engine is known to its connector alone, to what tests that, and to benchmarks."""
    known = ("tiered_kv.connectors.vllm.", "tiered_kv.testing.vllm.", "bench.")
    for level, name in module.imports():
        is_vllm = not level and name.partition(".")[0] == "vllm"
        if is_vllm and not module.name.startswith(known):
            yield f"{name} is imported outside connectors/vllm"


def upward_arrow(module: Module) -> Iterator[str]:
    """Arrows go from an engine's connector to the runtime to policies to the core; tests' helpers
    see all of them."""
    connectors = ("tiered_kv.connectors.runtime", "tiered_kv.connectors.vllm")
    layers = ("tiered_kv", "tiered_kv.policies", *connectors, "bench")

    def layer(name: str) -> int:
        return max(at for at, top in enumerate(layers) if f"{name}.".startswith(f"{top}."))

    if module.name.startswith("tiered_kv.testing"):
        return
    for level, name in module.imports():
        ours = not level and name.partition(".")[0] in ("tiered_kv", "bench")
        if ours and layer(name) > layer(module.name):
            yield f"{name} is built on {module.package}"


Rule = Callable[[Module], Iterator[str]]
RULES: dict[Rule, Module] = {
    absolute_sibling: Module("tiered_kv.codecs.zstd", "from tiered_kv.codecs.base import Codec"),
    relative_stranger: Module("tiered_kv.codecs.zstd", "from ..keys import PageKey"),
    uninstalled_name: Module("tiered_kv.testing.index", "import policies.eviction"),
    stray_vllm: Module("tiered_kv.pages.order_book", "def f():\n    import vllm.config"),
    upward_arrow: Module(
        "tiered_kv.pages.cpu_index", "from tiered_kv.policies.cache.eviction import ByWorth"
    ),
}
"""Each rule, with a module that breaks it."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_is_kept_by_every_module(rule: Rule) -> None:
    broken = [f"{module.name}: {said}" for module in modules() for said in rule(module)]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_breaks_it(rule: Rule) -> None:
    assert list(rule(RULES[rule]))


def test_all_of_the_code_is_looked_at() -> None:
    names = {module.name for module in modules()}
    assert {
        "tiered_kv.connectors.runtime.pins.pin_table",
        "tiered_kv.policies.pricing.pin_value",
        "bench.sim.driver",
    } <= names


def test_the_page_on_structure_is_as_written() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "structure"))["text"]()
    kept = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert kept == written, "run scripts/structure"


def test_nothing_but_vllms_connector_needs_vllm() -> None:
    """Every module of the runtime, the policies and the core imports where vLLM is absent."""
    code = """
import importlib, pkgutil, sys
sys.modules["vllm"] = None
import tiered_kv, tiered_kv.connectors.runtime as runtime, tiered_kv.policies as policies
seen = 0
for package in (tiered_kv, policies, runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(("tiered_kv.connectors.vllm", "tiered_kv.testing.vllm")):
            importlib.import_module(module.name)
            seen += 1
print(seen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
