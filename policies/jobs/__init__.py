"""Jobs: named by clients, or inferred from prompts."""
