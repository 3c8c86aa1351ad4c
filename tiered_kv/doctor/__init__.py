"""The doctor: checks of a machine, its settings, and a running server."""
