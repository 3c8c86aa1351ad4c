"""Address of a remote store, in the operator's format: ``valkey://[user:password@]host:port,…`` or
``file:///folder?gib=32``.

The module also has the rendezvous hashing that maps a run (consecutive pages of a context) to the
same server on every machine with the same list of servers. When a server is added or removed, only
the runs of that server move.
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
"""URL schemes. ``valkeys`` is ``valkey`` with TLS. ``file`` is a folder that all machines mount."""
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
    """Servers and their credentials, or a folder. The results of ``str`` and ``repr`` do not
    include the password.

    Attributes:
        servers: the servers, or nodes of a cluster; empty for a folder.
        user: user name; empty for the server's default user.
        password: password; empty if none is required.
        folder: the folder; None for servers.
        gib: maximum size of the data of one rank of one engine in the folder, GiB.
    """

    scheme: str
    servers: tuple[Server, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    folder: Path | None = None
    gib: float = DEFAULT_GIB

    @property
    def most_bytes(self) -> int:
        """Maximum size of the data of one rank of one engine in the folder, bytes."""
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
        """Return the address with a password from another source.

        Raises:
            ConfigError: the address already has a password, or is a folder.
        """
        if self.folder is not None:
            raise ConfigError(
                "TIERED_KV_REMOTE is a folder, which needs no password: unset "
                "TIERED_KV_REMOTE_PASSWORD and TIERED_KV_REMOTE_PASSWORD_FILE."
            )
        if self.password:
            raise ConfigError(
                "The password is set twice: in TIERED_KV_REMOTE, and in TIERED_KV_REMOTE_PASSWORD "
                "or its file. Remove the one in TIERED_KV_REMOTE, which other users may be able to "
                "see."
            )
        return replace(self, password=password)


def parse_address(text: str) -> RemoteAddress:
    """Parse ``scheme://[user[:password]@]host[:port][,host[:port]…]`` or
    ``file:///folder[?gib=size]``.

    Raises:
        ConfigError: the address is invalid. The message does not quote the address, because it may
            contain a password.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ConfigError(
            f"TIERED_KV_REMOTE must start with one of {', '.join(f'{one}://' for one in SCHEMES)}: "
            f"for example, {EXAMPLE} or {FOLDER_EXAMPLE}."
        )
    if scheme == "file":
        return _folder(text)
    login, at, hosts = rest.rpartition("@")
    user, _, password = login.partition(":")
    servers = tuple(_server(host) for host in hosts.rstrip("/").split(","))
    if len(set(servers)) < len(servers):
        raise ConfigError("TIERED_KV_REMOTE lists the same server twice: remove the duplicate.")
    return RemoteAddress(scheme, servers, unquote(user), unquote(password) if at else "")


def _folder(text: str) -> RemoteAddress:
    try:
        split = urlsplit(text)
    except ValueError:  # unbalanced brackets
        split = urlsplit("")
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    try:
        gib = float(options.pop("gib", DEFAULT_GIB))
    except ValueError:
        gib = math.nan
    folder = Path(unquote(split.path))
    odd = split.netloc or split.fragment or options or "\0" in str(folder)
    if odd or len(folder.parts) < 2:
        raise ConfigError(
            f"TIERED_KV_REMOTE is not a valid folder address: write it as {FOLDER_EXAMPLE}."
        )
    if not LEAST_GIB <= gib <= 1 << 20:
        raise ConfigError(
            f"The size in TIERED_KV_REMOTE must be between {LEAST_GIB:g} and 1048576 GiB: "
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
            f"TIERED_KV_REMOTE contains a server without a host, with an invalid port or with a "
            f"path: write it as {EXAMPLE}, and separate several servers with commas."
        )
    return Server(host, port or DEFAULT_PORT)


RUN_PAGES = 128
"""Number of pages of a run. If pages were placed one by one, a server that is down would truncate
every context near its first page. With runs, such a server truncates only those contexts near the
start whose first run is on the server, and truncates other contexts later."""


def server_of(run: bytes, servers: Sequence[bytes]) -> int:
    """Return the index of the server that has the run: the server with the highest hash of the
    names of run and server together."""
    if len(servers) == 1:
        return 0
    return max(range(len(servers)), key=lambda at: xxhash.xxh3_64_intdigest(run + servers[at]))
