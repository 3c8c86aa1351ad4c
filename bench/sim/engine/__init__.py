"""Engines on a virtual clock: machines, links, vLLM's scheduler, and a run of jobs."""
