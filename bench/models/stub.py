"""Stub of torchvision: vLLM imports it for some models whose text layers never use it."""

from __future__ import annotations

from pathlib import Path

_STUB = '''"""Stand-in for torchvision: all modules and names are there, none does anything."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0"


class _Names(type):
    """A class with every attribute: its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def _anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {})


def __getattr__(name):
    return _anything(name)


sys.meta_path.append(_Finder())
'''


def write_torchvision(folder: Path) -> None:
    """Write the stub into a folder, which is to be put on ``PYTHONPATH``."""
    package = folder / "torchvision"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(_STUB)
