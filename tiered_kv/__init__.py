"""tiered-kv: where an agent's KV cache waits while its tool runs.

The core of the project. It imports neither vLLM nor torch, so that the index, the
planner and the policies can be used by simulators and tools on any machine.
"""

__version__ = "0.1.0"
