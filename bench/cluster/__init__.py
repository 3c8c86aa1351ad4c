"""Replicas that share a remote store: jobs that move between them, and faults of the store."""
