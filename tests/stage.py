"""A queue, workers on it, and what they did: what the tests of the edges look at.

Every handler can note what it did: `mark` appends one line to a file, in the order of the system.
When the test ends, nothing may be lost or in two places.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import Conservation, ledger
from processes import PROJECT, Process, until
from server import Server

from worker import Queue

PRELUDE = """
import os, signal, sys, time

MARKS = os.open(os.environ["QR_DIR"] + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

def mark(*words):
    os.write(MARKS, (" ".join(map(str, words)) + "\\n").encode())

def gate():
    while not os.path.exists(os.environ["QR_DIR"] + "/gate"):
        time.sleep(0.01)
"""


class Stage:
    """`push` messages, `start` workers with the handler that `plays`, and look."""

    def __init__(
        self,
        server: Server,
        run: Callable[..., Process],
        handler: Callable[[str], Path],
        folder: Path,
    ) -> None:
        self.server, self.run, self.handler, self.folder = server, run, handler, folder
        self.client = server.client()
        self.queue = Queue(server.url)
        self.names = self.queue.names
        self.law = Conservation(self.queue, self.client)

    def plays(self, source: str) -> None:
        """Writes the handler; PRELUDE comes before it."""
        self.handler(PRELUDE + source)

    def push(self, *messages: dict[str, Any] | bytes) -> None:
        texts = [json.dumps(m).encode() if isinstance(m, dict) else m for m in messages]
        self.law.push(*texts)

    def start(self, *flags: object, script: str | Path = "worker.py", **more: object) -> Process:
        """A worker (or another script) on this queue; its retries wait for next to nothing."""
        return self.run(script, *flags, **{"REDIS_URL": self.server.url, "QR_BASE": 0.01, **more})

    def drain(self, *flags: object, **more: object) -> Process:
        """A worker that has left because nothing was left to do."""
        process = self.start("--burst", *flags, **more)
        assert process.wait() == 0, process
        return process

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def marks(self, word: str = "") -> list[str]:
        path = self.folder / "marks"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if word in line]

    def marked(self, word: str, process: object = None, count: int = 1) -> list[str]:
        """The marks with this word, once there are so many."""
        until(lambda: len(self.marks(word)) >= count, saw=lambda: (self.marks(), process))
        return self.marks(word)

    def counts(self) -> dict[str, int]:
        """How many messages are where; what is nowhere is left out."""
        places = ledger(self.queue, self.client)
        return {place: len(texts) for place, texts in places.items() if texts}

    def stats(self) -> Counter[str]:
        pairs = self.client.hgetall(self.names.stats)
        return Counter({name.decode(): int(n) for name, n in pairs.items()})

    def letters(self) -> list[dict[str, Any]]:
        """The dead letters, oldest first."""
        return [json.loads(text) for text in reversed(self.client.lrange(self.names.dlq, 0, -1))]

    def sent(self) -> int:
        """Bytes that Redis has sent to everybody so far."""
        return int(self.client.info("stats")["total_net_output_bytes"])

    def says(self, process: Process, text: str) -> str:
        """The first log line with this text, once it is there."""
        until(lambda: text in process.err, saw=lambda: process)
        return self.lines(process, text)[0]

    def lines(self, process: Process, text: str) -> list[str]:
        return [line for line in process.err.splitlines() if text in line]

    def close(self) -> None:
        self.client.close()
        self.queue.close()


@pytest.fixture
def stage_on(
    start_server: Callable[..., Server],
    run: Callable[..., Process],
    handler: Callable[[str], Path],
    qr_dir: Path,
) -> Iterator[Callable[..., Stage]]:
    """A factory: stage_on(append_only=True) is a Stage on a server of its own.

    Or on one that the test has started: stage_on(server).
    """
    made: list[Stage] = []

    def make(server: Server | None = None, **settings: Any) -> Stage:
        made.append(Stage(server or start_server(**settings), run, handler, qr_dir))
        return made[-1]

    yield make
    for each in made:
        each.law.check()
        each.close()


@pytest.fixture
def stage(
    server: Server,
    redis_client: redis.Redis,
    run: Callable[..., Process],
    handler: Callable[[str], Path],
    qr_dir: Path,
) -> Iterator[Stage]:
    """A Stage on the server that all tests share, empty when the test begins."""
    stage = Stage(server, run, handler, qr_dir)
    yield stage
    stage.law.check()
    stage.close()


def namespace() -> list[str]:
    """The command that makes its command PID 1 of a namespace of its own; [] if none may."""
    for flags in ("-pf", "-Urpf"):
        command = ["unshare", flags, "--mount-proc", "--kill-child"]
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "true"], capture_output=True).returncode
        ):
            return command
    return []


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """A script that starts a worker as PID 1."""
    command = namespace()
    if not command:
        pytest.skip("this user may not make a namespace of processes")
    path = tmp_path / "container.py"
    path.write_text(
        "import os, sys\n"
        f"command = {[*command, sys.executable, str(PROJECT / 'worker.py')]!r}\n"
        "os.execvp(command[0], command + sys.argv[1:])\n"
    )
    return path
