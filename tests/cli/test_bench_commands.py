"""The benchmarks are also commands of the installed package, with the same options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tiered_kv.cli.bench_commands import Benchmark

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, module: str) -> str:
    """Run a module of this checkout as a command, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [["replay"], ["replay", "ab"], ["sim"], ["sim", "run"]])
def test_help_is_the_benchmarks_own(arguments: list[str]) -> None:
    name, *rest = arguments
    ours = command(*arguments, "--help", module="tiered_kv.cli.app").splitlines()
    theirs = command(*rest, "--help", module=f"bench.{name}").splitlines()
    assert ours[0].startswith(f"Usage: tiered-kv {' '.join(arguments)} ")
    assert ours[1:] == theirs[1:]


def test_the_list_of_commands_needs_none_of_their_packages() -> None:
    code = (
        "import sys; sys.modules['openai'] = sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from typer.testing import CliRunner; from tiered_kv.cli.app import app\n"
        "print(CliRunner().invoke(app, ['--help']).output)\n"
        "print([name for name in sys.modules if name.startswith('tiered_kv.bench')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "replay" in done.stdout
    assert "sim" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("vllm", "install tiered-kv into the environment that has it"),
        ("no_plots", "'tiered-kv[bench]'"),
    ],
)
def test_a_package_that_is_missing_is_named(
    package: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / f"needs_{package}.py").write_text(f"import {package}.parts\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(typer.Exit):
        Benchmark("sim", f"needs_{package}", "Simulate.").run([])
    said = capsys.readouterr().err
    assert said.lower().startswith(f"tiered-kv: sim needs {package}")
    assert advice in said


def test_a_package_that_is_missed_only_while_it_runs_is_named_too() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None; from tiered_kv.cli.app import app\n"
        "app(['sim', 'run', '--jobs', '2'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "tiered-kv: sim needs vLLM: install tiered-kv into the environment that has it.\n"
    )
