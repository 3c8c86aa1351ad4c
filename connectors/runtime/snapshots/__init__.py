"""Snapshots of jobs: taken, restored and forked while the engine serves."""
