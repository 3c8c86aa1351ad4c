"""The connector for vLLM. Import ``connector`` for the class; this package imports nothing."""
