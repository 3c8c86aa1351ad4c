"""A soak: a real server under random agents, for as long as it is told."""
