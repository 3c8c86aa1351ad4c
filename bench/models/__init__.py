"""Models of every architecture, tiny and real: what the connector restores of each."""
