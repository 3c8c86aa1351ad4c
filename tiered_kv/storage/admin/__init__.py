"""Stores on disk as an operator sees them: list, count, verify, delete, export."""
