"""Serving engines this project plugs into."""
