#!/usr/bin/env python3
"""What the queue costs, against the barest loop that could do the same, in ratios of one run.

    make bench                     everything, about two minutes
    BENCH_DEAD=20000 make bench    fewer dead letters for the last table

Machines are noisy, so every figure of ours stands beside one of a bare redis-py program, taken in
turn with it, on the same private server (unix socket, nothing on disk).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import redis
from processes import PROJECT, clean_environment, until
from server import Server

sys.path.insert(0, str(PROJECT))
from worker import Queue

ROUNDS = 5
MESSAGES = 20_000  # per round of the busy loop
PUSHES = 200  # of the doorbell
KILLS = 10
IDLE_SECONDS = 20
DEAD = int(os.environ.get("BENCH_DEAD", "1000000"))

# One script that does what settling one message and claiming the next do together: the least that
# a loop with leases and fencing tokens can ask of Redis.
EQUIVALENT = """
local running, leases, waiting, retry, nextq, fence, stats = unpack(KEYS)
if redis.call('HEXISTS', running, ARGV[1]) == 1 then
  redis.call('HDEL', running, ARGV[1])
  redis.call('ZREM', leases, ARGV[1])
  redis.call('HINCRBY', stats, 'done', 1)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local from = redis.call('LLEN', nextq) > 0 and nextq or waiting
local text = redis.call('LINDEX', from, -1)
local first = redis.call('ZRANGE', retry, 0, 0, 'WITHSCORES')
if not text then return false end
local last = tonumber(redis.call('GET', fence)) or 0
local token = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
redis.call('ZADD', leases, now + 30000, token)
redis.call('HSET', running, token, 'me' .. ' ' .. now .. ' ' .. text)
redis.call('RPOP', from)
redis.call('SET', fence, token)
return {token, now, text}
"""
ROLES = (":running", ":leases", "", ":retry", ":next", ":fence", ":stats")
KEYS = ["q:tasks" + role for role in ROLES]

HANDLERS = """
import os, socket, time
bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def noop(msg): pass
def ring(msg): bell.sendto(b"%d" % time.monotonic_ns(), os.environ["BENCH_BELL"])
def tell(msg):
    bell.sendto(b"%d" % os.getpid(), os.environ["BENCH_BELL"])
    time.sleep(60)
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="qr-") as folder, Server(Path(folder) / "s") as server:
        bench = Bench(Path(folder), server)
        bench.busy_loop()
        bench.doorbell()
        bench.idle()
        bench.killed_hand()
        bench.dead_letters()
    return 0


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

    @contextmanager
    def worker(self, handler: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        """A real worker with one hand, and this handler; stopped at the end."""
        command = [sys.executable, str(PROJECT / "worker.py"), "--process", f"handlers:{handler}"]
        process = subprocess.Popen(
            [*command, *flags],
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

    def fill(self, messages: int) -> None:
        self.client.flushall()
        body = {"kind": "ok", "to": "a@example.com", "template": "welcome"}
        texts = [json.dumps(body | {"id": i}) for i in range(messages)]
        for i in range(0, messages, 1000):
            self.client.lpush("q:tasks", *texts[i : i + 1000])

    def done(self) -> int:
        return int(self.client.hget("q:tasks:stats", "done") or 0)

    def busy_loop(self) -> None:
        """Messages per second with a handler that does nothing: bare loop and worker in turn."""
        bare, ours = [], []
        for _ in range(ROUNDS):
            self.fill(MESSAGES)
            script, token = self.client.register_script(EQUIVALENT), b""
            start = time.perf_counter()
            while reply := script(keys=KEYS, args=[token]):
                token, _, text = reply
                json.loads(text)
            bare.append(MESSAGES / (time.perf_counter() - start))
            self.fill(MESSAGES)
            with self.worker("noop"):
                until(lambda: self.done() > 100)
                before, start = self.done(), time.perf_counter()
                until(lambda: self.done() == MESSAGES)
                ours.append((MESSAGES - before) / (time.perf_counter() - start))
        ratio = statistics.median(o / b for o, b in zip(ours, bare, strict=True))
        report("busy loop, messages/s", statistics.median(ours), statistics.median(bare), ratio)

    def doorbell(self) -> None:
        """From the push to the handler's first line, worker idle; against BLMOVE and a Lua call."""
        bare = self.ring_times(self.bare_listener)
        ours = self.ring_times(lambda: self.worker("ring"))
        ratio = statistics.median(ours) / statistics.median(bare)
        report("doorbell, ms", statistics.median(ours), statistics.median(bare), ratio)

    def ring_times(self, listener: Callable[[], AbstractContextManager[object]]) -> list[float]:
        self.client.flushall()
        times = []
        with listener():
            for i in range(PUSHES):
                until(lambda: self.client.info("clients")["blocked_clients"] == 1)
                start = time.monotonic_ns()
                self.client.lpush("q:tasks", '{"kind": "ok"}')
                times.append((int(self.bell.recv(99)) - start) / 1e6)
                assert i or times.pop() > 0  # the first loads the scripts
        return times

    @contextmanager
    def bare_listener(self) -> Iterator[None]:
        program = (
            "import os, redis, socket, sys, time\n"
            "bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "client = redis.Redis.from_url(os.environ['REDIS_URL'])\n"
            "script = client.register_script(sys.argv[1])\n"
            "token = b''\n"
            "while True:\n"
            "    client.blmove('q:tasks', 'q:tasks:next', 5, 'RIGHT', 'LEFT')\n"
            "    token = (script(keys=sys.argv[2:], args=[token]) or [token])[0]\n"
            "    bell.sendto(b'%d' % time.monotonic_ns(), os.environ['BENCH_BELL'])\n"
        )
        command = [sys.executable, "-c", program, EQUIVALENT, *KEYS]
        process = subprocess.Popen(command, env=self.environment)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def idle(self) -> None:
        """What an idle worker sends: commands per second, those inside scripts not counted."""
        self.client.flushall()
        with self.worker("noop"):
            until(lambda: self.client.info("clients")["blocked_clients"] == 1)
            before = self.sent()
            time.sleep(IDLE_SECONDS)
            rate = (self.sent() - before) / IDLE_SECONDS
        print(f"{'idle, commands/s':26} ours {rate:10.2f}")

    def sent(self) -> int:
        """Commands that a worker sends itself; no script of ours calls one of these."""
        names = ("evalsha", "eval", "blmove", "hscan", "zmscore")
        stats = self.client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)

    def killed_hand(self) -> None:
        """From `kill -9` of a hand in mid-run to its message in the retry set."""
        self.client.flushall()
        times = []
        with self.worker("tell"):
            for _ in range(KILLS):
                self.client.delete("q:tasks:retry")
                self.client.lpush("q:tasks", '{"kind": "ok"}')
                pid, start = int(self.bell.recv(99)), time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                until(lambda: self.client.hget("q:tasks:stats", "retried") is not None)
                times.append(time.perf_counter() - start)
                self.client.delete("q:tasks:stats")
        median, most = statistics.median(times) * 1e3, max(times) * 1e3
        print(f"{'killed hand to retry, ms':26} ours {median:10.2f}   most {most:10.2f}")

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


def envelope(n: int) -> str:
    """A dead letter as the worker writes it, the n-th."""
    at = f"2026-11-30T{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02}.000+00:00"
    return (
        f'{{"payload": {{"kind": "bad", "id": {n}}}, "error": "ValueError: bad message '
        f'(taskproc.py:53 in process)", "attempts": 5, "first_seen_at": "{at}", "reason": '
        f'"exhausted", "failed_at": "{at}", "worker": "host:1:abcd/2", "token": {10**15 + n}, '
        f'"history": [{{"at": "{at}", "error": "ValueError: bad message", "wait": null}}]}}'
    )


def report(what: str, ours: float, bare: float, ratio: float) -> None:
    print(f"{what:26} ours {ours:10.2f}   bare {bare:10.2f}   ours/bare {ratio:5.2f}")


if __name__ == "__main__":
    sys.exit(main())
