"""Segments: their format, and how one is written, opened and scanned."""
