"""vLLM's requests, adapted to the port."""
