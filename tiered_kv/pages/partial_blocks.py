"""Partial tail blocks: the last tokens of a turn, which do not fill a block.

vLLM hashes full blocks only, so a job's next turn would recompute the tail of the previous turn. A
tail is found by the page before it and by its tokens. Because of causal attention, the KV of its
first ``n`` tokens is valid for any text that shares these ``n`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from tiered_kv.keys import DIGEST_BYTES, PageKey, tail_key
from tiered_kv.storage.notebook import Fact, NoNotebook

PREFIX = "tail "
MAX_TAILS_PER_PARENT = 8
"""Maximum number of tails after one page, which are forks of one context. If there are more, the
oldest tail is forgotten."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A partial tail block.

    Attributes:
        noted: True if the tail was read from the notebook of a previous engine, so that its key
            must be checked: the key may belong to other tokens.
    """

    key: PageKey
    tokens: tuple[int, ...]
    noted: bool = field(default=False, compare=False)

    def is_of(self, parent: bytes, extra: object) -> bool:
        """Return True if the tail's key belongs to its tokens after page ``parent``, with vLLM's
        extra keys ``extra``. Only keys from a notebook are checked."""
        return not self.noted or self.key == tail_key(parent, self.tokens, extra)


class TailIndex:
    """Tails by the page before them. Single-threaded, without locks. Stores no bytes: the page
    index decides whether a tail's bytes are readable.

    Args:
        notebook: keeps the tails for the next engine, and provides the tails of the previous
            engine.
    """

    def __init__(self, notebook: NoNotebook) -> None:
        self._by_parent: dict[tuple[bytes, bytes], list[Tail]] = {}
        self._parents: dict[bytes, None] = {}
        self._count = 0
        self._notebook = notebook
        for name, fact in notebook.facts(PREFIX).items():
            if (noted := _noted(name, fact)) is not None:
                self._remember(*noted)

    def has_any(self, parent: bytes) -> bool:
        """True if there may be tails after that page."""
        return parent in self._parents

    def __len__(self) -> int:
        return self._count

    def add(
        self, parent: bytes, extra: object, tokens: Sequence[int], key: PageKey | None = None
    ) -> Tail:
        """Record a tail, and return it.

        ``key`` is the key of a full page whose leading tokens may be needed alone. Without ``key``,
        the tail gets a separate key, which depends only on the other three arguments. Only a
        tail with a separate key is recorded in the notebook, because this key proves to the next
        engine which tokens the tail has.
        """
        tail = Tail(key or tail_key(parent, tokens, extra), tuple(tokens))
        other = _digest(extra)
        self._remember(parent, other, tail)
        if key is not None or not self._notebook.stores:
            return tail
        fact = {"parent": parent.hex(), "extra": other.hex(), "tokens": tail.tokens}
        self._notebook.note(PREFIX + tail.key.hex(), fact)
        return tail

    def _remember(self, parent: bytes, extra: bytes, tail: Tail) -> None:
        tails = self._by_parent.setdefault((parent, extra), [])
        self._parents[parent] = None
        if tail in tails:
            tails.remove(tail)
            self._count -= 1
        elif len(tails) == MAX_TAILS_PER_PARENT:
            del tails[0]
            self._count -= 1
        tails.append(tail)
        self._count += 1

    def longest(
        self,
        parent: bytes,
        extra: object,
        tokens: Sequence[int],
        usable: Callable[[Tail, int], bool],
    ) -> tuple[Tail, int] | None:
        """Return the usable tail that shares the most leading tokens, and how many it shares.

        Returns None if no usable tail shares any tokens.

        Args:
            usable: returns True if that many leading tokens of a tail can be restored.
        """
        best: tuple[Tail, int] | None = None
        for tail in self._by_parent.get((parent, _digest(extra)), ()):
            shared = _shared_prefix(tail.tokens, tokens)
            longer = shared > (best[1] if best else 0)
            if longer and tail.is_of(parent, extra) and usable(tail, shared):
                best = (tail, shared)
        return best

    def clear(self) -> None:
        """Forget every tail, and remove the tails from the notebook."""
        self._notebook.strike_all(PREFIX)
        self._by_parent.clear()
        self._parents.clear()
        self._count = 0

    def prune(self, known: Callable[[PageKey], bool]) -> None:
        """Forget every tail for whose key ``known`` returns False. The notebook is not changed.
        Takes O(tails), so call it when there are more tails than pages."""
        kept = {
            where: alive
            for where, tails in self._by_parent.items()
            if (alive := [tail for tail in tails if known(tail.key)])
        }
        self._by_parent = kept
        self._parents = {parent: None for parent, _ in kept}
        self._count = sum(map(len, kept.values()))


def _digest(extra: object) -> bytes:
    """Return a digest of vLLM's extra keys, which may contain a secret; empty without extra
    keys."""
    return sha256(repr(extra).encode()).digest()[:DIGEST_BYTES] if extra else b""


def _noted(name: str, fact: Fact) -> tuple[bytes, bytes, Tail] | None:
    """Parse a fact from a notebook. Returns the parent, the digest of the extra keys and the tail;
    None if the fact does not describe a tail."""
    match fact:
        case {"parent": str(parent), "extra": str(extra), "tokens": list(tokens)} if all(
            type(token) is int and 0 <= token < 1 << 63 for token in tokens
        ):
            try:
                key = PageKey(bytes.fromhex(name.removeprefix(PREFIX)))
                tail = Tail(key, tuple(tokens), noted=True)
                return bytes.fromhex(parent), bytes.fromhex(extra), tail
            except ValueError:
                return None
        case _:
            return None


def _shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
