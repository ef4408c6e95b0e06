"""A TCP proxy on loopback that can lose what passes through it, as networks do.

with Proxy(server.socket) as proxy:
    proxy.url                   a redis:// URL that leads through the proxy
    proxy.swallow()             a black hole: connections stay open, nothing comes through
    proxy.heal()                new connections work; those that were in the hole stay there
    proxy.lose_every(3)         every third reply is lost, and its connection with it
    proxy.lose_from(b"abc")     every reply is, once a request has had these bytes in it
    proxy.lie(rb"a.c", b"xyz")  replies say xyz instead (of the same length)
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes bytes to and from a unix socket."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.hole = False
        self.every = 0  # of so many replies, the last is lost; 0: none is
        self.last_straw = b""
        self.replies = 0
        self.truth, self.untruth = b"", b""
        self.lock = threading.Lock()
        self.open: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.threads: list[threading.Thread] = []
        self.start(self.accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.listener.getsockname()[1]}/0"

    def swallow(self) -> None:
        self.hole = True

    def heal(self) -> None:
        self.hole = False

    def lose_every(self, count: int) -> None:
        self.every = count

    def lose_from(self, request: bytes) -> None:
        self.last_straw = request

    def lie(self, pattern: bytes, instead: bytes) -> None:
        self.truth, self.untruth = pattern, instead

    def start(self, target: Callable[..., None], *args: object) -> None:
        self.threads.append(threading.Thread(target=target, args=args, daemon=True))
        self.threads[-1].start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                near, _ = self.listener.accept()
                far = socket.socket(socket.AF_UNIX)
                try:
                    far.connect(str(self.target))
                except OSError:  # nobody there: as refused as it can be
                    near.close()
                    far.close()
                    continue
                self.open += [near, far]
                # A connection made in the hole, or being there once, never gets out of it.
                lost = threading.Event()
                for ends in ((near, far, False), (far, near, True)):
                    self.start(self.carry, *ends, lost)

    def carry(
        self, source: socket.socket, target: socket.socket, is_reply: bool, lost: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.hole:
                    lost.set()
                if lost.is_set():
                    continue
                if not is_reply and self.last_straw and self.last_straw in data:
                    self.last_straw, self.every = b"", 1
                if is_reply and self.is_unlucky():
                    break
                if is_reply and self.truth:
                    data = re.sub(self.truth, self.untruth, data)
                target.sendall(data)
        for end in (source, target):
            if not lost.is_set():
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def is_unlucky(self) -> bool:
        with self.lock:
            self.replies += 1
            return self.every > 0 and self.replies % self.every == 0

    def close(self) -> None:
        """Cuts every connection; no thread is left. A shutdown wakes a thread, a close may not."""
        for end in (self.listener, *self.open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()
        for end in self.open:
            end.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
