"""Snapshots of jobs, which are taken, restored and forked while the engine serves."""
