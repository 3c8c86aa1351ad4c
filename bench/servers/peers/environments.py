"""Environments of peers, whose packages fit neither ours nor each other's.

``scripts/install-peers`` makes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiered_kv.bench.servers.service import ServerError

FOLDER = Path(sys.prefix, "peers")


def program(peer: str, name: str) -> str:
    """Path of a program in a peer's environment.

    Raises:
        ServerError: it is not installed.
    """
    path = FOLDER / peer / "bin" / name
    if not path.is_file():
        raise ServerError(f"{peer} is not installed in {FOLDER}: run scripts/install-peers")
    return str(path)
