"""Tiers below CPU memory, driven by the scheduler half."""
