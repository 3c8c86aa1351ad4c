"""Trace of the engine's steps."""
