"""Recorded gaps, and the policy that knows them: the ground of benchmarks of forecasts."""
