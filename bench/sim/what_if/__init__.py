"""Simulates recorded jobs under a policy other than the one that served them."""
