"""Recorded jobs through the simulator, under another policy than the one that served them."""
