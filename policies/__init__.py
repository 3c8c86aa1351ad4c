"""Pure decisions: signals in, decision out. No I/O, no torch, no vLLM; time is an argument."""
