"""Conformance suites: the tests that every implementation of a contract must pass."""
