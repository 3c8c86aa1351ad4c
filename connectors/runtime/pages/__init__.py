"""Pages between the tiers: saves, restores, promotions, and their orders."""
