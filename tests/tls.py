"""A TLS front of a server's unix socket, with a certificate that nobody vouches for.

with Tls(server.socket, tmp_path, "IP:127.0.0.1") as tls:
    tls.url           a rediss:// URL that leads to the server
    tls.certificate   the file that a client has to trust for that
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
from pathlib import Path


class Tls:
    """Listens on a free port of 127.0.0.1; `name` is whom the certificate is for."""

    def __init__(self, target: Path, folder: Path, name: str) -> None:
        self.target = target
        self.certificate, key = folder / "certificate.pem", folder / "key.pem"
        command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"]
        command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=tests"]
        command += ["-addext", f"subjectAltName={name}"]
        command += ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.certificate, key)
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.listener.getsockname()[1]}/0"

    def accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                near, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(near,), daemon=True).start()

    def serve(self, plain: socket.socket) -> None:
        """One thread for both directions: a TLS connection is not made for two."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as far:
            far.connect(str(self.target))
            with self.context.wrap_socket(plain, server_side=True) as near:
                while True:
                    ready = select.select([near, far], [], [])[0]
                    for source, target in ((near, far), (far, near)):
                        if source in ready:
                            data = source.recv(65536)
                            while near.pending() and source is near:
                                data += near.recv(65536)
                            if not data:
                                return
                            target.sendall(data)

    def __enter__(self) -> Tls:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
