"""Segments: the format, and how one is written, opened and searched."""
