"""vLLM's requests, adapted to the interface of the runtime."""
