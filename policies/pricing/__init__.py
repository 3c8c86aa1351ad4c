"""Costs, and the worth of a pin."""
