"""Parts of this project's tests, shipped so that others can test theirs.

Conformance suites are pytest classes to subclass; a subclass names the class under test, or
makes it, and inherits every test. They are in ``conformance``:

- ``transfer.TransferConformance``: transfer backends, between VRAM and CPU slots.
- ``index.IndexConformance``: the index of pages, under any eviction order.
- ``cold_index.ColdIndexConformance``: the same, when some pages are kept compressed.
- ``store.StoreConformance``: stores of a tier below CPU memory.
- ``codec.CodecConformance``: codecs.
- ``eviction.EvictionConformance``: eviction rules.
- ``policy.PolicyConformance``: policies.

Fakes stand in for what a test does not want or cannot have:

- ``faults.FaultyTransfer``: a transfer backend whose copies fail, or lie, on request.
- ``engine.blocks.Blocks``: an engine's block pool, and ``engine.port.PortPool`` as the connector
  sees it (needs torch).
- ``engine.rig.SecondRig``: a small paged engine with the connector in it (needs torch).
- ``vllm.rig.Rig``: vLLM's real scheduler and the real connector around a model that
  checks its KV (needs vLLM).

The suites need pytest. For readable assertion messages call
``pytest.register_assert_rewrite("tiered_kv.testing")`` in a conftest.py.
"""
