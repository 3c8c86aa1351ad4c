"""Steps in the trace: how full the engine was, and what was under way. See docs/trace.md."""
