"""The gap after a turn, forecast."""
