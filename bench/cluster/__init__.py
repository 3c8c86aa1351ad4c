"""Replicas that share a remote store: jobs that move between replicas, and faults of the store."""
