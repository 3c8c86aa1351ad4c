"""What tests of this project are made of, shipped so that others can test their parts.

Conformance suites are pytest classes to subclass; a subclass says how to make the thing
under test, and inherits every test:

- ``transfer.TransferConformance``: what moves pages between VRAM and CPU slots.
- ``index.IndexConformance``: the index of pages, under any eviction order.
- ``eviction.EvictionConformance``: eviction rules.
- ``policy.PolicyConformance``: policies.

Fakes stand in for what a test does not want or cannot have:

- ``faults.FaultyTransfer``: a transfer backend whose copies fail, or lie, on request.
- ``block_pool.FakeBlockPool``: the engine's block pool.
- ``vllm.rig.Rig``: vLLM's real scheduler and the real connector around a model that
  checks its KV (needs vLLM).

The suites need pytest. For readable assertion messages call
``pytest.register_assert_rewrite("tiered_kv.testing")`` in a conftest.py.
"""
