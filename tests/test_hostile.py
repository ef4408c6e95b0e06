"""What a breaker found: handlers, exceptions, signals and servers that mean no harm and do it.

Each test is one thing that stopped a hand, charged a message that had not failed, or lost bytes.
The law is the same in all: the others run, what did not fail is not charged, what fails is dead in
the end with its reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from processes import PROJECT, Process, children, clean_environment, until
from server import Server

from worker import Claim, Message, Queue

QUEUE, DLQ = "q:tasks", "q:tasks:dlq"
BRIEF = {"QR_BASE": 0.01, "QR_CAP": 0.01}


def push(client: redis.Redis, *messages: object) -> None:
    client.lpush(QUEUE, *[json.dumps(message) for message in messages])


def stats(client: redis.Redis) -> dict[str, int]:
    return {name.decode(): int(n) for name, n in client.hgetall(f"{QUEUE}:stats").items()}


def letters(client: redis.Redis) -> list[dict[str, object]]:
    return [json.loads(raw) for raw in client.lrange(DLQ, 0, -1)]


def test_a_message_whose_answer_redis_cuts_is_dead_and_the_others_run(
    start_server: Callable[..., Server],
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    """A limit on answers cuts every read of one message: that message's fault, no outage."""
    server = start_server(options={"client-output-buffer-limit": "normal 200000 0 0"})
    handler("def process(msg):\n    pass\n")
    with server.client() as client:
        push(client, {"n": 1, "text": "x" * 1_000_000}, {"n": 2}, {"n": 3})
        started = worker("--burst", REDIS_URL=server.url, **BRIEF)
        assert started.wait() == 0, started
        assert stats(client)["done"] == 2
        assert client.llen(DLQ) == 1


def test_an_exception_that_hangs_when_it_is_asked_is_ended_by_the_hard_limit(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
import time

class Slow(Exception):
    def __str__(self):
        time.sleep(600)

def process(msg):
    if msg["kind"] == "slow":
        raise Slow
""")
    push(redis_client, {"kind": "slow"}, {"kind": "ok"})
    flags = ("--burst", "--time-limit", 0.3, "--grace", 0.3, "--max-attempts", 2)
    started = worker(*flags, **BRIEF)
    assert started.wait() == 0, started
    [letter] = letters(redis_client)
    assert letter["reason"] == "timed_out"
    assert stats(redis_client)["done"] == 1


def test_a_handler_that_closes_the_event_loop_closes_it_for_nobody_else(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
import asyncio

async def work():
    await asyncio.sleep(0)

def process(msg):
    if msg["n"] == 2:
        loop = asyncio.get_event_loop()
        loop.run_until_complete(work())
        loop.close()
        return None
    return work()
""")
    push(redis_client, *[{"n": n} for n in range(1, 6)])
    assert worker("--burst", **BRIEF).wait() == 0
    assert stats(redis_client) == {"done": 5}


def test_what_an_earlier_run_does_to_the_event_loop_is_not_charged_to_the_one_that_runs(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
import asyncio

async def process(msg):
    if msg["n"] == 1:
        asyncio.get_running_loop().call_later(0.1, asyncio.get_running_loop().stop)
    else:
        await asyncio.sleep(0.3)
        print("ran", msg["n"])
""")
    push(redis_client, {"n": 1}, {"n": 2})
    started = worker("--burst", **BRIEF)
    assert started.wait() == 0
    assert stats(redis_client) == {"done": 2}
    assert started.out.count("ran 2") == 1
    assert "stopped the event loop" in started.err


def test_a_handler_that_wants_to_die_of_a_broken_pipe_does_not_die_of_ours(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
import signal, time, pathlib

def process(msg):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("runs", flush=True)
    time.sleep(0.5)
""")
    push(redis_client, {"n": 1})
    started = worker("--burst", **BRIEF)
    until(lambda: "runs" in started.out, saw=lambda: started)
    redis_client.client_kill_filter(_type="normal", skipme=True)
    assert started.wait() == 0
    assert stats(redis_client) == {"done": 1}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_the_foreman_ignores_does_not_kill_a_hand(
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    number: signal.Signals,
) -> None:
    handler("""
import time

def process(msg):
    print("runs", flush=True)
    time.sleep(0.5)
""")
    push(redis_client, {"n": 1})
    started = worker("--burst", **BRIEF)
    until(lambda: "runs" in started.out, saw=lambda: started)
    for pid in (started.pid, *children(started.pid)):
        os.kill(pid, number)
    assert started.wait() == 0
    assert stats(redis_client) == {"done": 1}


def test_an_exception_whose_class_lies_about_itself_is_a_failure_like_any_other(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
import time

class Meta(type):
    __name__ = property(lambda cls: 1 / 0)

class Lying(Exception, metaclass=Meta):
    pass

class NoTrace(Exception):
    __traceback__ = property(lambda self: 1 / 0)

def process(msg):
    if msg["n"] == 1:
        raise Lying
    try:
        time.sleep(600)
    finally:
        raise NoTrace
""")
    push(redis_client, {"n": 1}, {"n": 2})
    started = worker("--burst", "--time-limit", 0.3, "--max-attempts", 2, **BRIEF)
    assert started.wait() == 0
    assert sorted(str(x["payload"]) for x in letters(redis_client)) == ["{'n': 1}", "{'n': 2}"]
    assert "Traceback" not in started.err
    assert "fallen" not in stats(redis_client)


def test_where_the_working_directory_is_gone_an_error_still_has_its_place(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
import os, tempfile

def process(msg):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    exec("raise KeyError('boom')")
""")
    push(redis_client, {"n": 1})
    assert worker("--burst", "--max-attempts", 1, **BRIEF).wait() == 0
    [letter] = letters(redis_client)
    assert letter["error"] == "KeyError: 'boom' (taskproc.py:7 in process)"
    assert "taskproc.py" in str(letter["traceback"])


def test_a_log_line_is_json_whatever_the_kind_is(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("def process(msg):\n    raise ValueError('no')\n")
    redis_client.lpush(QUEUE, '{"kind": NaN}', '{"kind": ["\\u2028", {}]}', '{"kind": 7}')
    started = worker("--burst", "--log", "json", "--max-attempts", 2, **BRIEF)
    assert started.wait() == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [*started.out.splitlines(), *started.err.splitlines()]
    events = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [event["event"] for event in events].count("dead") == 3
    assert all("at" in event for event in events)


def test_a_worker_that_was_started_with_its_signals_blocked_can_be_stopped(
    server: Server, redis_client: redis.Redis, tmp_path: Path, qr_dir: Path
) -> None:
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM}
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, PROJECT / "worker.py"],
            env=clean_environment({"REDIS_URL": server.url, "QR_DIR": qr_dir}),
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked),
        )
    try:
        until(lambda: children(process.pid), saw=log.read_text)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_a_checkpoint_may_be_repeated_and_settled_by_one_who_does_not_know_it(
    redis_client: redis.Redis, queue: Queue
) -> None:
    """Its answer may be lost, or the time limit may strike before it comes."""
    push(redis_client, {"kind": "x", "n": 1})
    [reply] = queue.do(queue.claim("me", 30))
    run = Claim.of(reply, "me").run
    assert run is not None
    message = Message.parse(run.raw)
    first = queue.checkpoint(run, 30, message.noted(0, None, {"stage": "a" * 50}))
    later = queue.checkpoint(run, 30, message.noted(0, None, {"stage": "b"}))
    for step in (first, first, later, later, first):
        assert queue.do(step) == [b"ok"]
    text = redis_client.hget(f"{QUEUE}:running", str(run.token))
    assert text == b'{"kind": "x", "n": 1, "attempts": 0, "_retry": {"stage": "%b"}}' % (b"a" * 50)
    queue.do(queue.retry(run, 0, message.noted(1, None, {})))
    [member] = redis_client.zrange(f"{QUEUE}:retry", 0, -1)
    assert member == b'%d:{"kind": "x", "n": 1, "attempts": 1}' % run.token


def test_threads_of_a_handler_may_make_checkpoints_at_once(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    handler("""
from concurrent.futures import ThreadPoolExecutor

def process(msg, run):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run.checkpoint, ["x" * (1000 * n) for n in range(40)]))
    if run.attempts == 0:
        raise ValueError("again")
""")
    push(redis_client, *[{"n": n} for n in range(3)])
    started = worker("--burst", **BRIEF)
    assert started.wait() == 0, started
    assert stats(redis_client) == {"retried": 3, "done": 3}


def test_a_reader_that_has_stopped_costs_lines_and_no_message(
    server: Server,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    qr_dir: Path,
    app_dir: Path,
) -> None:
    """A pipe with a little room left: a longer line must not wait for the rest of it."""
    handler("def process(msg):\n    raise ValueError('\U0001f600' * 500)\n")
    push(redis_client, *[{"n": n} for n in range(30)])
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, PROJECT / "worker.py", "--burst", "--log", "json", "--base", "0.01"],
            env=clean_environment(
                {"REDIS_URL": server.url, "QR_DIR": qr_dir, "QR_APP_DIR": app_dir}
            ),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
        )
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(read)
        os.close(write)
    assert redis_client.llen(DLQ) == 30


def test_who_adopts_a_run_gives_its_owner_time_to_take_it_back(
    redis_client: redis.Redis, handler: Callable[[str], Path], worker: Callable[..., Process]
) -> None:
    """Whatever the lease of the one who finds it: its owner renews every ten seconds at least."""
    handler("import time\ndef process(msg):\n    time.sleep(600)\n")
    push(redis_client, {"n": 1})
    owner = worker("--lease", 60)
    until(lambda: redis_client.hlen(f"{QUEUE}:running"), saw=lambda: owner)
    redis_client.delete(f"{QUEUE}:leases")
    finder = worker("--lease", 1)
    until(lambda: redis_client.zcard(f"{QUEUE}:leases"), saw=lambda: finder)
    seconds, micros = redis_client.time()
    [(_, deadline)] = redis_client.zrange(f"{QUEUE}:leases", 0, -1, withscores=True)
    assert deadline > (seconds + micros / 1e6 + 20) * 1000
