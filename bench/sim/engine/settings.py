"""Settings of the connector, as a simulated server has them."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.bench.sim.servers.servers import Server

GIB = 1 << 30
LONGEST_WAIT_S = 86_400.0
"""The most that may be set. No run lasts as long."""


def connector_settings(
    server: Server, folder: Path, *, cpu_bytes: float, ssd_bytes: float, trace: Path | None
) -> dict[str, object] | None:
    """Settings for ``kv_connector_extra_config``; None for a server without the connector.

    Args:
        folder: gets the folder of the SSD tier, if the server has one.
        trace: where the connector writes its trace; None writes none.
    """
    if server.policy is None:
        return None
    said: dict[str, object] = {
        "policy": server.policy,
        "cpu_gib": cpu_bytes / GIB if server.cpu else 0,
    }
    if server.eviction is not None:
        said["eviction"] = server.eviction
    if server.open:
        said["admission"] = "off"
    if server.patient:
        said["admission_max_wait_s"] = LONGEST_WAIT_S
    if server.ssd:
        (folder / "ssd").mkdir(parents=True)
        said |= {"ssd_path": str(folder / "ssd"), "ssd_gib": ssd_bytes / GIB}
    if trace is not None:
        said["trace"] = str(trace)
    return said
