"""The demo and the benchmarks, which play agent-like jobs on real servers with a real model."""
