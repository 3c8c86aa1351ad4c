"""Servers and engines that benchmarks start, and the peers to compare with."""
