"""Sizing: a model's KV, the contexts that fit into each tier, and times to restore or compute
them."""
