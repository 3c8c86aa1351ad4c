"""Handles the snapshot files of the scheduler half on a separate thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tiered_kv import __version__
from tiered_kv.connectors.runtime.base import EngineFacts, Fingerprints
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import UNIDENTIFIED, UPDATED, Fingerprint
from tiered_kv.plain_files import check_owner
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.manifest import Manifest, SnapshotError, SnapshotGroup
from tiered_kv.snapshot.mismatch import EngineIdentity, mismatches
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot
from tiered_kv.snapshot.snapshot_files import disk_errors

from .capture import Captured
from .context_pages import ContextNames

LEFT_OUT = ("generation", "hash_algorithm")
"""Fields of a fingerprint that do not affect page bytes. A restoring engine computes new keys."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A snapshot that is compatible with the engine.

    Attributes:
        path: the snapshot's folder or file.
        named: a turn that never runs, with the page keys of the tokens whose KV the snapshot has.
        salt: cache salt of the turn's page keys.
    """

    path: Path
    manifest: Manifest
    named: Turn
    salt: str | None


class SnapshotFiles:
    """Creates, seals and opens snapshots in one folder.

    Args:
        root: the folder.
    """

    def __init__(
        self,
        root: Path,
        facts: EngineFacts,
        fingerprints: Fingerprints,
        names: ContextNames,
    ) -> None:
        self.root = root
        self._facts = facts
        self._fingerprints = fingerprints
        self._names = names
        self.thread = ThreadPoolExecutor(1, "tiered-kv-snapshot-files")

    def identity(self) -> EngineIdentity:
        """Return the properties of the engine that determine its page bytes.

        Raises:
            SnapshotError: the engine's weights cannot be identified.
        """
        found = [self._fingerprints.base(at) for at in range(len(self._facts.groups))]
        if any(one.model.startswith(UPDATED) for one in found):
            raise SnapshotError(
                "This server's weights may have changed since it started, so a snapshot "
                "cannot identify them: save the weights to a folder, and restart the server "
                "from that folder."
            )
        if any(one.model.startswith(UNIDENTIFIED) for one in found):
            raise SnapshotError(
                "This server's weights have no files, so a snapshot cannot identify them: serve "
                "a model from a folder."
            )
        groups = tuple(
            SnapshotGroup(group.index, group.block_size, group.page_format, _in_words(one))
            for group, one in zip(self._facts.groups, found, strict=True)
        )
        return EngineIdentity(
            self._facts.ranks, self._facts.hash_tokens, self._facts.version, groups
        )

    @contextmanager
    def draft(self, name: str) -> Iterator[Future[SnapshotDraft]]:
        """Start a snapshot for the duration of a ``with`` block. At its end, the draft is removed
        unless it was sealed."""
        drafting = self.thread.submit(SnapshotDraft.begin, self.root, name)
        try:
            yield drafting
        finally:
            if not drafting.cancel():
                self.thread.submit(_abandon, drafting)

    def seal(
        self, draft: SnapshotDraft, captured: Captured, job: str, exact: bool, now: float
    ) -> Future[Manifest]:
        """Seal a snapshot whose pages have been written by all ranks. Raises SnapshotError if the
        engine's weights cannot be identified.

        Args:
            now: seconds since the epoch.
        """
        engine, context = self.identity(), captured.context
        return self.thread.submit(
            lambda: draft.seal(
                Manifest(
                    created=now,
                    tiered_kv=__version__,
                    vllm=engine.vllm,
                    model=self._facts.model,
                    ranks=engine.ranks,
                    hash_tokens=engine.hash_tokens,
                    groups=engine.groups,
                    token_ids=tuple(map(int, context.token_ids)),
                    kv_tokens=context.kv_tokens,
                    prompt_tokens=context.prompt_tokens,
                    job=job,
                    turns=context.turns,
                    parents=context.parents,
                    cache_salt=context.salt,
                    exact=exact,
                    sampling=context.sampling,
                    pages=(),
                    stored_bytes=0,
                    shared_bytes=0,
                )
            )
        )

    def open(self, name: str, salt: str | None) -> Future[Opened]:
        """Open a snapshot, and compute its page keys. The future raises SnapshotError if the
        snapshot is missing, unreadable or incompatible with the engine.

        Args:
            salt: cache salt for restoring an exact snapshot; None to use the snapshot's own cache
                salt.
        """
        return self.thread.submit(self._open, name, salt, self.identity())

    def _open(self, name: str, salt: str | None, engine: EngineIdentity) -> Opened:
        path = find_snapshot(self.root, name)
        with disk_errors(f"{name} is not restored"):
            check_owner(self.root)
            check_owner(path)
        with open_snapshot(path) as snapshot:
            manifest = snapshot.manifest
        if wrong := mismatches(manifest, engine):
            raise SnapshotError(f"{name} comes from a different engine: {'; '.join(wrong)}.")
        if salt is not None and not manifest.exact:
            raise SnapshotError(f"{name} was not taken with --exact: restore it without --exact.")
        salt = manifest.cache_salt if salt is None else salt
        tokens: Sequence[int] = manifest.token_ids[: manifest.kv_tokens]
        return Opened(path, manifest, self._names.name(list(tokens), salt), salt)

    def close(self) -> None:
        """Finish pending work, and stop the thread. Idempotent."""
        self.thread.shutdown()


def _in_words(fingerprint: Fingerprint) -> Mapping[str, object]:
    lasting = replace(fingerprint, config=dict(fingerprint.config))
    return {name: value for name, value in asdict(lasting).items() if name not in LEFT_OUT}


def _abandon(draft: Future[SnapshotDraft]) -> None:
    if draft.exception() is None:
        draft.result().abandon()
