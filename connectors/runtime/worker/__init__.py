"""The worker half: moves bytes, and decides nothing."""
