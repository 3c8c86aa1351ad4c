"""Engines on a virtual clock: machines, workers, vLLM's scheduler, and a run of jobs."""
