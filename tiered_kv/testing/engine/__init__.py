"""A small paged engine. It shows that the runtime does not depend on vLLM."""
