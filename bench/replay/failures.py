"""Failures that end a command with a message instead of a traceback."""

FAILURES = (OSError, RuntimeError, ValueError)
"""Servers, runs, models and plots raise subclasses of RuntimeError, and recordings subclasses of
ValueError."""
