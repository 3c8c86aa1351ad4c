"""Part of a snapshot: the pages that one rank has written, in the file ``part-<rank>.json`` of a
draft."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tiered_kv.json_fields import Fields, canonical, items, parse, text, whole

from .manifest import MOST_RANKS, SnapshotPage, is_sha256

_NAME = re.compile(r"part-(0|[1-9][0-9]{0,5})\.json")


class Origin(Enum):
    """Origin of a page's file: written by this rank or another, or shared with another snapshot."""

    NEW = "new"
    """The page was written, because the pool did not have it."""
    AGAIN = "again"
    """The page was written, because the file in the pool could not be used."""
    SHARED = "shared"
    """The file is shared with other snapshots."""
    BESIDE = "beside"
    """The file was written by another rank."""


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page's file.

    Attributes:
        nbytes: size of the file, bytes.
        origin: whether the file was written or is shared, and why.
    """

    nbytes: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Part:
    """Contents of a part file.

    Attributes:
        rank: rank that wrote the part.
        pages: pages of the part.
        files: files of the pages, by digest.
    """

    rank: int
    pages: tuple[SnapshotPage, ...]
    files: dict[str, StoredPage]

    def dump(self) -> bytes:
        """Serialize the part as JSON."""
        return canonical(
            {
                "rank": self.rank,
                "pages": [[page.group, page.block, page.key, page.sha256] for page in self.pages],
                "files": [
                    [digest, file.nbytes, file.origin.value] for digest, file in self.files.items()
                ],
            }
        )

    @staticmethod
    def load(data: bytes) -> Part:
        """Parse a part.

        Raises:
            ValueError, TypeError: the data is not a part.
        """
        fields = Fields(parse(data))
        rank = fields.take("rank", whole, 0, MOST_RANKS - 1)
        rows = fields.take("pages", items)
        files = {}
        for digest, nbytes, origin in fields.take("files", items):
            if not is_sha256(digest):
                raise ValueError("the name of a file is not a SHA-256 digest")
            files[digest] = StoredPage(whole(nbytes, 1, 1 << 32), Origin(origin))
        fields.done()
        pages = tuple(
            SnapshotPage(whole(group), whole(block), rank, digest, text(key))
            for group, block, key, digest in rows
        )
        if {page.sha256 for page in pages} != files.keys():
            raise ValueError("the listed files do not match the listed pages")
        return Part(rank, pages, files)


def part_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's part in a draft."""
    return folder / f"part-{rank}.json"


def ranks_of(names: Iterable[str]) -> set[int]:
    """Return the ranks whose parts are among these file names."""
    found = map(_NAME.fullmatch, names)
    return {int(match[1]) for match in found if match is not None}
