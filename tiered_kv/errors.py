"""Errors that callers may distinguish. Each message tells what to do, in one sentence."""


class TieredKVError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(TieredKVError, ValueError):
    """An impossible setting; raised at start, never while serving."""


class UnsupportedError(TieredKVError, ValueError):
    """An engine feature the connector does not support; raised at start."""
