#!/usr/bin/env python3
"""Grades anybody's backoff.py, worker.py and replay.py against the eight steps of the exercise.

    make grade                      the scripts in /root/qr
    QR_DIR=~/qr make grade          those in another folder

The scripts are run, never imported or judged by how they are written: messages are pushed, files
and keys are read. What is asked is what the exercise says; where it is silent, anything goes.

Nothing of yours is touched. The scripts run as a private copy, on a private Redis:

- In the copy the words /root and /opt, and the graded folder's name, are replaced by folders of the
  grader; QR_DIR, QR_APP_DIR, HOME and the working directory lead there too. So it does not matter
  how a script spells /root/qr/schedule.txt. The taskproc.py there is the grader's own.
- Port 6379 is redirected and REDIS_URL set, `time.sleep` is 100 times shorter, and the real folder
  cannot be written: see tests/grading/sitecustomize.py, which Python loads before each script. This
  way it is all the same whether port 6379 is free, and what runs there goes on undisturbed.
- `redis-cli` is not redirected; a script that calls it is told so. Waits by other means than
  `time.sleep` are waited for. QR_BASE is set: our own worker knows it as the base of its waits.

A worker is stopped by SIGINT, then SIGTERM, then SIGKILL; how it ends is its affair, if it ends.

Exit code: 0 every step passed; 1 a step failed; 2 nothing can be graded: no scripts, no server. (A
failing `make` always ends with 2.)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import redis
from lab import TROUBLE, Stop, row, setting
from processes import PROJECT, Process
from redis.backoff import NoBackoff
from redis.retry import Retry
from server import NoServer, Server

SCRIPTS = ("backoff.py", "worker.py", "replay.py")
OUTPUTS = ("schedule.txt", "jitter.txt", "capped.txt", "requeue.out")
QUEUE, DLQ = "q:tasks", "q:tasks:dlq"
LIMIT = 5  # failures that make a message dead

FASTER = 100  # `time.sleep` in the scripts takes that part of what they ask for
PATIENCE = 40.0  # seconds without anything happening; a wait of 30 s by other means than sleep fits
SECOND_PATIENCE = 15.0  # the same once it was in vain: a step has failed, do not take minutes
IDLE = 6.0  # seconds that a worker must bear an empty queue; many block for 5 s at a time
SIGNAL_SECONDS = {signal.SIGINT: 3.0, signal.SIGTERM: 8.0}  # a blocking pop may come first
GAP = 2.5  # seconds between a first failure and a restart; dates may be whole seconds


class Wrong(Exception):
    """A step failed: what was seen, and a question or a fact that leads on."""

    def __init__(self, seen: str, hint: str) -> None:
        super().__init__(seen)
        self.seen, self.hint = seen, hint


@dataclass
class Row:
    """The verdict on one step."""

    step: int
    expected: str
    seen: str
    hint: str = ""  # only a failure has one

    @property
    def passed(self) -> bool:
        return not self.hint


# --- The private copy ---------------------------------------------------------------------------

LARGEST = 1_000_000  # bytes; a larger file beside the scripts is no part of them


def copy_scripts(folder: Path, home: Path) -> Path:
    """A copy of a learner's folder, as `home`/root/qr; everything it names is in `home` as well."""
    copy, app = home / "root/qr", home / "opt/app"
    copy.mkdir(parents=True)
    app.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in OUTPUTS:
            continue
        if path.is_file() and path.stat().st_size <= LARGEST:
            shutil.copyfile(path, copy / path.name)
        elif path.is_dir() and any(path.glob("*.py")):
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    moved = {str(folder): copy, str(folder.resolve()): copy, "/root": home / "root"}
    moved["/opt"] = home / "opt"
    for script in copy.rglob("*.py"):
        script.write_bytes(move_paths(script.read_bytes(), moved))
    for place in (copy, app):
        shutil.copyfile(PROJECT / "tests/grading/taskproc.py", place / "taskproc.py")
    return copy


def move_paths(source: bytes, moved: dict[str, Path]) -> bytes:
    """Replaces whole names of folders in a text: "/root" in "/root/qr", but not in "/rootless"."""
    longest_first = sorted(moved, key=len, reverse=True)
    names = b"|".join(re.escape(os.fsencode(name)) for name in longest_first)
    return re.sub(
        rb"(?<![\w.~/}-])(?:" + names + rb")(?![\w.-])",
        lambda found: os.fsencode(moved[os.fsdecode(found[0])]),
        source,
    )


NO_REDIS_CLI = """\
#!/bin/sh
echo "redis-cli: make grade lets a script reach only its private Redis, by Python" >&2
exit 1
"""


def tools(home: Path) -> Path:
    """The folder that goes first on both paths, PATH and PYTHONPATH."""
    folder = home / "tools"
    folder.mkdir()
    shutil.copyfile(PROJECT / "tests/grading/sitecustomize.py", folder / "sitecustomize.py")
    (folder / "redis-cli").write_text(NO_REDIS_CLI)
    (folder / "redis-cli").chmod(0o755)
    return folder


def any_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- What a grader can do -----------------------------------------------------------------------


@dataclass
class Burial:
    """Steps 6 and 7, as they were seen: what was pushed, how often it ran, where it ended."""

    began: float  # seconds since 1970, like all times here
    patient: str  # the id of the message that had failed when its worker was restarted
    pushed: dict[str, dict[str, Any]] = field(default_factory=dict)  # id → message
    runs: Counter[str] = field(default_factory=Counter)
    undead: set[str] = field(default_factory=set)  # ids that were run while they were in the DLQ
    restarted: float = 0.0  # 0.0: the patient had not failed, or was dead, before the restart
    ended: str = ""  # what a worker said that ended by itself
    last: str = ""  # the id of the message that was pushed when all others were dead
    letters: list[str] = field(default_factory=list)  # from left to right
    waiting: int = 0

    def letter(self, name: str) -> str:
        """The dead letter that holds a message; Wrong if there is none."""
        for text in self.letters:
            if name in text:
                return text
        raise Wrong("no dead letter to look at", "This step can be seen once step 6 passes.")


class Grader:
    """A private Redis, a private copy of somebody's scripts, and the eight steps.

    Each step returns what was seen, or raises Wrong.
    """

    def __init__(self, folder: Path, home: Path, patience: float = PATIENCE) -> None:
        self.home, self.patience = home, patience
        self.folder = copy_scripts(folder, home)
        self.runs_file, self.go = home / "runs", home / "go"
        self.server = Server(home / "redis", port=any_port())
        self.client = redis.Redis(
            unix_socket_path=str(self.server.socket),  # surely ours, whoever has the port
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
            encoding_errors="backslashreplace",
        )
        front = tools(home)
        rules = {
            "port": self.server.port,
            "socket": str(self.server.socket),
            "faster": FASTER,
            "keep_out_of": [str(folder), str(folder.resolve()), "/root/qr", "/opt/app"],
            "but_not_of": str(home),
            "runs": str(self.runs_file),
            "go": str(self.go),
        }
        foreign = {name: None for name in os.environ if name.startswith("REDIS")}
        self.environment = {
            **foreign,
            "REDIS_URL": self.server.url,
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": self.server.port,
            "QR_DIR": self.folder,
            "QR_APP_DIR": home / "opt/app",
            "QR_BASE": 0.1,
            "QR_GRADE": json.dumps(rules),
            "HOME": home / "root",
            "PATH": f"{front}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": front,
            "PYTHONDONTWRITEBYTECODE": 1,
            "TZ": "UTC",
        }
        self.started: list[Process] = []
        self.written: list[dict[str, list[str]]] = []  # name → lines, for each run of backoff.py
        self.burial: Burial | None = None  # once step 6 or 7 was looked at

    def __enter__(self) -> Grader:
        self.server.start()
        try:
            self.client.ping()
        except redis.RedisError as error:
            self.server.close()
            raise NoServer(f"another program took the port of the private Redis: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.end()
        self.client.close()
        self.server.close()

    # Scripts

    def start(self, script: str) -> Process:
        if not (self.folder / script).is_file():
            raise Wrong(f"there is no {script}", f"Write {script} into the folder first.")
        process = Process([script], self.home / "streams", self.environment, cwd=self.folder)
        self.started.append(process)
        return process

    def finish(self, script: str) -> Process:
        """Runs a script that should end by itself."""
        process = self.start(script)
        with contextlib.suppress(AssertionError):
            process.wait(self.patience)
            process.end()
            return process
        process.end()
        raise Wrong(
            f"{script} was still running after {self.patience:g} s",
            f"{script} is run once and ends. What is it waiting for?",
        )

    def stop(self, worker: Process, *signals: signal.Signals, held: bool = False) -> bool:
        """Asks a worker to end, by one signal after another. False if it had to be killed.

        held  it is running the message "hold", which ends when the signal has been sent
        """
        for number in signals or (signal.SIGINT, signal.SIGTERM):
            if worker.running():
                worker.send_group(number)
            if held:
                self.go.touch()
            with contextlib.suppress(AssertionError):
                worker.wait(SIGNAL_SECONDS[number])
        ended = not worker.running()
        worker.end()
        return ended

    def wait(self, condition: Callable[[], bool], worker: Process) -> bool:
        """Whether it became true before the worker ended, or stood still for too long."""
        began = moved = time.monotonic()
        noted = 0
        while not condition():
            if not worker.running():
                return condition()  # it may have become true with the last thing that was done
            now, size = time.monotonic(), self.runs_file.stat().st_size
            if size != noted:
                noted, moved = size, now
            if now - moved > self.patience or now - began > 4 * self.patience:
                self.patience = min(self.patience, SECOND_PATIENCE)
                return False
            time.sleep(0.01)
        return True

    # Messages

    def fresh(self) -> None:
        """Nothing is left of an earlier step, as far as the exercise knows."""
        self.client.flushall()
        self.runs_file.write_text("")
        self.go.unlink(missing_ok=True)
        (self.folder / "requeue.out").unlink(missing_ok=True)

    def message(self, kind: str, **more: object) -> dict[str, Any]:
        return {"kind": kind, "id": f"{kind}-{uuid.uuid4().hex[:8]}", **more}

    def push(self, message: dict[str, Any], right: bool = False) -> str:
        """Pushes as a producer does; returns the message's id."""
        push = self.client.rpush if right else self.client.lpush
        push(QUEUE, json.dumps(message))
        return str(message["id"])

    def calls(self) -> list[dict[str, Any]]:
        """What the handler noted of each call: id, type, at."""
        whole = self.runs_file.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def runs(self) -> Counter[str]:
        return Counter(str(call["id"]) for call in self.calls())

    def lines(self, name: str) -> list[str]:
        """The lines of a file that a script wrote; none if it is not there."""
        path = self.folder / name
        if not path.is_file():
            return []
        text = path.read_text(encoding="utf-8-sig", errors="backslashreplace")
        return [line.strip() for line in text.rstrip().splitlines()]

    def texts(self, key: str) -> list[str]:
        """What a list holds, from left to right."""
        return list(self.client.lrange(key, 0, -1))

    def everything(self) -> str:
        """All that is in Redis, whatever the keys and their types, as one text."""
        read: dict[str, Callable[[str], object]] = {
            "string": self.client.get,
            "list": self.texts,
            "set": self.client.smembers,
            "hash": self.client.hgetall,
            "zset": lambda key: self.client.zrange(key, 0, -1),
            "stream": self.client.xrange,
        }
        found = []
        for key in self.client.scan_iter():
            if look := read.get(self.client.type(key)):
                found.append(str(look(key)))
        return "\n".join(found)

    def plainly(self, text: str) -> str:
        """A text of a script on one line, with the paths that its author knows."""
        text = text.replace(str(self.home), "").strip()
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]

    def ending(self, process: Process) -> str:
        """How a script ended by itself."""
        said = (process.err.strip() or process.out.strip()).splitlines()
        last = f": {self.plainly(said[-1])}" if said else ""
        return f"{process.popen.args[1]} ended with exit code {process.wait()}{last}"

    # Step 1

    def takes(self) -> str:
        self.fresh()
        before = [self.push(self.message("ok")), self.push(self.message("ok"), right=True)]
        worker = self.start("worker.py")
        self.run_all(before, worker)
        self.wait_idle(worker)
        during = [self.push(self.message("ok")), self.push(self.message("ok"), right=True)]
        self.run_all(before + during, worker)
        if not self.stop(worker):
            raise Wrong(
                "it ended neither at Ctrl-C (SIGINT) nor at kill (SIGTERM)",
                "KeyboardInterrupt is an exception too, but no failure of a message. Which line of "
                "yours catches it? And what should the loop do when a signal has come?",
            )
        return "4 of 4 were run; on an empty queue it waits; it can be stopped"

    def run_all(self, names: list[str], worker: Process) -> None:
        """The worker runs these messages, once each; else Wrong."""

        def settled() -> bool:
            runs = self.runs()
            return runs.keys() >= set(names) or runs.total() > len(names)

        whole = self.wait(settled, worker)
        if any(runs > 1 for name, runs in self.runs().items() if name in names):
            raise Wrong(
                "a message that succeeded was run again",
                "A message that was done must be gone from Redis. Which command takes it away?",
            )
        if not whole or self.runs().keys() != set(names):
            raise self.why_not_run(names, worker)

    def why_not_run(self, names: list[str], worker: Process) -> Wrong:
        strange = [call["type"] for call in self.calls() if call["type"] != "dict"]
        if strange:
            return Wrong(
                f"process(msg) was called with a {strange[0]}",
                'process does msg["kind"], so it needs a dict. What comes out of Redis is JSON in '
                "bytes, or in text with decode_responses=True; which function makes a dict of it?",
            )
        if not worker.running():
            return Wrong(
                self.ending(worker),
                "A worker runs until it is stopped, whether there is work or not. Start it in a "
                "terminal, push a message, and read its last words.",
            )
        if self.client.llen(QUEUE) == 0:
            return Wrong(
                "a message was taken from q:tasks, but process(msg) was not called with it",
                "The work is in process(msg) of /opt/app/taskproc.py. Does your worker import "
                "that one, and give it the whole message?",
            )
        ran = len(self.runs().keys() & set(names))
        return Wrong(
            f"{ran} of {len(names)} messages were run, {self.client.llen(QUEUE)} are in q:tasks",
            "Push a message while your worker runs: LLEN q:tasks should fall back to 0. Does it "
            "read the list that you push to, in a loop?",
        )

    def wait_idle(self, worker: Process) -> None:
        with contextlib.suppress(AssertionError):
            worker.wait(IDLE)
            raise Wrong(
                f"when the queue was empty, {self.ending(worker)}",
                "An empty queue is no reason to leave: the next message may come in a minute. What "
                "does your pop return when there is nothing, and what does the loop do then?",
            )

    # Step 2

    def requeues(self) -> str:
        seen = [self.counts(self.message("bad"), [1, 2])]
        seen += [self.counts(self.message("bad", attempts=1), [2])]
        return "; ".join(seen)

    def counts(self, message: dict[str, Any], wanted: list[int]) -> str:
        """The first counts that are printed for a failing message; Wrong if they are others."""
        self.fresh()
        name = self.push(message)
        worker = self.start("worker.py")
        again = self.wait(lambda: self.runs()[name] > len(wanted), worker)
        ended = "" if worker.running() else self.ending(worker)
        self.stop(worker)
        places = {"requeue.out": self.lines("requeue.out"), "stdout": worker.out.splitlines()}
        counts = {place: attempts_in(lines) for place, lines in places.items()}
        for place, found in counts.items():
            if again and found[: len(wanted)] == wanted:
                shown = f"{numbered(wanted)} in {place}"
                return f"{shown} if pushed with attempts 1" if "attempts" in message else shown
        shown = "; ".join(
            f"{place}: {numbered(found) or 'none'}" for place, found in counts.items()
        )
        if ended:
            raise Wrong(
                ended,
                "A message that fails must not end the worker. Which exceptions does your except "
                "clause name, and which may somebody else's process() raise?",
            )
        if not again:
            raise Wrong(
                f"a message that failed was run {times(self.runs()[name])}, and not again",
                "Popping takes the message out of Redis: if process() raises, your variable is all "
                "that is left of it. Who pushes it back, and with which text?",
            )
        if not any(counts.values()):
            where = "it is on stderr" if attempts_in(worker.err.splitlines()) else "it is nowhere"
            raise Wrong(
                f"no line attempts=<n> in requeue.out or on stdout; {where}",
                "At each re-queue, print a line attempts=<n>. Python keeps what it prints to a "
                "file in memory for a while: flush=True. logging writes to stderr.",
            )
        if "attempts" in message:
            raise Wrong(
                f"a message pushed with attempts 1 failed once: {shown}",
                "The message brought its count along, as it does after a restart of the worker or "
                "in the hands of another one. Where does your worker read the number it adds 1 to?",
            )
        raise Wrong(
            shown,
            "The count is incremented at each failure and travels in the message. Look at what you "
            "push back: is it the text that you took, or one with the new count in it?",
        )

    # Steps 3 to 5

    def write_files(self) -> dict[str, list[str]]:
        """Runs backoff.py and returns the lines of the three files."""
        process = self.finish("backoff.py")
        files = {name: self.lines(name) for name in OUTPUTS[:3]}
        if process.wait() != 0 and not all(files.values()):
            raise Wrong(
                self.ending(process), "Run python backoff.py by hand and read its last line."
            )
        self.written.append(files)
        return files

    def file(self, name: str, count: int) -> list[str]:
        """The lines of a file after the second run of backoff.py."""
        while len(self.written) < 2:
            self.write_files()
        first, second = (files[name] for files in self.written[:2])
        if not second:
            raise Wrong(
                f"{name} is not there, or empty",
                f"backoff.py writes {name} into /root/qr (or QR_DIR). Is the file closed?",
            )
        if len(first) == count and len(second) == 2 * count:
            raise Wrong(
                f"after a second run of backoff.py {name} has {len(second)} lines",
                'Each run writes the file anew. What does open(name, "a") do that open(name, "w") '
                "does not?",
            )
        return second

    def schedule(self) -> str:
        seen = self.file("schedule.txt", 6)
        wanted = [f"attempt={n} wait={2**n}" for n in range(6)]
        if seen != wanted:
            raise Wrong(summary(seen), self.schedule_hint(seen, wanted))
        return summary(seen)

    def schedule_hint(self, seen: list[str], wanted: list[str]) -> str:
        pairs = [re.findall(r"-?\d+(?:\.\d+)?", line) for line in seen]
        if not all(len(pair) == 2 for pair in pairs):
            return "Six lines like attempt=0 wait=1, and nothing else: another program reads them."
        attempts, waits = zip(*((float(n), float(wait)) for n, wait in pairs), strict=True)
        if list(attempts) == [0, 1, 2, 3, 4, 5] and list(waits) == [1, 2, 4, 8, 16, 32]:
            return (
                "The numbers are right; how they are written is not. Compare your first line with "
                "attempt=0 wait=1, letter by letter: are these whole numbers?"
            )
        if 30 in waits and 32 not in waits:
            return "This file shows the bare exponential; the cap comes in step 5. What is 2 ** 5?"
        if set(waits) - {1, 2, 4, 8, 16, 32, 64} or any(not w.is_integer() for w in waits):
            return "Each wait doubles the one before, without any chance in it: 1, 2, 4 and so on."
        return (
            "Off by one? The first attempt has number 0, and anything to the power of 0 is 1. "
            "Where does your range begin, and where does it end?"
        )

    def jitter(self) -> str:
        runs = [self.file("jitter.txt", 20), self.written[0]["jitter.txt"]]
        for lines in runs:
            self.check_draws(lines)
        if runs[0] == runs[1]:
            raise Wrong(
                "two runs of backoff.py wrote the same 20 numbers",
                "A thousand clients that draw the same numbers come back together, too. What "
                "makes your generator begin at the same place on each run?",
            )
        draws = [float(line) for lines in runs for line in lines]
        # One fair grading in 200 has no draw of 40 below 1 s; of 200 draws, one in 4 * 10**11.
        while len(draws) < 200 and not (min(draws) < 1 and max(draws) > 7):
            lines = self.write_files()["jitter.txt"]
            self.check_draws(lines)
            draws += map(float, lines)
        spread = f"{len(draws)} draws from {min(draws):.3f} to {max(draws):.3f}"
        if all(draw.is_integer() for draw in draws):
            raise Wrong(
                f"{spread}, whole seconds all of them",
                "How many different waits can come out of your line? A thousand clients would "
                "share those few. Waits are decimals.",
            )
        if min(draws) >= 1:
            raise Wrong(
                spread,
                "Full jitter draws from 0 up to the ceiling: what is the smallest value that could "
                "come out of your line?",
            )
        if max(draws) <= 7:
            raise Wrong(
                spread,
                "The ceiling of attempt 3 is 2 ** 3 s, if the first attempt has number 0: what is "
                "the largest value that could come out of your line?",
            )
        return spread

    def check_draws(self, lines: list[str]) -> None:
        if len(lines) != 20:
            raise Wrong(f"jitter.txt has {len(lines)} lines", "Twenty draws, a line each.")
        draws = []
        for line in lines:
            try:
                draws.append(float(line))
            except ValueError:
                raise Wrong(
                    f"a line of jitter.txt is {line!r}",
                    "A bare decimal on each line, such as 3.271: no words, no units, no brackets.",
                ) from None
        outside = [draw for draw in draws if not 0 <= draw <= 8]
        if outside:
            raise Wrong(
                f"{len(outside)} of 20 draws are outside 0 to 8, {outside[0]:g} for instance",
                "For attempt 3 the ceiling is 8 s. Full jitter does not scatter around the "
                "ceiling, it draws from 0 up to it: what is the largest value your line could "
                "give?",
            )
        if len(set(draws)) == 1:
            raise Wrong(
                f"all 20 lines say {lines[0]}",
                "Was the number drawn twenty times, or drawn once and written twenty times?",
            )
        if len(set(draws)) < 10 and not all(draw.is_integer() for draw in draws):
            raise Wrong(
                f"among 20 draws only {len(set(draws))} differ",
                "How many different waits can come out of your line? Draw a number for each line, "
                "from all decimals between 0 and the ceiling.",
            )

    def capped(self) -> str:
        seen = self.file("capped.txt", 9)
        wanted = [str(min(30, 2**n)) for n in range(9)]
        if seen != wanted:
            raise Wrong(" ".join(seen), self.capped_hint(seen, wanted))
        return " ".join(seen)

    def capped_hint(self, seen: list[str], wanted: list[str]) -> str:
        try:
            waits = [float(line) for line in seen]
        except ValueError:
            return "A bare whole number on each line, nothing else: another program reads them."
        if waits == [float(line) for line in wanted]:
            return "The numbers are right, but they are to be whole: 1, not 1.0."
        if any(not wait.is_integer() for wait in waits):
            return "This file shows the cap, without jitter: whole seconds, the same on every run."
        if max(waits) > 30:
            return "Without a cap attempt 10 waits 17 minutes. Which is smaller, 2 ** 5 or 30?"
        if max(waits) < 30:
            return "The waits stop too early. What is the smaller one of 2 ** 5 and 30?"
        return "Nine attempts, from 0 to 8: where does your range begin, and where does it end?"

    # Steps 6 and 7

    def bury(self) -> Burial:
        """Six messages die, each of another cause; the first has its worker restarted meanwhile.

        The restart comes while the worker runs the message "hold", which was pushed behind: so
        nothing else is in its hands, whose loss the exercise would have to forgive.
        """
        self.fresh()
        patient, hold = self.message("bad"), self.message("hold")
        seen = Burial(began=time.time(), patient=patient["id"])
        self.push(patient)
        self.push(hold)
        seen.pushed[patient["id"]] = patient
        worker = self.start("worker.py")

        def held() -> bool:
            """The hold runs; the patient has failed and is in Redis, or was not taken yet."""
            return hold["id"] in self.runs() and patient["id"] in self.everything()

        if self.wait(held, worker):
            failed = self.runs()[patient["id"]] > 0
            alive = not any(patient["id"] in text for text in self.texts(DLQ))
            if failed and alive:
                time.sleep(GAP)
                seen.restarted = time.time()
        elif not worker.running():
            seen.ended = self.ending(worker)
        self.stop(worker, signal.SIGTERM, held=True)

        if not seen.ended:
            others = [
                self.message("bad", attempts=0),
                self.message("bad", how="KeyError"),
                self.message("bad", how="RuntimeError"),
                self.message("bad", how="AssertionError"),
            ]
            if self.kill(others, seen):
                last = self.message("bad")
                seen.last = last["id"]
                self.kill([last], seen)
        seen.runs = self.runs()
        seen.undead = {str(call["id"]) for call in self.calls() if call["dead"]}
        seen.letters = self.texts(DLQ)
        seen.waiting = self.client.llen(QUEUE)
        self.burial = seen
        return seen

    def kill(self, messages: list[dict[str, Any]], seen: Burial) -> bool:
        """Runs a worker until these and all before are dead, or one has run far too often."""
        for message in messages:
            self.push(message)
            seen.pushed[message["id"]] = message
        worker = self.start("worker.py")

        def dead() -> bool:
            letters = self.texts(DLQ)
            return all(any(name in text for text in letters) for name in seen.pushed)

        def too_often() -> bool:
            runs = self.runs()
            return any(runs[name] > 2 * LIMIT for name in seen.pushed)

        self.wait(lambda: dead() or too_often(), worker)
        if not worker.running():
            seen.ended = self.ending(worker)
        self.stop(worker)
        return dead() and not too_often() and not seen.ended

    def buries(self) -> str:
        seen = self.burial or self.bury()
        if seen.ended:
            raise Wrong(
                seen.ended,
                "A message that fails must not end the worker, whatever it raised. Which "
                "exceptions does your except clause name?",
            )
        # The patient comes last: what is wrong with all is not to be blamed on the restart.
        for name in sorted(seen.pushed, key=lambda name: name == seen.patient):
            self.check_burial(seen, name, seen.pushed[name].get("how", "ValueError"))
        if seen.waiting or len(seen.letters) != len(seen.pushed):
            raise Wrong(
                f"{len(seen.pushed)} messages died: LLEN {QUEUE} is {seen.waiting}, "
                f"LLEN {DLQ} is {len(seen.letters)}",
                "A dead message is in the DLQ once, and nowhere else. What happens to it on the "
                "path of your code that goes on after the push to the DLQ?",
            )
        return f"{len(seen.letters)} messages dead after {LIMIT} failures each, LLEN {QUEUE} 0"

    def check_burial(self, seen: Burial, name: str, error: str) -> None:
        """One message failed five times, and is in one dead letter; else Wrong."""
        runs = seen.runs[name]
        letters = sum(name in text for text in seen.letters)
        if letters > 1:
            raise Wrong(
                f"a message is in {letters} dead letters",
                "It was put into the DLQ and was still somewhere else, to be run again. Which "
                "command takes it away from there, and does it stand on every path?",
            )
        if name in seen.undead:
            raise Wrong(
                f"a message was run again while it was in {DLQ}",
                "Dead is dead: after the DLQ no path of your code may push the message to the "
                "queue or leave it in another list. What follows your push to the DLQ?",
            )
        if runs > LIMIT and name == seen.patient and seen.restarted:
            raise Wrong(
                f"its worker was restarted after a failure, and a message failed {runs} times",
                "Five failures are five, whoever counts: where was the count while no worker ran?",
            )
        if runs > LIMIT:
            place = "and is in" if letters else "and is not in"
            raise Wrong(
                f"a message was run {runs} times {place} {DLQ}",
                "Count on paper: what is attempts after the first failure, what after the fifth, "
                "and at which number does your comparison say enough?",
            )
        if not letters:
            where = "nowhere in Redis" if name not in self.everything() else "not in the DLQ"
            raise Wrong(
                f"a message that raises {error} was run {times(runs)}, and is {where}",
                "After each failure but the last a message goes back, after the fifth it goes to "
                "the DLQ. Which line of yours is reached when process() raises?",
            )
        if runs < LIMIT:
            raise Wrong(
                f"a message was run {times(runs)} and is in {DLQ}",
                "Five failures, not four: what is attempts after the first failure, what after the "
                "fifth, and at which number does your comparison say enough?",
            )

    def explains(self) -> str:
        seen = self.burial or self.bury()
        for name, pushed in seen.pushed.items():
            self.check_envelope(seen.letter(name), pushed, seen)
        since = self.first_seen(seen, seen.patient)
        if seen.restarted and since > seen.restarted - 1.1:  # a date may be cut to the second
            raise Wrong(
                f"first_seen_at is {since - seen.began:.0f} s too late, not from the first time",
                "It says since when somebody has been waiting. If it is taken anew at each "
                "failure, where could the first one have been kept? What survives a restart?",
            )
        envelope = json.loads(seen.letter(seen.patient))
        return self.plainly(f"attempts {envelope['attempts']}, error {envelope['error']}")

    def check_envelope(self, text: str, pushed: dict[str, Any], seen: Burial) -> None:
        try:
            envelope = json.loads(text)
        except ValueError:
            envelope = None
        if not isinstance(envelope, dict):
            raise Wrong(
                f"a dead letter is no JSON object: {self.plainly(text)[:60]}",
                "An envelope is a JSON object with four members. json.dumps makes JSON; str() "
                "does not.",
            )
        missing = {"payload", "error", "attempts", "first_seen_at"} - envelope.keys()
        if missing:
            raise Wrong(
                f"the envelope has no {', '.join(sorted(missing))}",
                "An envelope has payload, error, attempts and first_seen_at, under these names: "
                "what it was, why it failed, how often, and since when.",
            )
        self.check_payload(envelope["payload"], pushed)
        attempts = envelope["attempts"]
        if type(attempts) is not int or attempts != LIMIT:
            hint = "After five failures that is 5. Is the last one counted in the envelope?"
            if str(attempts) == str(LIMIT):
                hint = (
                    'JSON tells 5 from "5", and so does who compares it. Where does it become text?'
                )
            raise Wrong(f"attempts is {json.dumps(attempts)}", hint)
        error = envelope["error"]
        if not error or not str(error).strip():
            raise Wrong(
                f"a message died of {pushed.get('how', 'ValueError')}(), and error is {error!r}",
                "An exception may have no text: what does str(AssertionError()) give, and what "
                "does repr() give? Its name alone is worth a lot at night.",
            )
        self.first_seen(seen, pushed["id"])

    def check_payload(self, payload: object, pushed: dict[str, Any]) -> None:
        if not isinstance(payload, dict):
            raise Wrong(
                f"payload is not an object but a {type(payload).__name__}",
                "payload is the message itself, inside the envelope, not a text that holds JSON. "
                "How often does it go through json.dumps?",
            )
        bare = {name: value for name, value in pushed.items() if name != "attempts"}
        if payload in (pushed, bare):
            return
        changed = sorted(
            name
            for name in payload.keys() | pushed.keys()
            if payload.get(name, math.nan) != pushed.get(name, math.nan)
        )
        raise Wrong(
            f"payload is not what was pushed; what differs: {', '.join(changed)}",
            "The payload is the message as its producer pushed it. Your own bookkeeping has places "
            "of its own in the envelope: what must be taken out before it is wrapped?",
        )

    def first_seen(self, seen: Burial, name: str) -> float:
        """The date of a dead letter, in seconds since 1970; Wrong if it cannot be one."""
        value = json.loads(seen.letter(name))["first_seen_at"]
        date = seconds_since_1970(value)
        if math.isnan(date) or not seen.began - 2 <= date <= time.time() + 2:
            raise Wrong(
                f"first_seen_at is {self.plainly(json.dumps(value))[:50]}",
                "It is when a worker first saw the message: ISO 8601 with an offset, as "
                "datetime.now(timezone.utc).isoformat() gives it, or seconds since 1970.",
            )
        return date

    # Step 8

    def replays(self) -> str:
        oldest = self.lay_out_letters()
        before = self.texts(DLQ)
        process = self.finish("replay.py")
        if process.wait() != 0:
            raise Wrong(self.ending(process), "Exit code 0 says that it went well. Run it by hand.")
        after, queue = self.texts(DLQ), self.texts(QUEUE)
        moved = len(before) - len(after)
        shown = f"{moved} of {len(before)} left {DLQ}, {len(queue)} came to {QUEUE}"
        if (moved, len(queue)) != (1, 1):
            raise Wrong(shown, moved_hint(moved, len(queue)))
        self.check_replayed(queue[0])
        gone = [text for text in before if text not in after]
        if len(gone) == 1 and gone[0] not in oldest:
            raise Wrong(
                "the newest dead letter went back, or one from the middle",
                "Oldest first: it has waited longest. At which end does your worker push to the "
                "DLQ, and which end is then the oldest?",
            )
        self.client.delete(DLQ)
        process = self.finish("replay.py")
        if process.wait() != 0:
            raise Wrong(
                f"with an empty DLQ {self.ending(process)}",
                "An empty DLQ is good news, no error: say so and end. What does the pop return "
                "then?",
            )
        if self.texts(QUEUE) != queue:
            raise Wrong(
                "with an empty DLQ it changed q:tasks",
                "If there is no dead letter, there is nothing to push.",
            )
        return f"{shown}, with attempts 0; on an empty DLQ: exit code 0"

    def lay_out_letters(self) -> list[str]:
        """Some dead letters are in the DLQ, of the learner's worker if it can; returns the oldest.

        The last one that died shows at which end the worker pushes. If it buried none, there are
        three made by hand, and both ends may be the oldest.
        """
        buried = self.burial
        if buried and buried.last and buried.waiting == 0:
            letters = self.texts(DLQ)
            if letters == buried.letters and len(letters) == len(buried.pushed):
                return [letters[-1] if buried.last in letters[0] else letters[0]]
        self.fresh()
        for _ in range(3):
            envelope = {
                "payload": self.message("bad"),
                "error": "ValueError: bad message",
                "attempts": LIMIT,
                "first_seen_at": datetime.now(timezone.utc).isoformat(),
            }
            self.client.lpush(DLQ, json.dumps(envelope))
        letters = self.texts(DLQ)
        return [letters[0], letters[-1]]

    def check_replayed(self, text: str) -> None:
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Wrong(
                f"on {QUEUE} is no JSON object: {self.plainly(text)[:60]}",
                "A worker reads the queue with json.loads and wants a dict. How often does the "
                "message go through json.dumps on its way back?",
            )
        if "payload" in message:
            raise Wrong(
                f"the envelope itself is on {QUEUE}",
                'process() looks for msg["kind"] at the top: which part of the envelope is the '
                "message?",
            )
        attempts = message.get("attempts")
        if type(attempts) is not int or attempts != 0:
            shown = json.dumps(attempts) if "attempts" in message else "not there"
            raise Wrong(
                f"attempts is {shown}",
                "A replayed message starts again from 0, and says so in itself: how many failures "
                "would the worker still allow it now?",
            )
        if message.get("kind") != "bad" or not str(message.get("id")).startswith("bad-"):
            raise Wrong(
                f"what is on {QUEUE} is not the message: {self.plainly(text)[:60]}",
                "The payload goes back with all its members, as its producer wrote them.",
            )


def moved_hint(moved: int, arrived: int) -> str:
    """What may be wrong with a replay that did not move one message from one list to the other."""
    if moved > 1:
        return (
            "One run moves one message, so that a person can see whether the cause is mended "
            "before all the others follow. Is there a loop?"
        )
    if moved == 0 and arrived:
        return (
            "Copied is not moved: the next replay would run the same message again. Which command "
            "reads a list, and which one also takes away?"
        )
    if moved == 1:
        return "It left the DLQ and did not come to q:tasks once. Between the two, who has it?"
    return "Nothing moved. Is the DLQ that you read called q:tasks:dlq?"


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def attempts_in(lines: Iterable[str]) -> list[int]:
    """The counts in lines that say attempts=<n>, in their order."""
    found = (re.search(r"\battempts=(\d{1,9})\b", line) for line in lines)
    return [int(match[1]) for match in found if match]


def numbered(counts: Collection[int]) -> str:
    shown = " ".join(f"attempts={n}" for n in list(counts)[:6])
    return shown + (" ..." if len(counts) > 6 else "")


def summary(lines: list[str]) -> str:
    """The first and the last line, and how many there are."""
    return f"{lines[0][:40]} ... {lines[-1][:40]} ({len(lines)} lines)"


def seconds_since_1970(value: object) -> float:
    """A date as learners write it: a number of seconds or ms, ISO 8601, time.ctime(); else NaN."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)  # type: ignore[arg-type]
        return number / 1000 if number > 1e11 else number
    text = str(value).strip()
    readers: tuple[Callable[[str], datetime], ...] = (
        lambda text: datetime.fromisoformat(re.sub(r"Z$", "+00:00", text)),
        lambda text: datetime.strptime(text, "%a %b %d %H:%M:%S %Y"),
        lambda text: datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z"),
    )
    for read in readers:
        with contextlib.suppress(ValueError):
            date = read(text)
            return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    return math.nan


STEPS: dict[int, tuple[str, Callable[[Grader], str]]] = {
    1: ("worker.py runs what LPUSH or RPUSH brings, until stopped", Grader.takes),
    2: ("a failure goes back with its count: lines attempts=1, attempts=2", Grader.requeues),
    3: ("schedule.txt: attempt=0 wait=1 ... attempt=5 wait=32", Grader.schedule),
    4: ("jitter.txt: 20 decimals, 0 to 8, other ones on each run", Grader.jitter),
    5: ("capped.txt: 1 2 4 8 16 30 30 30 30", Grader.capped),
    6: ("after 5 failures, of whatever kind: in the DLQ, and only there", Grader.buries),
    7: ("the envelope: payload, error, attempts 5, first_seen_at", Grader.explains),
    8: ("replay.py: the oldest goes back, with attempts 0", Grader.replays),
}

STRANGE = "This was not foreseen. Look with redis-cli: TYPE, LRANGE; and run the script by hand."


@contextlib.contextmanager
def begin(folder: Path, patience: float = PATIENCE) -> Iterator[Grader]:
    """A grader of the scripts in `folder`. Raises Stop or NoServer if nothing can be graded."""
    folder = folder.expanduser().absolute()
    try:
        there = [name for name in SCRIPTS if (folder / name).is_file()]
    except OSError as error:
        raise Stop(f"{folder} cannot be read: {error.strerror}") from None
    if not there:
        raise Stop(
            f"{folder} has none of {', '.join(SCRIPTS)}; name the folder of your scripts: "
            "QR_DIR=~/qr make grade"
        )
    with (
        tempfile.TemporaryDirectory(prefix="qr-grade-", ignore_cleanup_errors=True) as home,
        Grader(folder, Path(home).resolve(), patience) as grader,
    ):
        yield grader


def rows_of(grader: Grader, steps: Collection[int] = tuple(STEPS)) -> Iterator[Row]:
    """A row for each of `steps`, as they are taken."""
    for step in sorted(steps):
        expected, look = STEPS[step]
        try:
            yield Row(step, expected, look(grader))
        except Wrong as wrong:
            yield Row(step, expected, wrong.seen, wrong.hint)
        except TROUBLE as error:
            yield Row(step, expected, grader.plainly(f"{type(error).__name__}: {error}"), STRANGE)


# --- The table ----------------------------------------------------------------------------------

WIDTHS = (4, 32, 32, 4)  # with the gaps 78 columns


def show(rows: Iterable[Row]) -> bool:
    """Prints the table as it grows, and whether all passed."""
    row("step", "what is expected", "what was seen", "", widths=WIDTHS)
    failed = 0
    for each in rows:
        verdict = "pass" if each.passed else "FAIL"
        row(str(each.step), each.expected, each.seen, verdict, widths=WIDTHS)
        if not each.passed:
            failed += 1
            for line in textwrap.wrap(f"hint: {each.hint}", 72):
                print(f"      {line}", flush=True)
    print(f"\n{len(STEPS) - failed} of {len(STEPS)} steps pass.")
    return failed == 0


def main() -> int:
    # Both, as a shell's `&` ignores the first: workers would inherit that and not hear our Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        folder = Path(setting("QR_DIR", "/root/qr"))
        with begin(folder) as grader:
            print(f"{folder}\na copy of it is graded, on a private Redis\n", flush=True)
            return 0 if show(rows_of(grader)) else 1
    except (Stop, NoServer) as reason:
        print(reason, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `make grade | head`: everything is stopped, nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
