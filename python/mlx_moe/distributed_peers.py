"""Lines between rank 0 and the others, beside those of the backend: who is alive says so."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BEAT, DONE, FAILED = b".", b"q", b"!"
LONGEST = 1 << 16  # bytes of a message


class Line:
    """One connection. Sending never blocks and never raises.

    Attributes:
        heard: when the other last said something.
        broken: the connection is gone.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begun = b""
        self.heard = time.monotonic()
        self.broken = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: bytes, text: bytes = b"") -> None:
        """kind is one byte; the text has one line."""
        message = kind + text.replace(b"\n", b" ")[: LONGEST - 2] + b"\n"
        with suppress(OSError):  # a full buffer is of one who does not listen: they go silent
            self._connection.send(message)

    def receive(self, now: float) -> list[tuple[bytes, bytes]]:
        """(kind, text) of what came in."""
        try:
            data = self._connection.recv(LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.broken = not data
        if data:
            self.heard = now
        *messages, self._begun = (self._begun + data).split(b"\n")
        self._begun = self._begun[:LONGEST]
        return [(message[:1], message[1:]) for message in messages]

    def close(self) -> None:
        self._connection.close()


def addresses() -> list[str]:
    """Where this machine may be reached, the likeliest first."""
    found: list[Any] = []
    with suppress(OSError, ValueError, LookupError, TypeError):  # of the ring
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        found += [entry.rpartition(":")[0] for entry in hosts[int(os.environ["MLX_RANK"])]]
    with suppress(LookupError):  # of JACCL: rank 0's
        found.append(os.environ["MLX_JACCL_COORDINATOR"].rpartition(":")[0])
    with suppress(OSError):
        found += [socket.gethostname(), socket.gethostbyname(socket.gethostname())]
    return list(dict.fromkeys(str(host).strip("[]") for host in found if host))


def listen() -> socket.socket:
    return socket.create_server(("", 0))


def meet(
    rank: int, size: int, listener: socket.socket | None, offer: list[Any], seconds: float
) -> dict[int, Line]:
    """Lines to the others on rank 0, to rank 0 elsewhere; those that came about in time.

    offer: rank 0's addresses, its port, and a secret by which it knows the others.
    """
    hosts, port, secret = offer
    if listener is None:
        return _call(rank, hosts, port, secret, seconds)
    lines: dict[int, Line] = {}
    deadline = time.monotonic() + seconds
    with listener:
        while len(lines) < size - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError, ValueError):
                connection, _ = listener.accept()
                connection.settimeout(min(left, 2.0))
                given, _, number = _line_of(connection).partition(" ")
                if given == secret and 0 < int(number) < size:
                    lines[int(number)] = Line(connection)
                else:
                    connection.close()
    return lines


def _call(rank: int, hosts: list[str], port: int, secret: str, seconds: float) -> dict[int, Line]:
    for host in hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=seconds / len(hosts))
            connection.sendall(f"{secret} {rank}\n".encode())
            return {0: Line(connection)}
    return {}


def _line_of(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < 100:
        byte = connection.recv(1)
        if not byte:
            break
        data += byte
    return data.decode(errors="replace").strip()
