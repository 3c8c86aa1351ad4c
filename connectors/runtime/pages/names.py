"""Names of a request's pages: the first parts of their keys."""

from __future__ import annotations

from tiered_kv.connectors.runtime.base import EngineFacts, Fingerprints, Request
from tiered_kv.connectors.runtime.turn import TurnPages


class PageNames:
    """Names pages.

    Args:
        fingerprints: fingerprints of the engine's pages.
        slots: pages that CPU memory holds; without any, pages need no names.
    """

    def __init__(self, facts: EngineFacts, fingerprints: Fingerprints, slots: int) -> None:
        self._fingerprints = fingerprints
        self._groups = range(len(facts.groups) if slots else 0)
        self._hash_tokens = facts.hash_tokens
        self._strides = tuple(group.block_size // facts.hash_tokens for group in facts.groups)

    def of(self, request: Request, shared_tokens: int) -> TurnPages:
        """The names of a new request's pages.

        Args:
            shared_tokens: tokens of its job's last context that its prompt begins with.
        """
        return TurnPages(
            self.fingerprints(request),
            self._strides,
            self._hash_tokens,
            shared_tokens=shared_tokens,
        )

    def fingerprints(self, request: Request) -> tuple[bytes, ...]:
        """The first part of its keys, by group; empty while its adapter is not known."""
        found = [self._fingerprints.of(request.adapter, group) for group in self._groups]
        return tuple(one for one in found if one is not None) if None not in found else ()
