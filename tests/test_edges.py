"""One message, one server, one setting that must not stop the rest.

Each was found on a worker that could not be broken in the middle: messages that kill whoever reads
them or that Redis cannot take back, slow and cut lines, clocks that jump, names that two machines
share, settings with a slip of the pen. What a handler leaves behind is in test_edges_handler.py.
"""

from __future__ import annotations

import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import PROJECT, Process, until
from proxy import Proxy
from server import Server
from slowline import SlowLine
from tls import Tls

from worker import Message, Undecodable, revive

if TYPE_CHECKING:
    from stage import Stage

pytest_plugins = ("stage",)
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux has it, and no other")

ENDINGS = """
def process(msg):
    mark(msg["kind"])
    if msg["kind"] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if msg["kind"] == "fails":
        raise ValueError("as asked")
    if msg["kind"] == "gate":
        gate()
"""
GOOD = [{"kind": "good", "id": i} for i in range(3)]


def own(raw: bytes) -> bytes:
    """The producer's own text in a message: every byte of it, and not our bookkeeping."""
    try:
        return Message.parse(raw).own
    except Undecodable:
        return raw


def holds(stage: Stage, raw: bytes) -> bool:
    """Tells whether the one dead letter holds the message's exact bytes: what replay puts back."""
    [envelope] = stage.client.lrange(stage.names.dlq, 0, -1)
    return own(revive(envelope)) == own(raw)


# --- A message that stops everything ---------------------------------------------------------


# A worker that, with its hands, gets 64 MB of address space more than it has after its imports.
NARROW = f"""
import os, resource, sys
sys.path.insert(0, {str(PROJECT)!r})
import worker
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
os._exit(worker.main())
"""


@linux
def test_a_message_too_large_to_be_parsed_is_dead_after_its_attempts_and_others_flow(
    stage: Stage, tmp_path: Path
) -> None:
    """A parsed text may be twenty times its size: each hand that reads it runs out of memory.

    Nobody else does. Nobody has read it when it is buried, and its bytes are all there.
    """
    (tmp_path / "narrow.py").write_text(NARROW)
    stage.plays(ENDINGS)
    raw = b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"
    stage.push(raw, *GOOD)
    stage.drain("--max-attempts", 2, script=tmp_path / "narrow.py")
    [letter] = stage.letters()
    assert (letter["reason"], letter["attempts"]) == ("worker_died", 2)
    assert holds(stage, raw)
    assert len(stage.marks("good")) == 3


READER = """
import __main__
load = __main__.load

def killed(raw):  # as the kernel does when memory runs out
    if b"poison" in raw:
        mark("read")
        os.kill(os.getpid(), signal.SIGKILL)
    return load(raw)

__main__.load = killed
"""


@pytest.mark.parametrize("attempts", [1, 5])
def test_a_message_that_kills_whoever_reads_it_is_dead_after_its_attempts(
    stage: Stage, attempts: int
) -> None:
    """Even if the foreman, or anybody else who is not a hand, were to read it: nobody else does.

    With one attempt there are two, since the first may have been its run's fault.
    """
    stage.plays(READER + ENDINGS)
    raw = b'{"poison": "\xc3\xa9\\u0000\\ud800", "n": 1e400}'
    stage.push(raw, *GOOD)
    process = stage.drain("--max-attempts", attempts)
    [letter] = stage.letters()
    assert letter["reason"] == "worker_died"
    assert attempts <= letter["attempts"] <= max(attempts, 2)
    assert len(stage.marks("read")) == max(attempts, 2)
    assert holds(stage, raw)
    assert len(stage.marks("good")) == 3
    assert "SIGKILL" in letter["error"] and "Traceback" not in process.err


# --- A message that Redis cannot take back ------------------------------------------------------

LIMIT = 1_048_576  # bytes that Redis takes in one piece here, `proto-max-bulk-len`


def padded(before: bytes, after: bytes, size: int = LIMIT - 100) -> bytes:
    return before + b"x" * (size - len(before) - len(after)) + after


LARGE = {  # name: the message, and the reason of its death
    "not UTF-8": (b"\xff" * 200_000, "undecodable"),  # six times as large in JSON
    "not UTF-8, just under what is sent": (b"\xff" * 99_999, "undecodable"),
    "control characters": (b"\x01" * 300_000, "undecodable"),
    "brackets": (b"[" * (LIMIT - 100), "undecodable"),
    "a list": (padded(b'["', b'"]'), "undecodable"),
    "half of one": (padded(b'{"a": "', b""), "undecodable"),
    "fails": (padded(b'{"kind": "fails", "a": "', b'"}'), "exhausted"),
    "dies": (padded(b'{"kind": "dies", "a": "', b'"}'), "worker_died"),
    "fails, no strict JSON": (padded(b'{"kind": "fails", "n": NaN, "a": "', b'"}'), "exhausted"),
    "fails, our name in front": (
        padded(b'{"attempts": 0, "kind": "fails", "a": "', b'"}'),
        "exhausted",
    ),
    "fails, our name twice": (
        padded(b'{"attempts": "x", "kind": "fails", "a": "', b'", "attempts": 0}'),
        "exhausted",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_message_hardly_below_what_redis_takes_ends_dead_and_the_good_ones_run(
    stage_on: Callable[..., Stage], name: str
) -> None:
    """What is added to it makes it too large to be sent; so nothing of it is sent."""
    stage = stage_on(options={"proto-max-bulk-len": str(LIMIT)})
    stage.plays(ENDINGS)
    raw, reason = LARGE[name]
    stage.push(raw, *GOOD)
    process = stage.drain("--max-attempts", 2)
    [letter] = stage.letters()
    assert letter["reason"] == reason
    assert letter["attempts"] == (0 if reason == "undecodable" else 2)
    assert stage.marks("good") == ["good"] * 3
    assert stage.counts() == {"dlq": 1}
    assert "does not answer" not in process.err
    assert holds(stage, raw)


LARGE_WORDS = {
    "a follow-up": "run.push({'a': 'x' * 1_100_000})",
    "a checkpoint": "run.checkpoint('x' * 1_100_000)",
    "many follow-ups": "for i in range(3): run.push({'a': 'x' * (500_000 + i * 400_000)})",
}


@pytest.mark.parametrize("name", LARGE_WORDS)
def test_what_a_handler_says_may_be_too_large_for_redis_and_is_its_own_failure(
    stage_on: Callable[..., Stage], name: str
) -> None:
    """The run has failed and nothing of it has happened; the others go on."""
    stage = stage_on(options={"proto-max-bulk-len": str(LIMIT)})
    stage.plays(f"""
def process(msg, run):
    mark(msg["kind"])
    if msg["kind"] == "large":
        {LARGE_WORDS[name]}
""")
    stage.push({"kind": "large"}, *GOOD)
    stage.drain("--max-attempts", 2)
    [letter] = stage.letters()
    assert (letter["attempts"], letter["reason"]) == (2, "exhausted")
    assert letter["error"].startswith("TooLarge: ")
    assert len(stage.marks("large")) == 2 and len(stage.marks("good")) == 3


# --- Lines that are slow, or cut ----------------------------------------------------------------


def test_a_large_message_that_kills_its_hand_on_a_slow_line_holds_up_no_other(
    stage: Stage,
) -> None:
    """Its text travels once for its run and once for its charge, and never back.

    Meanwhile others that kill their hand as well are charged and buried.
    """
    stage.plays(ENDINGS)
    size = 600_000
    stage.push({"kind": "dies", "a": "x" * size})
    stage.push(*({"kind": "dies", "id": i} for i in range(3)))
    with SlowLine(stage.server.socket, 1_000_000) as line:
        flags = ("--max-attempts", 1, "--concurrency", 2, "--lease", 1)
        stage.drain(*flags, REDIS_URL=line.url)
        assert line.sent < size / 4
        assert line.received < 2 * size + size / 4
    *small, large = stage.letters()
    assert len(large["payload"]["a"]) == size
    assert [letter["attempts"] for letter in [*small, large]] == [1] * 4
    assert [letter["reason"] for letter in [*small, large]] == ["worker_died"] * 4
    assert stage.marks() == ["dies"] * 4


def test_a_message_that_takes_longer_than_its_lease_to_arrive_runs_once(stage: Stage) -> None:
    """Nobody takes over what a hand is still receiving, and its foreman knows that it is."""
    stage.plays(ENDINGS)
    stage.push({"kind": "gate"})
    other = stage.start("--lease", 1)  # its hand is busy, its foreman takes over what it can
    stage.marked("gate", other)
    stage.client.zadd(stage.names.leases, {"1 nobody": 1})
    until(lambda: not stage.client.zscore(stage.names.leases, "1 nobody"), saw=lambda: other)
    stage.push({"kind": "fails", "a": "x" * 1_000_000})
    with SlowLine(stage.server.socket, 400_000) as line:
        process = stage.start("--lease", 1, "--max-attempts", 1, REDIS_URL=line.url)
        until(lambda: "dlq" in stage.counts(), saw=lambda: (stage.counts(), process, other))
        assert line.received > 1_000_000
        assert process.stop() == 0, process
    stage.open_gate()
    assert other.stop() == 0
    assert stage.marks() == ["gate", "fails"]
    assert stage.stats() == {"done": 1, "dead": 1}


def test_redis_sends_next_to_nothing_when_all_connections_are_cut(stage: Stage) -> None:
    """Thirty large messages run; each hand finds its own again, and none reads them for that."""
    stage.plays(ENDINGS)
    size = 200_000
    stage.push(*({"kind": "gate", "id": i, "a": "x" * size} for i in range(30)))
    process = stage.start("--concurrency", 30)
    stage.marked("gate", process, count=30)
    before = stage.sent()
    stage.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    stage.open_gate()
    until(lambda: stage.stats()["done"] == 30, saw=lambda: process)
    assert stage.sent() - before < size
    assert process.stop() == 0
    assert len(stage.marks()) == 30 and stage.stats() == {"done": 30}


# --- Whose turn it is ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dies", "fails"])
def test_a_fresh_message_runs_after_a_few_of_a_hundred_retries_due_before_it(
    stage: Stage, kind: str
) -> None:
    """Whatever decides the turn survives the death of the hand."""
    stage.plays(ENDINGS)
    stage.push(*({"kind": kind, "id": i} for i in range(100)))
    for _ in range(100):  # each a retry that is due
        stage.queue.do(stage.queue.claim("nobody", 60))
    leases = [lease.decode() for lease in stage.client.zrange(stage.names.leases, 0, -1)]
    stage.queue.do(stage.queue.fall("released", "", *leases))
    assert stage.counts() == {"retry": 100}
    stage.push({"kind": "good"})
    process = stage.start()
    stage.marked("good", process)
    assert process.stop() == 0
    assert stage.marks().index("good") <= 3


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGQUIT"])
def test_a_message_that_stops_its_own_worker_does_not_keep_the_others_from_running(
    stage: Stage, number: str
) -> None:
    """It was released uncharged, to the front of the line; the next time it waits."""
    stage.plays(f"""
def process(msg):
    mark(msg["kind"])
    if msg["kind"] == "stops":
        os.kill(os.getppid(), signal.{number})
        time.sleep(600)
""")
    stage.push({"kind": "stops"}, *GOOD[:2])

    def ended_or_all_done(process: Process) -> bool:
        return not process.running() or len(stage.marks("good")) == 2

    for _ in range(10):  # as a supervisor does
        process = stage.start("--grace", 0.1)
        until(partial(ended_or_all_done, process), saw=stage.marks)
        assert process.stop() == 0, process
        if len(stage.marks("good")) == 2:
            break
    assert len(stage.marks("good")) == 2
    assert len(stage.marks("stops")) > 1
    assert stage.stats()["released"] == len(stage.marks("stops"))
    assert set(stage.stats()) == {"released", "done"}


def test_a_message_that_kills_its_foreman_is_charged_and_dead_after_its_attempts(
    stage: Stage,
) -> None:
    """Its hand dies with the foreman; whoever finds the ended lease notes a failed run."""
    stage.plays("""
def process(msg):
    mark(msg["kind"])
    if msg["kind"] == "kills":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
""")
    stage.push({"kind": "kills"}, *GOOD)
    foremen = [stage.start("--burst", "--lease", 1, "--max-attempts", 2) for _ in range(3)]
    assert sorted(process.wait() for process in foremen) == [-signal.SIGKILL] * 2 + [0]
    assert len(stage.marks("kills")) == 2 and len(stage.marks("good")) == 3
    [letter] = stage.letters()
    assert (letter["reason"], letter["attempts"]) == ("worker_died", 2)


# --- The server's clock -------------------------------------------------------------------------


class Clock:
    """A server whose wall clock `step` moves."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self.file = folder / "clock"
        self.file.write_bytes(bytes(8))
        self.server = Server(folder / "clocked")
        wrapper = folder / "clocked-server"
        wrapper.write_text(
            f"#!/bin/sh\nCLOCK='{self.file}' LD_PRELOAD='{shim}' exec {self.server.binary} \"$@\"\n"
        )
        wrapper.chmod(0o755)
        self.server.binary = str(wrapper)

    def step(self, seconds: int) -> None:
        with self.file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[Clock]:
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("a server's clock can be moved on Linux, and with a C compiler")
    shim = tmp_path / "clock.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(shim)]
    subprocess.run([*command, str(PROJECT / "tests/clock.c")], check=True)
    clock = Clock(tmp_path, shim)
    with clock.server:
        yield clock


@pytest.mark.parametrize("seconds", [120, -120])
def test_a_step_of_the_servers_clock_takes_no_run_from_a_living_worker(
    clock: Clock, stage_on: Callable[..., Stage], seconds: int
) -> None:
    """Forward, and all leases have ended at once; back, and none ends. It is like an outage."""
    clock.step(3600)  # a server that has just started is not expected to know who lives
    stage = stage_on(clock.server)
    stage.plays(ENDINGS)
    stage.push(*({"kind": "gate", "id": i} for i in range(2)))
    workers = [stage.start("--lease", 2) for _ in range(2)]
    stage.marked("gate", workers, count=2)

    def good_leases() -> bool:
        ends = [end for _, end in stage.client.zrange(stage.names.leases, 0, -1, False, True)]
        now_ms = stage.queue.now_ms()
        return len(ends) == 2 and all(0 < end - now_ms <= 2000 for end in ends)

    meant = stage.queue.now_ms() + 1000 * seconds
    clock.step(3600 + seconds)
    until(lambda: abs(stage.queue.now_ms() - meant) < 30_000)
    # Both have renewed by the new clock, twice.
    for _ in range(2):
        until(good_leases, saw=lambda: (stage.stats(), workers))
        time.sleep(0.7)  # a third of a lease
    stage.open_gate()
    until(lambda: stage.stats()["done"] == 2, saw=lambda: (stage.stats(), workers))
    assert [process.stop() for process in workers] == [0, 0]
    assert stage.stats() == {"done": 2} and len(stage.marks()) == 2


# --- What somebody else has written into our keys -----------------------------------------------

STRANGE = [
    (b"1700000000000001 \xff\xfe\x00owner", b"1700000000000001"),
    (b"1700000000000001 two words\n", b"1700000000000001"),
    (b"1700000000000001 \xf0\x9f\x92\xa9", b"1700000000000001"),
    (b"1700000000000001 ", b"1700000000000001"),
    (b"\xff owner", b"\xff"),
    (b"-1 owner", b"-1"),
    (b"9" * 400 + b" owner", b"9" * 400),
    (b" owner", b""),
    (b"no-owner", b"no-owner"),
    (b"\xff\xfe", b"\xff\xfe"),
    (b"", b""),
]


@pytest.mark.parametrize(("lease", "token"), STRANGE)
def test_no_foreman_dies_of_an_owner_or_a_token_that_nobody_can_read(
    stage: Stage, lease: bytes, token: bytes
) -> None:
    """The message of an ended lease falls and runs, or is a dead letter; it is somewhere."""
    stage.plays(ENDINGS)
    stage.push(b'{"kind": "good"}')
    stage.client.delete(stage.names.waiting)
    stage.client.hset(stage.names.running, token, b'{"kind": "good"}')
    stage.client.zadd(stage.names.leases, {lease: 1})
    stage.push({"kind": "good", "id": 1})
    process = stage.start("--burst", "--lease", 1)

    def ended() -> bool:
        for lease in stage.client.zrange(stage.names.leases, 0, -1):
            if lease.endswith(b" -"):  # adopted: let its time be over
                stage.client.zadd(stage.names.leases, {lease: 1}, xx=True)
        return not process.running()

    until(ended, saw=lambda: process)
    assert process.wait() == 0
    assert "Traceback" not in process.err and " died" not in process.err
    assert stage.stats()["done"] + stage.stats()["dead"] == 2
    assert stage.counts().keys() <= {"dlq"} and not stage.client.exists(stage.names.leases)
    for envelope in stage.client.lrange(stage.names.dlq, 0, -1):
        assert revive(envelope).endswith(b'{"kind": "good"}')  # a part of the token is before it
    stage.law.pushed.clear()
    stage.client.flushall()


@pytest.mark.parametrize("note", [b"\xff\xfe", b"", b"\n\n", b"1 2", b"x" * 100_000, b"9" * 99])
def test_a_note_that_nobody_can_read_costs_no_attempt(stage: Stage, note: bytes) -> None:
    stage.plays(ENDINGS)
    stage.push(b'{"kind": "good"}')
    stage.client.delete(stage.names.waiting)
    stage.client.zadd(stage.names.retry, {b'1700000000000001:{"kind": "good"}': 1})
    stage.client.hset(stage.names.notes, "1700000000000001", note)
    stage.drain()
    assert stage.stats() == {"done": 1}
    assert not any(stage.client.hvals(stage.names.notes))  # an empty one is none, and may stay


# --- Two machines with one name -----------------------------------------------------------------


def test_a_worker_leaves_alone_the_signs_of_life_of_another_container(stage: Stage) -> None:
    """Containers may share a host name; a number that is no process here is one there."""
    stage.plays(ENDINGS)
    mine = stage.start("--lease", 1)
    mine_name = until(lambda: stage.client.zrange(stage.names.workers, 0, 0))[0].decode()
    host, _, loop = mine_name.split(":")[0], *mine_name.rpartition("/")[1:]
    other = f"{host}:4000001:0123456789abcdef/{loop}"
    now_ms = stage.queue.now_ms()
    stage.client.zadd(stage.names.workers, {other: now_ms})
    second = stage.start("--lease", 1)
    for process in (mine, second):  # and a message each, and the way out
        stage.says(process, "worker: handler ")
    stage.push(*GOOD)
    until(lambda: stage.stats()["done"] == 3)
    assert mine.stop() == 0 and second.stop() == 0
    assert stage.client.zrange(stage.names.workers, 0, -1, withscores=True) == [
        (other.encode(), now_ms)
    ]


def test_two_containers_with_one_host_name_are_two_healthy_workers(
    stage: Stage, container: Path
) -> None:
    """Host name and process numbers are equal, and still each is its own."""
    stage.plays(ENDINGS)
    stage.push(*({"kind": "gate", "id": i} for i in range(2)))
    pair = [stage.start("--lease", 1, script=container) for _ in range(2)]
    stage.marked("gate", pair, count=2)
    names = stage.client.zrange(stage.names.workers, 0, -1)
    assert {name.split(b":")[1] for name in names} == {b"1"}

    def healthy() -> bool:
        health = stage.start("--health", script="replay.py")
        health.wait()
        return health.out == "healthy: workers 2, messages 2\n"

    until(healthy, saw=lambda: pair)
    stage.open_gate()
    until(lambda: stage.stats()["done"] == 2, saw=lambda: pair)
    assert stage.stats() == {"done": 2} and len(stage.marks()) == 2


# --- Settings -----------------------------------------------------------------------------------

PARAMETERS = {
    "protocol 3": "protocol=3",
    "many": "protocol=2&decode_responses=True&socket_timeout=1&client_name=me&max_connections=3"
    "&health_check_interval=1&retry_on_timeout=True&socket_connect_timeout=3&socket_keepalive=no",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_redis_py_takes_in_a_url_works_here(stage: Stage, name: str) -> None:
    stage.plays(ENDINGS)
    stage.push({"kind": "fails"}, {"kind": "good"})
    with Proxy(stage.server.socket) as proxy:
        url = f"{proxy.url}?{PARAMETERS[name]}"
        stage.drain("--max-attempts", 1, REDIS_URL=url)
        replay = stage.start(script="replay.py", REDIS_URL=url)
        assert replay.wait() == 0, replay
    assert stage.counts() == {"waiting": 1}
    assert stage.stats() == {"done": 1, "dead": 1, "replayed": 1}


@pytest.mark.parametrize("script", ["worker.py", "replay.py"])
def test_what_redis_py_does_not_take_in_a_url_is_named(
    run: Callable[..., Process], script: str
) -> None:
    """The true reason, not only that a URL is needed. Without a password, nothing has to be hid."""
    for parameter in ("protocl=3", "socket_timeout=x"):
        process = run(script, REDIS_URL=f"redis://127.0.0.1:1/0?{parameter}")
        assert process.wait() == 2
        assert "Traceback" not in process.err
        assert parameter.partition("=")[0] in process.err


@pytest.mark.parametrize("script", ["worker.py", "replay.py"])
def test_two_dashes_for_a_value_are_a_clear_error(run: Callable[..., Process], script: str) -> None:
    """Exit code 2, and the option is named; argparse alone answers with a traceback."""
    flags = ["--queue", *(["--base"] if script == "worker.py" else ["--limit", "--restore"])]
    for flag, process in [(flag, run(script, f"{flag}=--")) for flag in flags]:
        assert process.wait() == 2
        assert "Traceback" not in process.err
        assert process.err.splitlines()[-1].startswith(f"{script}: error: {flag} '--'")


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
@pytest.mark.parametrize(("name", "trust"), [("IP:127.0.0.1", False), ("DNS:other.example", True)])
def test_a_certificate_that_does_not_verify_needs_a_person(
    stage: Stage, tmp_path: Path, name: str, trust: bool
) -> None:
    """No waiting makes it true: exit code 2, and the reason. Nothing is claimed."""
    stage.plays(ENDINGS)
    stage.push({"kind": "good"})
    with Tls(stage.server.socket, tmp_path, name) as tls:
        trusted = f"?ssl_ca_certs={tls.certificate}&ssl_check_hostname=true"
        url = tls.url + (trusted if trust else "")
        for process in (
            stage.start(REDIS_URL=url),
            stage.start(script="replay.py", REDIS_URL=url),
        ):
            assert process.wait() == 2, process
            assert "certificate verify failed" in process.err
            assert f"127.0.0.1:{tls.listener.getsockname()[1]}" in process.err
            assert len(process.err.splitlines()) == 1
    assert stage.counts() == {"waiting": 1}


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_a_certificate_that_verifies_is_enough(stage: Stage, tmp_path: Path) -> None:
    stage.plays(ENDINGS)
    stage.push({"kind": "good", "a": "x" * 300_000}, {"kind": "fails"})
    with Tls(stage.server.socket, tmp_path, "IP:127.0.0.1") as tls:
        url = f"{tls.url}?ssl_ca_certs={tls.certificate}"
        stage.drain("--max-attempts", 2, REDIS_URL=url)
        assert stage.start(script="replay.py", REDIS_URL=url).wait() == 0
    assert stage.stats() == {"done": 1, "retried": 1, "dead": 1, "replayed": 1}


def test_a_folder_that_was_named_and_holds_no_handler_is_an_error(stage: Stage) -> None:
    """Else the example would say "done" to real messages: exit code 3, nothing claimed."""
    stage.push({"kind": "good"})
    process = stage.start(QR_APP_DIR=stage.folder / "typo")
    assert process.wait() == 3
    [line] = stage.lines(process, "cannot load")
    assert "/typo" in line and "taskproc.py" in line
    assert "done" not in process.out
    assert stage.counts() == {"waiting": 1}


@pytest.mark.parametrize("hands", [1, 2])
def test_the_example_says_at_the_start_that_it_does_nothing(stage: Stage, hands: int) -> None:
    """Once, however many hands there are. A handler of somebody's own is not called so."""
    for source, warnings in (((PROJECT / "taskproc.py").read_text(), 1), (ENDINGS, 0)):
        stage.handler("import os, signal\nmark = print\n" + source)
        stage.push({"kind": "ok"}, {"kind": "ok"}, {"kind": "ok"})
        process = stage.drain("--concurrency", hands)
        assert len(stage.lines(process, "warning: this handler is the example")) == warnings


@pytest.mark.parametrize("script", ["worker.py", "replay.py"])
def test_a_variable_that_looks_like_ours_and_is_none_is_warned_of(
    stage: Stage, script: str
) -> None:
    """By name; those that we know, and those that are nobody's, are not mentioned."""
    stage.plays(ENDINGS)
    flags = ("--burst",) if script == "worker.py" else ()
    process = stage.start(*flags, script=script, QR_BSE=1, QR_CPA=2, QR_CAP=3, QRS=4, REDIS_URI=5)
    assert process.wait() == 0
    [line] = stage.lines(process, "QR_")
    assert "warning" in line and "QR_BSE, QR_CPA" in line
    assert not stage.lines(process, "QR_CAP") and not stage.lines(process, "QRS")
    again = stage.start(*flags, script=script, QR_CAP=3)
    assert again.wait() == 0
    assert not stage.lines(again, "warning: no such")


# --- Clients that are too old -------------------------------------------------------------------

OLD = {  # version: what the package of that version has
    "4.3.3": ("backoff", "retry", "exceptions"),
    "4.0.2": ("backoff", "retry", "exceptions"),
    "3.5.3": ("exceptions",),  # Ubuntu 22.04
    "2.10.6": ("exceptions",),
}


@pytest.mark.parametrize("script", ["worker.py", "replay.py"])
@pytest.mark.parametrize("version", OLD)
def test_a_client_that_is_too_old_is_named_in_one_sentence(
    run: Callable[..., Process], tmp_path: Path, version: str, script: str
) -> None:
    """The version found, and the one that is needed; exit code 2, not a traceback later."""
    package = tmp_path / "old/redis"
    package.mkdir(parents=True)
    source = f"__version__ = {version!r}\nclass RedisError(Exception): pass\n"
    (package / "__init__.py").write_text(source)
    for module in OLD[version]:
        (package / f"{module}.py").write_text("class NoBackoff: pass\nclass Retry: pass\n")
    process = run(script, PYTHONPATH=tmp_path / "old")
    assert process.wait() == 2, process
    [line] = process.err.splitlines()
    assert version in line and "4.3.4" in line and "pip install" in line


def test_backoff_needs_no_client_at_all(run: Callable[..., Process], tmp_path: Path) -> None:
    """The lab's first steps work on a machine without redis-py."""
    (tmp_path / "redis.py").write_text("raise ModuleNotFoundError(name='redis')\n")
    process = run("backoff.py", PYTHONPATH=tmp_path)
    assert process.wait() == 0, process
