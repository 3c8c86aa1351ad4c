"""Validation of the simulator: closed forms, and a real server."""
