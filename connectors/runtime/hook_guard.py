"""Guard of the engine's hooks: an error in the connector is counted and logged, and the engine
continues as if the connector were absent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from tiered_kv.metrics import Counters

logger = logging.getLogger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])


class HookErrors:
    """Counts errors of hooks, and logs the first error of each hook. Used on one thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged: set[str] = set()

    def add(self, hook: str, instead: str) -> None:
        """Record the exception that is being handled.

        Args:
            hook: name of the hook, or of the part of a hook, that failed.
            instead: how the engine continues.
        """
        self._counters.add("hook_errors")
        if hook not in self._logged:
            self._logged.add(hook)
            logger.exception("%s failed; %s (logged once)", hook, instead)


def never_raises(fallback: Callable[[Any], Any]) -> Callable[[Hook], Hook]:
    """Return a decorator of hooks. If a hook raises, its wrapper calls the object's method
    ``_hook_failed`` with the hook's name, and returns ``fallback(self)``, the engine's behaviour
    without the connector."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self._hook_failed(hook.__name__)
                return fallback(self)

        return guarded  # type: ignore[return-value]

    return decorate
