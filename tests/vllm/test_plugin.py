"""vLLM finds the connector by name."""

from __future__ import annotations

from importlib.metadata import entry_points

from tiered_kv.connectors.vllm import plugin


def test_the_package_registers_as_a_plugin_of_vllm() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="tiered_kv")
    assert found.value == "tiered_kv.connectors.vllm.plugin:register"
    assert found.load() is plugin.register


def test_registering_twice_works_and_makes_the_name_known() -> None:
    """Registering the connector twice does no harm. vLLM loads its plugins in every process, and in
    some processes twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    plugin.register()

    found = KVConnectorFactory.get_connector_class_by_name(plugin.NAME)
    assert found.__name__ == "TieredContinuumConnector"
    assert found.__module__ == plugin.MODULE
