"""The golden files are byte for byte the files that commit 913b4b9 wrote."""

from __future__ import annotations

from hashlib import sha256

from tests.golden.written import ARCHIVE

DIGEST = "c80f919f1e328ddbbb9bed5e35b01c9cd632130c4e656f39672ba7533778913f"


def test_the_golden_files_are_never_written_again() -> None:
    assert sha256(ARCHIVE.read_bytes()).hexdigest() == DIGEST
