"""Fixtures: a private server, a queue on it, real workers, and the law that nothing is lost.

    server          one private server for the whole run
    start_server    more servers, for a test that breaks them: start_server(append_only=True)
    redis_client    a plain client of `server`, which is empty when the test begins
    queue           worker.Queue on `server`
    handler         handler("def process(msg): ...") writes the taskproc.py that workers will load
    qr_dir, app_dir the folders that workers get as QR_DIR and QR_APP_DIR
    run             run("replay.py", "--list") is a Process of any script of ours
    worker          worker("--burst", QR_BASE=0.05) is a Process of worker.py
    conservation    push through it, and the test fails if a message is lost or in two places

`until`, `children` and `Process` are in processes.py, `Server` is in server.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from processes import PROJECT, Process
from server import Server

if TYPE_CHECKING:
    from worker import Queue

# What the developer has set for a server of their own must not reach a test.
for name in [name for name in os.environ if name == "REDIS_URL" or name.startswith("QR_")]:
    del os.environ[name]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A factory of private servers, each in its own folder, all stopped in the end."""
    started: list[Server] = []

    def start(**settings: Any) -> Server:
        started.append(Server(tmp_path / f"server-{len(started)}", **settings))
        return started[-1].start()

    yield start
    for server in started:
        server.close()


@pytest.fixture
def redis_client(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def queue(server: Server, redis_client: redis.Redis) -> Iterator[Queue]:
    from worker import Queue

    queue = Queue(server.url)
    yield queue
    queue.close()


@pytest.fixture
def qr_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "qr"
    folder.mkdir()
    return folder


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    return folder


@pytest.fixture
def handler(app_dir: Path) -> Callable[[str], Path]:
    """Writes the source of a taskproc.py where workers look first; returns its path."""

    def write(source: str) -> Path:
        path = app_dir / "taskproc.py"
        path.write_text(source)
        return path

    return write


@pytest.fixture
def run(
    request: pytest.FixtureRequest, tmp_path: Path, qr_dir: Path, app_dir: Path
) -> Iterator[Callable[..., Process]]:
    """A factory of processes of our scripts, all ended at the end of the test.

    Upper-case keywords are environment variables; REDIS_URL, QR_DIR and QR_APP_DIR have the values
    of the fixtures unless given; None is a variable that is not set. Where `handler` has written
    none, QR_APP_DIR holds the example handler.
    """
    started: list[Process] = []

    def start(
        script: str | Path, *flags: object, cwd: Path | None = None, **environment: object
    ) -> Process:
        if "REDIS_URL" not in environment:
            environment["REDIS_URL"] = request.getfixturevalue("server").url
        if not (app_dir / "taskproc.py").exists():
            shutil.copy(PROJECT / "taskproc.py", app_dir)
        environment = {"QR_DIR": qr_dir, "QR_APP_DIR": app_dir, **environment}
        started.append(Process([PROJECT / script, *flags], tmp_path / "streams", environment, cwd))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def worker(run: Callable[..., Process]) -> Callable[..., Process]:
    """A factory of real workers: worker("--concurrency", 2, QR_BASE=0.05)."""
    return lambda *flags, **settings: run("worker.py", *flags, **settings)


# --- The ledger -----------------------------------------------------------------------------------
# The place of a message is its state, so a look into every place is the whole truth. The look is
# taken in one MULTI:
# a message that moves meanwhile is seen once, not twice or never.

RESERVED = ("attempts", "first_seen_at", "_retry")


def ledger(queue: Queue, client: redis.Redis) -> dict[str, list[bytes]]:
    """Every message text found, by place; in `dlq` it is the payload's."""
    names = queue.names
    with client.pipeline(transaction=True) as look:
        look.lrange(names.waiting, 0, -1)
        look.lrange(names.next, 0, -1)
        look.hvals(names.running)
        look.zrange(names.retry, 0, -1)
        look.lrange(names.dlq, 0, -1)
        waiting, rung, running, retrying, dead = look.execute()
    return {
        "waiting": waiting,
        "next": rung,
        "running": running,
        "retry": [retrying_text(member) for member in retrying],
        "dlq": [payload_text(envelope) for envelope in dead],
    }


def retrying_text(member: bytes) -> bytes:
    """The message in a member of the retry set: token, colon, message text."""
    return member.partition(b":")[2]


def payload_text(envelope: bytes) -> bytes:
    """The producer's object, or its exact bytes where it was none, out of an envelope."""
    payload = json.loads(envelope)["payload"]
    if isinstance(payload, str):
        return payload.encode("utf-8", "surrogateescape")
    return json.dumps(payload).encode()


def identity(text: bytes) -> str:
    """What never changes about a message: the producer's members, here in one spelling."""
    try:
        message = json.loads(text)
        members = {name: value for name, value in message.items() if name not in RESERVED}
    except (ValueError, AttributeError, RecursionError):  # no object, or 100,000 brackets
        return text.decode("utf-8", "surrogateescape")
    return json.dumps(members, sort_keys=True)


class Conservation:
    """What was pushed, to be compared with what is found."""

    def __init__(self, queue: Queue, client: redis.Redis) -> None:
        self.queue, self.client = queue, client
        self.pushed: Counter[str] = Counter()

    def push(self, *texts: str | bytes) -> None:
        """LPUSHes messages as a producer does, and remembers them."""
        raw = [text.encode() if isinstance(text, str) else text for text in texts]
        self.pushed.update(map(identity, raw))
        self.client.lpush(self.queue.names.waiting, *raw)

    def found(self) -> Counter[str]:
        places = ledger(self.queue, self.client).values()
        return Counter(identity(text) for texts in places for text in texts)

    def done(self) -> int:
        """How many runs were settled as done, by the queue's own count."""
        return int(self.client.hget(self.queue.names.stats, "done") or 0)

    def check(self) -> None:
        """Each pushed message is in exactly one place, or done; AssertionError shows the others."""
        found = self.found()
        twice, gone = found - self.pushed, self.pushed - found
        assert not twice, f"in two places, or never pushed: {twice}"
        assert gone.total() == self.done(), f"{self.done()} done, but {gone.total()} gone: {gone}"


@pytest.fixture
def conservation(queue: Queue, redis_client: redis.Redis) -> Iterator[Conservation]:
    law = Conservation(queue, redis_client)
    yield law
    law.check()
