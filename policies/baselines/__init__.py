"""Policies that others published, to be compared with."""
