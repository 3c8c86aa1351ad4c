"""Tiers below CPU memory: the orders sent to their stores, and the pages that the stores
contain."""
