"""Agents on simulated GPUs: vLLM's own scheduler and the connector, on a virtual clock."""
