"""The connector for vLLM. Its class is in ``connector``; importing this package imports nothing."""
