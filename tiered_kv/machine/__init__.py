"""The machine that a process runs on: the cores and the memory that it may use."""
