"""A running server, live in a terminal."""
