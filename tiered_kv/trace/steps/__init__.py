"""Steps in the trace: the engine's load, and orders in flight. See docs/trace.md."""
