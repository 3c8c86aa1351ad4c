"""Agent jobs replayed against real servers: ``python -m bench.replay``."""
