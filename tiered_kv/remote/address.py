"""Address of a remote store, as an operator writes it: ``valkey://[user:password@]host:port,…`` or
``file:///folder?gib=32``.

Rendezvous hashing: the server of a run, the same on every machine that knows the same servers.

A server that comes or goes moves the runs that are its own, and no others. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import xxhash

from tiered_kv.errors import ConfigError

SCHEMES = ("valkey", "valkeys", "file")
"""``valkeys`` is the same with TLS, ``file`` a folder that all machines mount."""
DEFAULT_PORT = 6379
EXAMPLE = "valkey://10.0.0.5:6379"
FOLDER_EXAMPLE = "file:///mnt/shared/kv?gib=100"
DEFAULT_GIB = 32.0
LEAST_GIB = 0.001


@dataclass(frozen=True, slots=True)
class Server:
    """One server of a remote store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """Servers, and how they let us in. Its text has no password.

    Attributes:
        servers: none if it is a folder.
        user: empty for the server's default user.
        password: empty if none is asked for.
        folder: the folder; None if it is servers.
        gib: size of what one rank of one engine keeps in the folder, GiB.
    """

    scheme: str
    servers: tuple[Server, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    folder: Path | None = None
    gib: float = DEFAULT_GIB

    @property
    def most_bytes(self) -> int:
        """Size of what one rank of one engine keeps in the folder, bytes."""
        return int(self.gib * (1 << 30))

    @property
    def tls(self) -> bool:
        """True if connections are encrypted, and the server's certificate is checked."""
        return self.scheme == "valkeys"

    def __str__(self) -> str:
        if self.folder is not None:
            return f"{self.folder.as_uri()}?gib={self.gib:g}"
        return f"{self.scheme}://{','.join(map(str, self.servers))}"

    def with_password(self, password: str) -> RemoteAddress:
        """The same with a password from elsewhere.

        Raises:
            ConfigError: it has one, or is a folder.
        """
        if self.folder is not None:
            raise ConfigError(
                "TIERED_KV_REMOTE is a folder, which takes no password: unset the password."
            )
        if self.password:
            raise ConfigError(
                "TIERED_KV_REMOTE has a password, and so does TIERED_KV_REMOTE_PASSWORD or its "
                "file: remove it from the address, which other users may see."
            )
        return replace(self, password=password)


def parse_address(text: str) -> RemoteAddress:
    """Parse ``scheme://[user[:password]@]host[:port][,host[:port]…]`` or
    ``file:///folder[?gib=size]``.

    Raises:
        ConfigError: it is no such address; the sentence does not quote it, for it may hold a
            password.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ConfigError(
            f"TIERED_KV_REMOTE must start with {', '.join(f'{one}://' for one in SCHEMES)}: "
            f"for example, {EXAMPLE} or {FOLDER_EXAMPLE}."
        )
    if scheme == "file":
        return _folder(text)
    login, at, hosts = rest.rpartition("@")
    user, _, password = login.partition(":")
    servers = tuple(_server(host) for host in hosts.rstrip("/").split(","))
    if len(set(servers)) < len(servers):
        raise ConfigError("TIERED_KV_REMOTE names a server twice: remove one.")
    return RemoteAddress(scheme, servers, unquote(user), unquote(password) if at else "")


def _folder(text: str) -> RemoteAddress:
    try:
        split = urlsplit(text)
    except ValueError:  # odd brackets
        split = urlsplit("")
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    try:
        gib = float(options.pop("gib", DEFAULT_GIB))
    except ValueError:
        gib = math.nan
    folder = Path(unquote(split.path))
    odd = split.netloc or split.fragment or options or "\0" in str(folder)
    if odd or len(folder.parts) < 2:
        raise ConfigError(f"TIERED_KV_REMOTE is not a valid folder: for example, {FOLDER_EXAMPLE}.")
    if not LEAST_GIB <= gib <= 1 << 20:
        raise ConfigError(
            f"TIERED_KV_REMOTE has a size that is not between {LEAST_GIB:g} and 1048576 GiB: "
            f"for example, {FOLDER_EXAMPLE}."
        )
    return RemoteAddress("file", (), folder=folder, gib=gib)


def _server(text: str) -> Server:
    try:
        split = urlsplit(f"//{text.strip()}")
        host, port = split.hostname, split.port
    except ValueError:
        host, port, split = None, None, urlsplit("//")
    if not host or split.path or split.query or split.fragment or port == 0:
        raise ConfigError(
            f"TIERED_KV_REMOTE has a server without a host or with an invalid port: "
            f"for example, {EXAMPLE}; separate several servers with commas."
        )
    return Server(host, port or DEFAULT_PORT)


RUN_PAGES = 128
"""Pages of a run. Were pages placed one by one, a server that is down would cut every context at
about its first page; placed by runs, it cuts one context in so many at its first run."""


def server_of(run: bytes, servers: Sequence[bytes]) -> int:
    """Index of the run's server: the one with the highest hash of both names together."""
    if len(servers) == 1:
        return 0
    return max(range(len(servers)), key=lambda at: xxhash.xxh3_64_intdigest(run + servers[at]))
