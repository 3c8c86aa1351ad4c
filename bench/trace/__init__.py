"""Figures of the trace against all others that a server gives, and its cost."""
