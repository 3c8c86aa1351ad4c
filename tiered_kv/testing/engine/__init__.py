"""A small paged engine of our own: proof that the runtime needs nothing of vLLM."""
