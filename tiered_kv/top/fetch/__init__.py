"""Fetching: the routes of a running server, read into frozen snapshots."""
