"""Rendering: a snapshot as it is shown, from nothing but that snapshot."""
