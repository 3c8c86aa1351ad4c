"""A policy's learned state in a file, which is loaded at startup and saved on a thread."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tiered_kv.json_fields import MOST_BYTES, Fields, exactly, mapping, read_json
from tiered_kv.plain_files import check_owner, read_own, replace_file
from tiered_kv.policies.base import TurnPolicy

logger = logging.getLogger(__name__)

VERSION = 1
SAVE_EVERY_S = 300.0


class PolicyState:
    """Persists the learned state of one policy.

    If several engines share the folder, the last save wins. A file is written under a temporary
    name and renamed, so that readers see either the old or the new file, and never a partial file.
    Read and write errors are logged and otherwise ignored. Write errors are logged once.

    Args:
        folder: created at the first save; None disables persistence.
        name: the policy's name, part of the file name.
    """

    def __init__(self, policy: TurnPolicy, folder: Path | None, name: str) -> None:
        self._policy = policy
        self._path = None if folder is None else folder / f"policy-{name}.json"
        self._name = name
        self._saved_at: float | None = None
        self._failed = False
        self._saving: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "tiered-kv-policy")

    def load(self) -> bool:
        """Load the policy's state from its file. Returns False if there is no usable file."""
        if self._path is None:
            return False
        try:
            fields = Fields(read_json(read_own(self._path, MOST_BYTES), finite=False))
            fields.take("version", exactly, VERSION)
            fields.take("policy", exactly, self._name)
            self._policy.load(fields.take("learned", mapping))
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            logger.warning(
                "the policy's saved state in %s is ignored and will be overwritten: %s",
                self._path,
                error,
            )
            return False
        return True

    def save_if_due(self, now: float) -> None:
        """Start to save the policy's state if the last save, or the first call, was at least
        ``SAVE_EVERY_S`` seconds ago and no save is running. Does not wait for the save."""
        if self._path is None:
            return
        if self._saved_at is None:
            self._saved_at = now
        if now - self._saved_at < SAVE_EVERY_S or (self._saving and not self._saving.done()):
            return
        self._saved_at = now
        self._saving = self._thread.submit(self._save, self._path, self._policy.dump())

    def close(self) -> None:
        """Save the policy's state, then stop the thread. Idempotent."""
        with contextlib.suppress(RuntimeError):  # closed before
            if self._path is not None:
                self._thread.submit(self._save, self._path, self._policy.dump())
        self._thread.shutdown()

    def _save(self, path: Path, learned: Mapping[str, object]) -> None:
        if not learned:
            return
        said = {"version": VERSION, "policy": self._name, "learned": learned}
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            check_owner(path.parent)
            os.close(replace_file(path, json.dumps(said).encode(), durable=True))
        except (OSError, ValueError, TypeError) as error:
            if not self._failed:
                self._failed = True
                logger.warning("the policy's learned state cannot be saved to %s: %s", path, error)
