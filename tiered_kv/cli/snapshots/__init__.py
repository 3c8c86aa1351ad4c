"""The commands ``tiered-kv snapshot``, ``restore``, ``fork``, ``inspect`` and ``diff``."""
