"""The store: segments of one page format, found, written, read and reclaimed."""
