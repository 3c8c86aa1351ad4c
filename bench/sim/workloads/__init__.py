"""Workloads of a simulation: generated or recorded jobs, fixed before the first run."""
