#!/usr/bin/env python3
"""What a naive queue loses and worker.py does not: the same blows to both, on a private Redis.

    make naive        half a minute; worker.py with --lease 1 --time-limit 1, to keep it short

The naive one is `tests/naive.py`; both run the example handler. Each row names a line of it and a
blow to that line. A worker that ended is started again, as a supervisor does; then we look where
the message is. Nothing is mocked: real processes, a real `kill -9`.

Exit code: 0 the naive one lost what README says, and worker.py nothing; else 1.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lab import row
from processes import PROJECT, Process, children, until
from server import Server

FLAGS = {"tests/naive.py": (), "worker.py": ("--lease", "1", "--time-limit", "1", "--grace", "1")}
PLACES = ["q:tasks" + suffix for suffix in ("", ":next", ":running", ":retry", ":dlq")]
GOOD = '{"kind": "ok"}'
ENOUGH = 5.0  # seconds; a message that a worker has not run by then stands behind something


class Seen(NamedTuple):
    """What became of a message, and whether that is what its producer wants."""

    words: str
    good: bool


class Side:
    """One of the two: its worker, and the eyes of somebody with redis-cli."""

    def __init__(self, script: str, server: Server, folder: Path) -> None:
        self.script, self.streams = script, folder / "streams"
        self.environment = {
            "REDIS_URL": server.url, "QR_APP_DIR": PROJECT, "QR_DIR": folder / "none",
            "PYTHONPATH": PROJECT, "PYTHONUNBUFFERED": 1,
        }  # fmt: skip
        self.client = server.client()
        self.client.flushall()
        self.started: list[Process] = []

    def start(self) -> Process:
        command = [PROJECT / self.script, *FLAGS[self.script]]
        self.started.append(Process(command, self.streams, self.environment))
        return self.started[-1]

    def push(self, *texts: str) -> None:
        self.client.lpush("q:tasks", *texts)

    def taken(self, left: int = 0) -> None:
        """Returns once the worker has taken all but so many of the waiting messages."""
        until(lambda: self.client.llen("q:tasks") <= left)

    def supervised(self) -> None:
        """Starts the worker again if it has ended, as a supervisor does."""
        if not self.started[-1].running():
            self.start()

    def soon(self, condition: Callable[[], bool], seconds: float = 30.0) -> bool:
        """Whether it becomes true, while a supervisor keeps the worker running."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.supervised()
            if condition():
                return True
            time.sleep(0.01)
        return False

    def said(self, line: str) -> bool:
        return any(line in worker.out.splitlines() for worker in self.started)

    def gone(self) -> bool:
        """Nothing is anywhere in Redis."""
        return not self.client.exists(*PLACES)

    def letter(self) -> bytes:
        """The one dead letter; empty if there is none."""
        return bytes(self.client.lindex("q:tasks:dlq", 0) or b"")

    def close(self) -> None:
        for worker in self.started:
            worker.end()
        self.client.close()


def kill(worker: Process) -> None:
    """kill -9 of everything that belongs to this worker, as a power cut does."""
    for pid in [worker.pid, *children(worker.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    worker.wait()


# --- The blows ------------------------------------------------------------------------------------


def killed_at_work(side: Side) -> Seen:
    side.push('{"kind": "slow", "seconds": 0.5}')
    worker = side.start()
    side.taken()
    kill(worker)
    gone = side.gone()
    if side.soon(lambda: side.said("done kind=slow"), 1 if gone else 30):
        return Seen("ran again: done", True)
    return Seen("gone" if gone else "not done", False)


def no_json(side: Side) -> Seen:
    side.push("no json", GOOD)
    worker = side.start()
    side.soon(lambda: side.said("done kind=ok"))
    ended = "" if worker.running() else "the worker ends; "
    if b'{"payload": "no json"' in side.letter():
        return Seen(f"{ended}dead letter, its bytes kept", not ended)
    return Seen(f"{ended}gone" if side.gone() else ended, False)


def hangs(side: Side) -> Seen:
    side.push('{"kind": "hang", "attempts": 4}', GOOD)
    side.start()
    if not side.soon(lambda: side.said("done kind=ok"), ENOUGH):
        return Seen("all behind it wait for ever", False)
    return Seen("dead letter, timed_out; the others ran", b'"timed_out"' in side.letter())


def kills_its_process(side: Side) -> Seen:
    side.push('{"kind": "crash", "attempts": 4}')
    side.start()
    side.soon(lambda: side.gone() or bool(side.letter()))
    if side.gone():
        return Seen("gone", False)
    return Seen("dead letter, worker_died", b'"worker_died"' in side.letter())


def killed_in_its_wait(side: Side) -> Seen:
    """Five, so that one is surely in hand when the blow falls, however short its wait is."""
    side.push(*['{"kind": "bad", "attempts": 3}'] * 5)
    worker = side.start()
    side.taken(4 if side.script == "tests/naive.py" else 0)
    kill(worker)
    counts = side.client.llen("q:tasks"), side.client.hlen("q:tasks:running")
    left = sum(counts) + side.client.zcard("q:tasks:retry") + side.client.llen("q:tasks:dlq")
    return Seen("nothing lost" if left == 5 else f"{5 - left} of 5 gone", left == 5)


def waits_its_turn(side: Side) -> Seen:
    side.push(*['{"kind": "bad"}'] * 8, GOOD)
    side.start()
    side.taken(8)
    began = time.monotonic()
    side.soon(lambda: side.said("done kind=ok"))
    took = time.monotonic() - began
    return Seen(f"the good one runs after {took:.1f} s", took < 0.9)


def rewritten(side: Side) -> Seen:
    facts = '"price": 1.10, "most": 1E400'
    side.push('{"kind": "bad", ' + facts + ', "attempts": 4}')
    side.start()
    side.soon(lambda: bool(side.letter()))
    letter = side.letter().decode()
    if '{"payload": {"kind": "bad", ' + facts + "}, " in letter:
        return Seen("as it was", True)
    now = letter.partition('"kind": "bad", ')[2].partition(', "attempts"')[0]
    return Seen(now.replace('"', ""), False)


BLOWS: tuple[tuple[str, str, Callable[[Side], Seen]], ...] = (
    ("brpop", "kill -9 while the handler works", killed_at_work),
    ("json.loads", "a message that is no JSON", no_json),
    ("process", "a handler that never returns", hangs),
    ("except", "a handler that kills its process", kills_its_process),
    ("time.sleep", "kill -9 while it waits to retry", killed_in_its_wait),
    ("time.sleep", "eight fail; a good one behind them", waits_its_turn),
    ("json.dumps", "price: 1.10, most: 1E400; and fails", rewritten),
)
WIDTHS = (10, 22, 20, 20)


def compare(blow: Callable[[Side], Seen]) -> list[Seen]:
    """What became of the message on each side, the naive one first."""
    seen = []
    with tempfile.TemporaryDirectory(prefix="qr-naive-") as name:
        folder = Path(name)
        with Server(folder / "server") as server:
            for script in FLAGS:
                side = Side(script, server, folder / Path(script).stem)
                try:
                    seen.append(blow(side))
                finally:
                    side.close()
    return seen


def main() -> int:
    row("line", "blow", *FLAGS, widths=WIDTHS)
    good = True
    for line, blow, strike in BLOWS:
        naive, ours = compare(strike)
        row(line, blow, naive.words, ours.words, widths=WIDTHS)
        good = good and ours.good and not naive.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
