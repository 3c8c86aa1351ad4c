"""Observe mode: everything is decided and traced, and nothing is done."""
