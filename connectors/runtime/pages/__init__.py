"""Pages between the tiers: saves, restores, the SSD tier, and their orders."""
