"""Tiny models of every architecture, to test what the connector restores for each."""
