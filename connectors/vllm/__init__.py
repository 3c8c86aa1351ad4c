"""The connector for vLLM. Its class is in ``connector``; this package imports nothing."""
