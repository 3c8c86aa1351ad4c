"""Pure decisions: signals in, decision out. No I/O, no torch, no vLLM, no clock but a number."""
