"""Tool calls, read and timed."""
