"""Sizes: a model's KV, what tiers hold of it, and the time to move or to compute it."""
