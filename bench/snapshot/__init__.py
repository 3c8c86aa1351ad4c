"""Snapshots of jobs on a real server."""
