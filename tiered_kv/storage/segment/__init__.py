"""Segments: their format, and how they are written, opened and scanned."""
