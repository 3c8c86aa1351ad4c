"""Workloads for simulations: generated or recorded jobs, fixed before the first run."""
