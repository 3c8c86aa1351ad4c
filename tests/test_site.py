"""The documentation site contains every page, has no broken link, and fetches nothing from other
hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?:[^"'\s>]+)"""
)
NAMED_ONLY = re.compile(r"<link\b[^>]*\brel=[\"']?canonical")


def copied(folder: Path) -> Path:
    """Copy this checkout's documents to a folder."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site from the documents in a folder."""
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from this checkout's documents."""
    folder = copied(tmp_path_factory.mktemp("site"))
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / ".site"


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    page = folder / "docs" / "gpu.md"
    page.write_text(page.read_text() + "\n[nowhere](no-such-page.md)\n")
    done = build(folder)
    assert done.returncode != 0
    assert "page does not exist" in done.stdout + done.stderr


def test_every_document_is_a_page_and_in_the_menu(site: Path) -> None:
    start = (site / "index.html").read_text()
    for document in (ROOT / "docs").glob("*.md"):
        if document.stem != "index":
            assert (site / document.stem / "index.html").is_file()
            assert f'href="{document.stem}/"' in start, f"{document.name} is in no menu"


def test_figures_are_shown(site: Path) -> None:
    replay = (site / "replay" / "index.html").read_text()
    assert "figures/replay.png" in replay
    assert (site / "figures" / "replay.png").stat().st_size > 0


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FETCHED.findall(NAMED_ONLY.sub("", page.read_text())), page
