"""The cores that this process may use."""

import os

CORES = frozenset(os.sched_getaffinity(0))
"""Asked at import, which must be early: vLLM's CPU worker binds the main thread to a single core,
and every thread started later with it."""
