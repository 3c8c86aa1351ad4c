"""Cross-validation over sessions: who is learned from, and who is tested."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .gaps import Session

Label = Callable[[Session], object]


@dataclass(frozen=True, slots=True)
class Fold:
    """A policy learns from some sessions and is tested on others. Both in the source's order."""

    learned: Sequence[Session]
    tested: Sequence[Session]


def fold_of(session: Session, folds: int) -> int:
    """The fold that tests a session, by a hash of its id: neither its place in the file nor the
    other sessions matter. The first two bytes of the hash are left out: they say which sessions
    are in ``traces/``, and once said which constants were fitted to."""
    digest = hashlib.sha256(session.split_by.encode()).digest()
    return int.from_bytes(digest[2:10], "big") % folds


def in_folds(sessions: Sequence[Session], label: Label) -> Iterator[Fold]:
    """One fold per label that some session has: those are tested, all others learned from."""
    labels = [label(session) for session in sessions]
    for one in sorted(set(labels), key=str):
        pairs = list(zip(labels, sessions, strict=True))
        yield Fold(
            [session for its, session in pairs if its != one],
            [session for its, session in pairs if its == one],
        )
