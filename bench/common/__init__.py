"""Parts that the demo and the benchmarks share: servers, engines, the model, recordings, output."""
