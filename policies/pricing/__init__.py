"""Costs of restores and of VRAM, and the value of a pin."""
