"""Decisions about KV, computed without I/O, torch or vLLM. Callers pass the time or a clock."""
