"""The engine-independent part of the product: turns, gaps, pins, admission, saves and restores."""
