"""The worker half: moves bytes, and makes no decisions."""
