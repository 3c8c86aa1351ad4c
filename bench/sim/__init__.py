"""Agents on simulated GPUs: vLLM's own scheduler and the connector's, on a virtual clock."""
