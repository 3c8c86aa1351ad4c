"""Test suites and fakes, shipped so that other packages can test their own components.

Conformance suites are pytest classes to subclass. A subclass names or creates the class under test
and inherits every test. They are in ``conformance``:

- ``transfer.TransferConformance``: transfer backends, between VRAM and CPU slots.
- ``index.IndexConformance``: the index of pages, under any eviction order.
- ``cold_index.ColdIndexConformance``: the index of pages, with compressed pages.
- ``store.StoreConformance``: stores of a tier below CPU memory.
- ``remote.RemoteConformance``: remote stores.
- ``codec.CodecConformance``: codecs.
- ``eviction.EvictionConformance``: eviction rules.
- ``policy.PolicyConformance``: policies.

Fakes replace components that a test cannot use:

- ``faults.FaultyTransfer``: a transfer backend whose copies fail, or deliver wrong bytes, on
  request.
- ``engine.blocks.Blocks``: an engine's block pool, and ``engine.port.PortPool``: the pool as the
  connector sees it (needs torch).
- ``engine.rig.SecondRig``: a small paged engine with the connector (needs torch).
- ``vllm.rig.Rig``: vLLM's real scheduler and the real connector around a model that checks its KV
  (needs vLLM).

The suites need pytest. For readable assertion messages call
``pytest.register_assert_rewrite("tiered_kv.testing")`` in a conftest.py.
"""
