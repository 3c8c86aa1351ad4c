"""A server that sends arbitrary answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Answer = Callable[[list[bytes]], bytes]
NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"


@contextlib.contextmanager
def hostile_server(answer: Answer, slots: Answer = lambda _: NO_CLUSTER) -> Iterator[str]:
    """Serve one connection at a time. Yields the address.

    Args:
        answer: returns the bytes to send for the words of a command.
        slots: the same for ``CLUSTER SLOTS``; by default the server belongs to no cluster.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    open_now: set[socket.socket] = set()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_now.add(connection)
            with connection, contextlib.suppress(OSError, ValueError):
                stream = connection.makefile("rb")
                while words := _command(stream.readline, stream.read):
                    reply = slots if words[0] == b"CLUSTER" else answer
                    connection.sendall(reply(words))
            open_now.discard(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"valkey://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for one in (listener, *open_now):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def _command(line: Callable[[], bytes], read: Callable[[int], bytes]) -> list[bytes]:
    words = []
    for _ in range(int(line()[1:] or b"0")):
        words.append(read(int(line()[1:])))
        read(2)
    return words


def value(content: bytes) -> bytes:
    """Encode a value in the wire format."""
    return b"$%d\r\n%b\r\n" % (len(content), content)
