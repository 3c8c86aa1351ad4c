"""Agents' jobs, the client that plays them, and their results."""
