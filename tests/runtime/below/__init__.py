"""Tiers below CPU memory, as the scheduler half drives them."""
