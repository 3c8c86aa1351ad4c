"""The store: segments of one kind of page, found, written, read and reclaimed."""
