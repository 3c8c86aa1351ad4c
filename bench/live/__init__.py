"""Benchmark of running servers: agents' sessions played over their OpenAI-compatible routes."""
