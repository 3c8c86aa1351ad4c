"""Failures that end a command with a message instead of a traceback."""

FAILURES = (OSError, RuntimeError, ValueError)
"""Errors of servers, runs, models and plots are RuntimeErrors; of recordings, ValueErrors."""
