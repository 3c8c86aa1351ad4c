"""Pure decisions: signals in, decisions out. No I/O, no torch, no vLLM; time is an argument."""
