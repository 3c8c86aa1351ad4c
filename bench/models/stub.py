"""Stub of torchvision: vLLM imports it for some models whose text layers never use it."""

from __future__ import annotations

from pathlib import Path

_EMPTY = '''"""Nothing but names: a stub."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''


def write_torchvision(folder: Path) -> None:
    """Write the stub into a folder, which is to be put on ``PYTHONPATH``."""
    transforms = folder / "torchvision" / "transforms"
    (transforms / "v2").mkdir(parents=True, exist_ok=True)
    for path in (
        folder / "torchvision" / "__init__.py",
        transforms / "__init__.py",
        transforms / "functional.py",
        transforms / "v2" / "__init__.py",
        transforms / "v2" / "functional.py",
    ):
        path.write_text(_EMPTY)
