"""Replicas that share a remote store: jobs that move between them, and trouble with the store."""
