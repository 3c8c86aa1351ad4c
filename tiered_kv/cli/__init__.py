"""The ``tiered-kv`` command."""
