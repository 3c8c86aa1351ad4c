"""Servers and engines that benchmarks start, and peers that they are compared with."""
