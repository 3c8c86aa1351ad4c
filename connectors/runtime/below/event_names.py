"""Names of what is counted of a tier's orders."""

from __future__ import annotations

from collections.abc import Mapping

_SHARED = {
    "pages_promoted": "pages_fetched",
    "bytes_promoted": "bytes_fetched",
    "promotion_seconds": "fetch_seconds",
    "promotion_failures": "fetch_failures",
    "pages_demoted": "pages_shared",
    "bytes_demoted": "bytes_shared",
    "demotion_seconds": "share_seconds",
    "demotion_failures": "share_failures",
}


def event_names(*, shared: bool) -> Mapping[str, str]:
    """Names of events that a tier counts under another name than an engine's own tier.

    Args:
        shared: True if engines share the tier.
    """
    return _SHARED if shared else {}
