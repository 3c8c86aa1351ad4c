"""Errors that callers may distinguish. Each message says what to do."""


class TieredKVError(Exception):
    """Base class of every error that this project raises deliberately."""


class ConfigError(TieredKVError, ValueError):
    """An invalid setting; raised at startup, never while serving."""


class UnsupportedError(TieredKVError, ValueError):
    """An engine feature that the connector does not support; raised at startup."""
