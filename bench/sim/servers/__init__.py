"""Servers that are compared: policies, and schedulers that others describe."""
