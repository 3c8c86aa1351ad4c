"""Doctor: checks of a machine, of its settings and of a running server."""
