"""Agents under pressure on models of several KV groups: ours beside stock vLLM."""
