"""tiered-kv: keeps an agent's KV cache while its tool runs.

The core of the project. It imports neither vLLM nor torch, so that simulators and tools can use
the index, the order book and the policies on any machine.
"""

__version__ = "0.1.0"
