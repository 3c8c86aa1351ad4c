"""Instruments of the benchmarks of single parts: a bare disk, copies, an engine's timed steps."""
