"""Engines on a virtual clock: machines, workers, vLLM's scheduler, and the driver of a run."""
