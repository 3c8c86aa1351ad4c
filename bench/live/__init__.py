"""Benchmark of running servers: plays agents' sessions over their OpenAI-compatible routes."""
