"""Jobs: as clients name them, and as their prompts tell."""
