"""Agent jobs, replayed on real servers: ``python -m bench.replay``."""
