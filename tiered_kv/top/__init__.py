"""A live view of a running server in a terminal."""
