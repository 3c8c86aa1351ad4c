"""The engine-independent part of the connector: turns, pins, admission, saves and restores."""
