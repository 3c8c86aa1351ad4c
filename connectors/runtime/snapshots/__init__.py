"""Snapshots of jobs: taken, brought back, and forked, while the engine serves."""
