"""A TCP proxy like a slow line: both directions carry so many bytes a second, whoever sends them.

with SlowLine(server.socket, 1_000_000) as line:
    line.url         a redis:// URL that leads through the line
    line.received    bytes that have come out of the server
    line.sent        bytes that have gone to it
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

from proxy import Proxy

PIECE = 8192  # bytes; what a small answer waits for behind a large one


class SlowLine(Proxy):
    """Like a real line it is shared: all connections together are as fast as one alone."""

    def __init__(self, target: Path, rate: int) -> None:
        self.rate = rate  # bytes a second
        self.carried = {True: 0, False: 0}
        self.free_at = {True: 0.0, False: 0.0}
        super().__init__(target)

    @property
    def received(self) -> int:
        return self.carried[True]

    @property
    def sent(self) -> int:
        return self.carried[False]

    def carry(
        self, source: socket.socket, target: socket.socket, is_reply: bool, lost: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                time.sleep(self.turn(len(data), is_reply))
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def turn(self, size: int, is_reply: bool) -> float:
        """Seconds until the line has carried so many bytes, after all that it was given before."""
        with self.lock:
            now = time.monotonic()
            self.carried[is_reply] += size
            self.free_at[is_reply] = max(now, self.free_at[is_reply]) + size / self.rate
            return self.free_at[is_reply] - now
