"""Exports of a trace that need a library of an extra."""
