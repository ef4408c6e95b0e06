#!/usr/bin/env python3
"""What the queue costs, against the barest loop that could do the same, in ratios of one run.

    make bench                     everything, less than three minutes
    BENCH_DEAD=20000 make bench    fewer dead letters for the last table

Machines are noisy, so every figure of ours stands beside another that was taken in turn with it, on
the same private server (unix socket, nothing on disk): mostly one of a bare redis-py program; for
failing runs our own successes. A figure is the median of the rounds, a ratio the median of theirs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import redis
from processes import PROJECT, children, clean_environment, until
from server import Server

sys.path.insert(0, str(PROJECT))
from worker import Queue

ROUNDS = 5
MESSAGES = 6_000  # per round of the busy loop
FAILURES = 2_000  # per round of failing runs
SIZES = {1_000: 1_000, 1_000_000: 60}  # bytes of a message, and how many of them, per round
SIZE_ROUNDS = 5
PUSHES = 150  # of the doorbell, per round
BELL_ROUNDS = 2
KILLS = 10
EXPIRED = 10_000
IDLE_SECONDS = 10
HANDS = 5  # of the larger worker whose memory is compared
DEAD = int(os.environ.get("BENCH_DEAD", "1000000"))

# One script that does what settling one message and claiming the next do together: the least that
# a loop with leases and fencing tokens can ask of Redis.
EQUIVALENT = """
local running, leases, waiting, retry, nextq, fence, stats = unpack(KEYS)
if redis.call('HDEL', running, ARGV[1]) == 1 then
  redis.call('ZREM', leases, ARGV[1] .. ' me')
  redis.call('HINCRBY', stats, 'done', 1)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local from = redis.call('LLEN', nextq) > 0 and nextq or waiting
local text = redis.call('LINDEX', from, -1)
local due = redis.call('ZRANGEBYSCORE', retry, '-inf', now, 'LIMIT', 0, 1)
if not text then return false end
local last = tonumber(redis.call('GET', fence)) or 0
local token = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
redis.call('SET', fence, token)
redis.call('ZADD', leases, now + 30000, token .. ' me')
redis.call('HSET', running, token, text)
redis.call('RPOP', from)
return {token, now, text}
"""
ROLES = (":running", ":leases", "", ":retry", ":next", ":fence", ":stats")
KEYS = ["q:tasks" + role for role in ROLES]

BARE_LISTENER = """
import os, redis, socket, sys, time
bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client = redis.Redis.from_url(os.environ['REDIS_URL'])
script = client.register_script(sys.argv[1])
token = b''
while True:
    client.brpoplpush('q:tasks', 'q:tasks:next', 5)
    token = (script(keys=sys.argv[2:], args=[token]) or [token])[0]
    bell.sendto(b'%d' % time.monotonic_ns(), os.environ['BENCH_BELL'])
"""

HANDLERS = """
import os, socket, time
bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def noop(msg): pass
def fail(msg): raise ValueError("bad message")
def ring(msg): bell.sendto(b"%d" % time.monotonic_ns(), os.environ["BENCH_BELL"])
def tell(msg):
    bell.sendto(b"%d" % os.getpid(), os.environ["BENCH_BELL"])
    time.sleep(60)
"""
LATER = ("--base", "1000", "--cap", "1000")  # what fails does not come back within a round


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="qr-") as folder, Server(Path(folder) / "s") as server:
        bench = Bench(Path(folder), server)
        bench.busy_loop()
        bench.sizes()
        bench.doorbell()
        bench.killed_hand()
        bench.expired()
        bench.idle()
        bench.memory()
        bench.dead_letters()
    return 0


class Pace(NamedTuple):
    """How fast messages went by, and what each asked of Redis."""

    per_second: float
    commands: float  # those inside scripts, and the scripts themselves
    cpu: float  # µs


Worker = subprocess.Popen[bytes]


class Bench:
    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server, self.client = folder, server, server.client()
        (folder / "handlers.py").write_text(HANDLERS)
        self.bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bell.bind(str(folder / "bell"))
        self.bell.settimeout(30)
        self.environment = clean_environment(
            {"REDIS_URL": server.url, "QR_DIR": folder / "none", "BENCH_BELL": folder / "bell"}
        )
        version = self.client.info("server")["redis_version"]
        print(f"server {version}, Python {sys.version.split()[0]}, redis-py {redis.__version__}\n")
        print(f"{'':38}{'ours':>10} {'against':>10} {'ratio':>6}   wanted", flush=True)

    @contextmanager
    def worker(self, handler: str, *flags: object) -> Iterator[Worker]:
        """A real worker with one hand, and this handler; stopped at the end."""
        command = [sys.executable, str(PROJECT / "worker.py"), "--process", f"handlers:{handler}"]
        process = subprocess.Popen(
            [*command, *map(str, flags)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()

    @contextmanager
    def bare_program(self, source: str, *args: str) -> Iterator[Worker]:
        process = subprocess.Popen([sys.executable, "-c", source, *args], env=self.environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    # What is there to do ──────────────────────────────────────────────────────────────────────

    def fill(self, count: int, size: int = 0) -> None:
        """Messages, waiting."""
        self.client.flushall()
        page = 1000 if size < 10_000 else 10
        for i in range(0, count, page):
            texts = [message(n, size) for n in range(i, min(count, i + page))]
            self.client.lpush("q:tasks", *texts)

    def fill_retries(self, count: int, attempts: int, size: int = 0) -> None:
        """Messages that have failed so often, and are due."""
        self.client.flushall()
        page = 1000 if size < 10_000 else 10
        for i in range(0, count, page):
            members = [
                f"{10**15 + n}:{failed(message(n, size), attempts)}"
                for n in range(i, min(count, i + page))
            ]
            self.client.zadd("q:tasks:retry", {member: 1 for member in members})

    def counter(self, name: str) -> int:
        return int(self.client.hget("q:tasks:stats", name) or 0)

    def usage(self) -> tuple[float, float, float]:
        """Now: the time, commands that Redis has executed, µs that it has worked."""
        stats, cpu = self.client.info("commandstats"), self.client.info("cpu")
        calls = sum(stat["calls"] for stat in stats.values())
        return time.perf_counter(), calls, 1e6 * (cpu["used_cpu_sys"] + cpu["used_cpu_user"])

    def pace(self, count: int, before: Sequence[float]) -> Pace:
        seconds, calls, cpu = (a - b for a, b in zip(self.usage(), before, strict=True))
        return Pace(count / seconds, calls / count, cpu / count)

    def bare(self, count: int, size: int = 0) -> Pace:
        """The bare loop: one call of one script for each message, and reading it."""
        self.fill(count, size)
        script, token = self.client.register_script(EQUIVALENT), b""
        script(keys=KEYS, args=[token])
        before = self.usage()
        while reply := script(keys=KEYS, args=[token]):
            token, _, text = reply
            json.loads(text)
        return self.pace(count, before)

    def ours(self, handler: str, counter: str, count: int, *flags: object) -> Pace:
        """A worker: how fast this counter rises to `count`, once it has begun."""
        with self.worker(handler, *flags):
            until(lambda: self.counter(counter) > count // 50)
            done, before = self.counter(counter), self.usage()
            until(lambda: self.counter(counter) >= count)
            return self.pace(self.counter(counter) - done, before)

    def successes(self, count: int = MESSAGES, size: int = 0) -> Pace:
        self.fill(count, size)
        return self.ours("noop", "done", count)

    def retries(self, count: int = FAILURES, size: int = 0) -> Pace:
        """Third failures: read with two in their history, and written back with three."""
        self.fill_retries(count, 2, size)
        return self.ours("fail", "retried", count, *LATER)

    def deaths(self, count: int = FAILURES, size: int = 0) -> Pace:
        """Fifth failures: read with four in their history, and buried with five."""
        self.fill_retries(count, 4, size)
        return self.ours("fail", "dead", count, *LATER)

    # The rows ─────────────────────────────────────────────────────────────────────────────────

    def busy_loop(self) -> None:
        """A handler that does nothing against the bare loop; one that fails against the first."""
        ways = [self.successes, partial(self.bare, MESSAGES), self.retries, self.deaths]
        rounds = [[way() for way in ways] for _ in range(ROUNDS)]
        done, bare, retried, dead = ([each[i] for each in rounds] for i in range(4))
        for unit, name, wanted in (
            ("per_second", "messages/s", 0.9),
            ("commands", "commands per message", -2.0),
            ("cpu", "Redis, µs per message", -1.5),
        ):

            def values(paces: list[Pace], unit: str = unit) -> list[float]:
                return [getattr(pace, unit) for pace in paces]

            report(f"busy loop, {name}", values(done), values(bare), wanted)
            wanted = 0.5 if wanted > 0 else 0.0
            report(f"retries, {name}", values(retried), values(done), wanted)
            report(f"deaths, {name}", values(dead), values(done), wanted)

    def sizes(self) -> None:
        """What is left of the pace with 1 MB instead of 1 kB, against what the bare loop keeps."""
        ways: list[Callable[[int, int], Pace]]
        ways = [self.bare, self.successes, self.retries, self.deaths]
        kept: list[list[float]] = [[] for _ in ways]
        more: list[list[float]] = [[] for _ in ways]
        for _ in range(SIZE_ROUNDS):
            for i, way in enumerate(ways):
                small, large = (way(n, size).per_second for size, n in SIZES.items())
                kept[i].append(100 * large / small)
                more[i].append(1000 / large - 1000 / small)
        for i, name in enumerate(("successes", "retries", "deaths"), 1):
            report(f"1 MB instead of 1 kB, {name}, % left", kept[i], kept[0], 0.8)
            report(f"1 MB instead of 1 kB, {name}, ms more", more[i], more[0])

    def doorbell(self) -> None:
        """From the push to the handler's first line, worker idle; against a pop and a Lua call."""
        bare, ours = [], []
        for _ in range(BELL_ROUNDS):
            bare.append(self.ring_times(self.bare_program(BARE_LISTENER, EQUIVALENT, *KEYS)))
            ours.append(self.ring_times(self.worker("ring")))
        for name, share, wanted in (("p50", 50, -1.5), ("p99", 99, 0.0)):
            report(
                f"doorbell {name}, ms",
                [statistics.quantiles(times, n=100)[share - 1] for times in ours],
                [statistics.quantiles(times, n=100)[share - 1] for times in bare],
                wanted,
            )

    def ring_times(self, listener: AbstractContextManager[object]) -> list[float]:
        self.client.flushall()
        times = []
        with listener:
            for i in range(PUSHES):
                until(lambda: self.client.info("clients")["blocked_clients"] == 1)
                start = time.monotonic_ns()
                self.client.lpush("q:tasks", '{"kind": "ok"}')
                times.append((int(self.bell.recv(99)) - start) / 1e6)
                assert i or times.pop() > 0  # the first loads the scripts
        return times

    def killed_hand(self) -> None:
        """From `kill -9` of a hand in mid-run to its message retrying, or dead."""
        for what, attempts, counter in (("retry", 0, "retried"), ("death", 4, "dead")):
            self.client.flushall()
            times = []
            with self.worker("tell", *LATER):
                for n in range(KILLS):
                    self.client.lpush("q:tasks", failed(message(n), attempts))
                    pid, start = int(self.bell.recv(99)), time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
                    until(lambda counter=counter, n=n: self.counter(counter) > n)
                    times.append(time.perf_counter() - start)
            report(f"killed hand to {what}, s (p50)", [statistics.median(times)])
            report(f"killed hand to {what}, s (most)", [max(times)], wanted=-1.0)

    def expired(self) -> None:
        """Runs whose leases have ended all at once, a worker standing by: until all have fallen."""
        self.client.flushall()
        until(lambda: self.client.info("server")["uptime_in_seconds"] > 5)  # else others come first
        with self.worker("noop", "--lease", 2):
            until(lambda: self.client.info("clients")["blocked_clients"] == 1)
            with self.client.pipeline(transaction=True) as fill:
                for n in range(EXPIRED):
                    token = 10**15 + n
                    fill.hset("q:tasks:running", str(token), message(n))
                    fill.zadd("q:tasks:leases", {f"{token} gone:1:0/2": 1})
                fill.execute()
            start = time.perf_counter()
            until(lambda: self.counter("fallen") == EXPIRED)
            report(f"{EXPIRED} expired runs fall, s", [time.perf_counter() - start], wanted=-5.0)
            until(lambda: self.counter("retried") >= EXPIRED, timeout=60)
            report(f"{EXPIRED} expired runs charged, s", [time.perf_counter() - start])

    def idle(self) -> None:
        """What an idle worker sends: commands per second, those inside scripts not counted."""
        self.client.flushall()
        with self.worker("noop"):
            until(lambda: self.client.info("clients")["blocked_clients"] == 1)
            before = self.sent()
            time.sleep(IDLE_SECONDS)
            report("idle, commands/s", [(self.sent() - before) / IDLE_SECONDS], wanted=-2.0)

    def sent(self) -> int:
        """Commands that a worker sends itself; no script of ours calls one of these."""
        names = ("evalsha", "eval", "brpoplpush", "zscan")
        stats = self.client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)

    def memory(self) -> None:
        """Megabytes (PSS: what is shared is shared out) of an idle worker, and a further hand."""
        if sys.platform != "linux":
            return
        self.client.flushall()
        with self.bare_program(BARE_LISTENER, EQUIVALENT, *KEYS) as process:
            until(lambda: self.client.info("clients")["blocked_clients"] == 1)
            bare = megabytes(process.pid)
        totals = []
        for hands in (1, HANDS):
            self.client.flushall()
            with self.worker("noop", "--concurrency", hands) as process:
                until(lambda hands=hands: self.client.info("clients")["blocked_clients"] == hands)
                totals.append(sum(map(megabytes, [process.pid, *children(process.pid)])))
        report("idle worker of one hand, MB", totals[:1], [bare], -2.0)
        report("a further hand, MB", [(totals[1] - totals[0]) / (HANDS - 1)], [bare], -1.0)

    def dead_letters(self) -> None:
        """The desk over many dead letters: wall time, and the longest that Redis was held."""
        print(f"\n{DEAD} dead letters               wall s    longest command in Redis, ms")
        self.client.flushall()
        for i in range(0, DEAD, 1000):
            self.client.lpush("q:tasks:dlq", *(envelope(n) for n in range(i, min(DEAD, i + 1000))))
        self.client.config_set("slowlog-log-slower-than", 0)
        self.client.config_set("slowlog-max-len", 10_000)
        for flags in (["--list"], ["--list", "--oldest"], ["--check"], ["--status"], []):
            self.held(f"replay.py {' '.join(flags)}", partial(self.desk, flags))
        queue = Queue(self.server.url)
        middle = self.client.lindex("q:tasks:dlq", DEAD // 2)
        step = queue.replay(middle, b'{"kind": "ok"}', place=DEAD - 1 - DEAD // 2)
        self.held("one letter out of the middle", partial(queue.do, step))

    def desk(self, flags: list[str]) -> None:
        subprocess.run(
            [sys.executable, str(PROJECT / "replay.py"), *flags],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def held(self, name: str, action: Callable[[], object]) -> None:
        self.client.slowlog_reset()
        start = time.perf_counter()
        action()
        wall = time.perf_counter() - start
        held = max(entry["duration"] for entry in self.client.slowlog_get(10_000)) / 1000
        print(f"{name:34} {wall:10.2f} {held:10.2f}")


# ── Texts ─────────────────────────────────────────────────────────────────────────────────────


def message(n: int, size: int = 0) -> str:
    """What a producer pushes, the n-th; with rows of data up to about `size` bytes."""
    text = f'{{"kind": "ok", "to": "a@example.com", "template": "welcome", "id": {n}}}'
    row = '{"id": 1234567, "name": "a name of somebody", "price": 12.5, "tags": ["a", "b"]}'
    if size > len(text):
        rows = ", ".join([row] * ((size - len(text)) // len(row) + 1))
        text = f'{text[:-1]}, "rows": [{rows}]}}'
    return text


def failed(text: str, attempts: int) -> str:
    """A message as it comes back after so many failures."""
    at = "2026-11-30T12:00:00.123+00:00"
    history = [
        {"at": at, "error": "ValueError: bad message (handlers.py:5 in fail)", "wait": 0.512}
    ] * attempts
    facts = {"attempts": attempts, "first_seen_at": at, "_retry": {"history": history}}
    return f"{text[:-1]}, {json.dumps(facts)[1:]}" if attempts else text


def envelope(n: int) -> str:
    """A dead letter as the worker writes it, the n-th."""
    at = f"2026-11-30T{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02}.000+00:00"
    return (
        f'{{"payload": {{"kind": "bad", "id": {n}}}, "error": "ValueError: bad message '
        f'(taskproc.py:53 in process)", "attempts": 5, "first_seen_at": "{at}", "reason": '
        f'"exhausted", "failed_at": "{at}", "worker": "host:1:abcd/2", "token": {10**15 + n}, '
        f'"history": [{{"at": "{at}", "error": "ValueError: bad message", "wait": null}}]}}'
    )


def megabytes(pid: int) -> float:
    """A process's share of memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else float("nan")


def report(
    what: str, ours: list[float], against: Sequence[float] = (), wanted: float = 0.0
) -> None:
    """One row. `wanted`: the least, or if negative the most, that the ratio (else ours) may be."""
    row = f"{what:36} {statistics.median(ours):12.2f}"
    value = statistics.median(ours)
    if against:
        value = statistics.median(o / a for o, a in zip(ours, against, strict=True))
        row += f" {statistics.median(against):10.2f} {value:6.2f}"
    else:
        row += " " * 18
    if wanted:
        bound = f"≥ {wanted:g}" if wanted > 0 else f"≤ {-wanted:g}"
        missed = value < wanted if wanted > 0 else value > -wanted
        row += f"   {bound}{'   MISSED' if missed else ''}"
    print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
