"""Checks of environment variables: the settings of tiered-kv, and PYTHONHASHSEED, which affects
block hashes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields

from tiered_kv.config import ENV_PREFIX, TierConfig, load_config
from tiered_kv.errors import ConfigError
from tiered_kv.remote.address import parse_address

from .finding import Finding, fail, ok, warn

ALIKE = 0.85
"""Minimum similarity at which an unknown name counts as a misspelling of a setting."""

KNOWN = tuple(ENV_PREFIX + field.name.upper() for field in fields(TierConfig))


def read_settings(env: Mapping[str, str]) -> TierConfig:
    """Return the settings without the invalid values; the defaults if the valid values cannot be
    used together.
    """
    good = {name: value for name, value in env.items() if _wrong(name, value) is None}
    try:
        return load_config(good)
    except ConfigError:  # each value is valid, but not all of them together
        return TierConfig()


def check_variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """Check each tiered-kv variable separately, all of them together, and variables with similar
    names. Yields the findings.
    """
    wrong = {name: said for name, value in env.items() if (said := _wrong(name, value))}
    for name, said in sorted(wrong.items()):
        advice = _sentence(said) if name in KNOWN else _meant(name)
        yield fail(name, _shown(name, env[name]) or "empty", advice)
    for name in sorted(env):
        close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=ALIKE)
        if close and not name.startswith(ENV_PREFIX):
            yield warn(name, "tiered-kv does not read this variable", f"Did you mean {close[0]}?")
    if wrong:
        return
    given = sorted(name for name in env if name in KNOWN)
    try:
        load_config(env)
    except ConfigError as error:
        yield fail("settings", ", ".join(given), _sentence(str(error)))
        return
    said = ", ".join(f"{name}={_shown(name, env[name])}" for name in given)
    yield ok("settings", said or "none set: defaults apply")


def check_hash_seed(env: Mapping[str, str], config: TierConfig) -> Finding:
    """Check whether a restarted server finds the pages of its predecessor. Never fails: if pages
    outlive the server, advises when to set PYTHONHASHSEED.

    vLLM seeds its block hashes randomly only with xxhash and without PYTHONHASHSEED
    (``vllm.v1.core.kv_cache_utils.resolve_none_hash_seed``). A server's flags are unknown here.
    """
    name = "PYTHONHASHSEED"
    if (seed := env.get(name)) is not None:
        return ok(name, f"{seed}: only servers with the same seed can find the pages")
    if config.ssd_path is None and config.cpu_path is None and config.remote is None:
        return ok(name, "unset; it matters only for pages that outlive the server")
    return ok(name, "unset; set it if --prefix-caching-hash-algo selects an xxhash algorithm")


def _wrong(name: str, value: str) -> str | None:
    """Return the error in a single tiered-kv variable; None if its value is valid, or for any other
    variable.
    """
    if not name.startswith(ENV_PREFIX):
        return None
    try:
        load_config({name: value})
    except ConfigError as error:
        return str(error)
    return None


def _meant(name: str) -> str:
    """Return advice for an unknown variable, with a similar name if there is one."""
    close = difflib.get_close_matches(name, KNOWN, n=1)
    if close:
        return f"There is no such setting: did you mean {close[0]}?"
    return "There is no such setting: unset it. docs/configuration.md lists all settings."


def _shown(name: str, value: str) -> str:
    """Return the value of a variable in a form that is safe to show, without a password."""
    if name != f"{ENV_PREFIX}REMOTE" or not value:
        return value
    try:
        return str(parse_address(value))
    except ConfigError:
        return "not shown"


def _sentence(said: str) -> str:
    return said[:1].upper() + said[1:] if not said.startswith(ENV_PREFIX) else said
