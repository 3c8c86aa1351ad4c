"""vLLM's scheduler and engine, run by tests."""
