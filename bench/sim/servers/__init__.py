"""Servers to compare: policies, and schedulers described by other systems."""
