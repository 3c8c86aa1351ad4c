"""Tiers below CPU memory: the orders to their stores, and the pages that the stores contain."""
