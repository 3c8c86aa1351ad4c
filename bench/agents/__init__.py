"""Agents' jobs, the client that plays them, and what came of it."""
