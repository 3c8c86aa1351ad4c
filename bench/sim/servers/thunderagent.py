"""ThunderAgent-like: whole programs are paused and resumed by what their contexts take.

A program that is let in keeps its place in VRAM, as far as vLLM's prefix cache goes, through its
tools. Every five seconds the contexts of those let in are added up: while they exceed the pool the
last to come is paused, that is, its next turns are held back; while there is room the first of
those held is let in, paused programs before new ones. A program alone is never held.
"""

from __future__ import annotations

from collections.abc import Callable

EVERY_S = 5.0


class Gate:
    """One server's.

    Args:
        pool_tokens: what the contexts of the programs let in may take together.
    """

    def __init__(self, pool_tokens: int) -> None:
        self._pool = pool_tokens
        self._active: dict[str, int] = {}  # program -> tokens, the first to come first
        self._paused: dict[str, int] = {}
        self._held: dict[str, list[Callable[[], None]]] = {}

    def ask(self, program: str, tokens: int, send: Callable[[], None]) -> None:
        """A turn of a program: ``send`` it, now or once the program is let in."""
        if program in self._active:
            self._active[program] = tokens
            send()
            return
        known = program in self._paused or program in self._held
        self._held.setdefault(program, []).append(send)
        if known:
            self._paused[program] = tokens
            return
        if not self._fits(tokens) or self._paused:
            self._paused[program] = tokens
            return
        self._let_in(program, tokens)

    def _fits(self, tokens: int) -> bool:
        return not self._active or sum(self._active.values()) + tokens <= self._pool

    def _let_in(self, program: str, tokens: int) -> None:
        self._active[program] = tokens
        for send in self._held.pop(program, ()):
            send()

    def grew(self, program: str, tokens: int) -> None:
        """A turn of the program ended with a context of so many tokens."""
        if program in self._active:
            self._active[program] = tokens

    def over(self, program: str) -> None:
        """The program is done."""
        self._active.pop(program, None)
        self._paused.pop(program, None)

    def tick(self) -> None:
        """Every ``EVERY_S``: pause what is too much, let in what fits."""
        while len(self._active) > 1 and sum(self._active.values()) > self._pool:
            last = next(reversed(self._active))
            self._paused = {last: self._active.pop(last), **self._paused}
        for program, tokens in list(self._paused.items()):
            if not self._fits(tokens):
                return
            del self._paused[program]
            self._let_in(program, tokens)
