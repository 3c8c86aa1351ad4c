"""vLLM's scheduler and engine with the connector, for tests."""
