"""Benchmark of job snapshots on a real server."""
