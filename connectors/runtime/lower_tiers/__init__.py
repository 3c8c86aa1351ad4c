"""Tiers below CPU memory: the orders to their stores, and what these have."""
