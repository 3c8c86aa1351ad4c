"""Snapshots of jobs in an engine."""
