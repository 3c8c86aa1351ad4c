"""Pages that a long operation holds in CPU memory, so that they are not evicted before it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from tiered_kv.keys import PageKey

from .cpu_index import PageIndex


class HeldPages:
    """Pages held for one operation. This context manager releases every page on exit, even after an
    error, so it must be entered before the first page is held.

    Not thread-safe. Used only on the scheduler thread.
    """

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self._places: dict[PageKey, int] = {}
        self._private: Collection[PageKey] = ()

    def __enter__(self) -> HeldPages:
        return self

    def __exit__(self, *_: object) -> None:
        places, self._places = self._places, {}
        private, self._private = self._private, ()
        for key, place in places.items():
            self._index.release(key, place, used=False)
        for key in private:  # including pages that are still being copied
            self._index.forget(key)

    def __len__(self) -> int:
        return len(self._places)

    def hold(self, keys: Iterable[PageKey]) -> list[PageKey]:
        """Hold the readable pages among ``keys``, and return the other pages in the same order.

        A held page that the index has forgotten in the meantime counts as missing, unless it is
        readable again.
        """
        index, missing = self._index, list[PageKey]()
        for key in keys:
            held, place = self._places.get(key), index.place(key)
            if held is not None and held != place:
                index.release(key, self._places.pop(key), used=False)
            if place is None:
                missing.append(key)
            elif held != place:
                self._places[key] = index.acquire(key)
        return missing

    def arrival(self, keys: Sequence[PageKey]) -> Callable[[], bool]:
        """Return a predicate that is True once none of these pages is moving any more.

        Each call of the predicate holds the pages that have become readable, so that they are not
        evicted. All its calls together take O(pages).
        """
        awaited = deque(keys)

        def arrived() -> bool:
            while awaited and not self._index.state(awaited[0]).moving:
                self.hold((awaited.popleft(),))
            return not awaited

        return arrived

    def hand_over(self, keys: Sequence[PageKey]) -> tuple[int, ...]:
        """Return the place of each held page. The caller must release the pages from now on.

        Raises:
            KeyError: a page is not held. In this case nothing changes.
        """
        places = tuple(map(self._places.__getitem__, keys))
        for key in keys:
            del self._places[key]
        return places

    def make_private(self, keys: Collection[PageKey]) -> None:
        """Forget these pages on exit, because only this operation knows their keys. ``publish``
        undoes this."""
        self._private = keys

    def publish(self) -> None:
        """Leave private pages in CPU memory, where jobs can find them."""
        self._private = ()
