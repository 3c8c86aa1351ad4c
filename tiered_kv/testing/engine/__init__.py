"""A small paged engine, which shows that the runtime does not depend on vLLM."""
