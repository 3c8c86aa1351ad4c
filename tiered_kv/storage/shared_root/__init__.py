"""A remote store in a folder that many machines mount."""
