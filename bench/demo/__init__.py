"""The demo: ``scripts/demo``, or ``python -m bench.demo``."""
