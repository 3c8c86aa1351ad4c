"""The product, whatever the engine: turns, gaps, pins, admission, saves and restores."""
