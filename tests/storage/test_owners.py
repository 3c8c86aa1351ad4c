"""Folders and files that another user of the machine may have created."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transfer.memory_file.made_memory import open_in
from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.policy_state import PolicyState
from tiered_kv.errors import ConfigError
from tiered_kv.plain_files import check_owner, open_own
from tiered_kv.policies import registry
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.storage.notebook import NoNotebook, Notebook, folder_for_notes, open_notebook
from tiered_kv.trace.trace_file import TraceFile

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

OTHER = 54321


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A folder that every user may write to, like /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def theirs(everybodys: Path) -> Path:
    """A folder in ``everybodys`` that another user created first."""
    folder = everybodys / "tiered-kv"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, OTHER, OTHER)
    return folder


def give_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def test_files_that_any_user_could_have_created_must_belong_to_this_user(
    everybodys: Path, theirs: Path
) -> None:
    with pytest.raises(PermissionError, match="belongs to another user"):
        check_owner(theirs)
    (ours := everybodys / "ours").mkdir()
    check_owner(ours)
    (link := everybodys / "link").symlink_to(ours)
    check_owner(link)
    give_away(link)
    with pytest.raises(PermissionError):
        check_owner(link)


def test_a_folder_of_another_user_in_our_own_folder_is_accepted(tmp_path: Path) -> None:
    """Another user's folder is accepted in a folder of this user, as when a host's folder is
    mounted for a container's root. A file of the other user in it is refused."""
    (folder := tmp_path / "ssd").mkdir()
    give_away(folder)
    check_owner(folder)
    (theirs := folder / "notes").write_text("")
    give_away(theirs)
    with pytest.raises(PermissionError):
        open_own(theirs, os.O_RDONLY)


def test_no_tier_uses_another_users_folder(theirs: Path) -> None:
    with pytest.raises(ConfigError, match=r"belongs to another user.*TIERED_KV_CPU_PATH"):
        open_in(theirs)
    with pytest.raises(SnapshotError, match="belongs to another user"):
        SnapshotDraft.begin(theirs, "mine")
    assert not [*theirs.iterdir()]


def test_no_notes_are_kept_in_another_users_folder(
    theirs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert folder_for_notes(theirs) is None
    book = open_notebook(theirs, 0, keep=True)
    assert not isinstance(book, Notebook)
    assert isinstance(book, NoNotebook)
    assert caplog.text.count("belongs to another user") == 2


def test_other_users_notes_in_a_shared_folder_are_ignored(tmp_path: Path) -> None:
    """In a folder that several users share, such as a Kubernetes volume, the notes, locks and
    policy state of other users are ignored."""
    tmp_path.chmod(0o777)
    for name in ("jobs-0-0.jsonl", "jobs-0-1.lock", "policy-occupancy.json"):
        (tmp_path / name).write_text("{}")
        give_away(tmp_path / name)
    book = open_notebook(tmp_path, 0, keep=True)
    assert isinstance(book, Notebook)
    assert book.path.name == "jobs-0-2.jsonl"
    book.close()
    state = PolicyState(registry.policy("occupancy"), tmp_path, "occupancy")
    assert not state.load()
    state.close()
    assert TierConfig().policy == "occupancy"


def test_a_policy_file_is_not_written_through_another_users_link(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (diary := tmp_path / "diary").write_text("dear diary")
    (link := tmp_path / f"policy-occupancy.json.{os.getpid()}").symlink_to(diary)
    give_away(link)
    state = PolicyState(registry.policy("occupancy"), tmp_path, "occupancy")
    state.close()
    assert diary.read_text() == "dear diary"


def test_a_trace_is_not_written_for_another_user_to_read(everybodys: Path) -> None:
    path = everybodys / "trace.jsonl"
    path.write_text("")
    give_away(path)
    with pytest.raises(PermissionError, match="belongs to another user"):
        TraceFile(path, "{}")
