"""The demo and the benchmarks: real servers, a real model, jobs that behave like agents."""
