"""Requests of vLLM, as the port has them."""
