"""Copies on a CUDA device."""
