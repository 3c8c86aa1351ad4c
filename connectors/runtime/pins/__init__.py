"""Pins, and when they are released."""
