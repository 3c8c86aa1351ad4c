"""The demo, the benchmarks and the simulator."""
