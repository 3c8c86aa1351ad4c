"""The documents as a site: every page is included, every link works, and nothing is fetched."""

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
    """A copy of this checkout's documents."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder's documents."""
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this checkout's documents."""
    folder = copied(tmp_path_factory.mktemp("site"))
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / ".site"


def test_a_link_that_leads_nowhere_ends_the_building(tmp_path: Path) -> None:
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
