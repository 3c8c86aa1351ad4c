"""Recognition of real clients' jobs on a real server."""
