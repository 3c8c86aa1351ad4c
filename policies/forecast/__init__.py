"""Forecasts of the gap after a turn."""
