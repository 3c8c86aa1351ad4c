"""vLLM's scheduler and engine, for tests."""
