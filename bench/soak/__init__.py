"""Soak test: a real server under random agents, for a given time."""
