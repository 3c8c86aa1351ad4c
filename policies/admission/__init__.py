"""Admission control of new jobs, and the order of requests."""
