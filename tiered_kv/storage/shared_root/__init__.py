"""A folder that many machines mount, as a remote store."""
