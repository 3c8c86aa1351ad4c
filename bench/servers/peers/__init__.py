"""Others' offers that run beside vLLM, each from an environment of its own."""
