"""Pins, and when they give way."""
