"""Tests of job snapshots in an engine."""
