"""Administration of stores on disk: list, count, verify, delete, export."""
