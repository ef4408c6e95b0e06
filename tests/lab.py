#!/usr/bin/env python3
"""The exercise, walked through for real: install the scripts, then do each step as a learner does.

    make lab                        in /root/qr, or in ./lab where that cannot be written
    QR_DIR=~/qr make lab            somewhere else
    REDIS_URL=redis://… make lab    on a Redis of yours, if nothing is in its q:tasks
    FORCE=1 make lab                replaces other scripts of the same names; they stay as .bak

Nothing is mocked and nothing is imported from the scripts: this file starts commands, pushes
messages, and reads files and keys, with the eyes of somebody who knows only the exercise.

Exit code: 0 every step passed; 1 a step failed, or nothing was tried because something of yours
would have been in danger.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from processes import PROJECT, Process, until
from server import NoServer, Server

SCRIPTS = ("backoff.py", "worker.py", "replay.py", "taskproc.py")
QUEUE = "q:tasks"
PLACES = tuple(QUEUE + suffix for suffix in ("", ":next", ":running", ":retry", ":dlq"))
QUICK = 0.1  # seconds, the base of the walk's retries; the exercise's is 1
PATIENCE = 20.0


class Stop(Exception):
    """The walk does not begin; the text says what is in the way and what the person can do."""


# --- Installing ---------------------------------------------------------------------------------
# What we installed is written down, with its hash, beside it. A script that is neither today's
# nor one that we wrote down is somebody's work, even if it began as ours.

RECORD = ".retry-lab.sha256"  # `sha256sum --check` can read it


def install(folder: Path, force: bool) -> str:
    """Puts the four scripts into `folder`; returns what it did, in a sentence.

    Raises Stop, with nothing changed, if a script there is somebody else's and `force` is false.
    """
    if folder.samefile(PROJECT):
        return f"the scripts are in {folder} already"
    record = folder / RECORD
    written = record.read_text().split() if record.exists() else []
    old = [name for name in SCRIPTS if different(folder / name)]
    foreign = [name for name in old if digest(folder / name) not in written]
    if foreign and not force:
        raise Stop(
            f"{folder} has {', '.join(foreign)} of your own; nothing was changed there. "
            "Another folder: QR_DIR=~/qr make lab. To replace (a .bak is kept): FORCE=1 make lab"
        )
    kept = [f"{name} is now {set_aside(folder / name)}" for name in foreign]
    for name in SCRIPTS:
        put(PROJECT / name, folder / name)
    lines = [f"{digest(folder / name)}  {name}\n" for name in SCRIPTS]
    record.write_text("".join(lines))
    return "; ".join([f"the scripts are in {folder}", *kept])


def different(path: Path) -> bool:
    """Something is at `path`, and it is not the project's script of that name."""
    return os.path.lexists(path) and digest(path) != digest(PROJECT / path.name)


def digest(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal; "" for what cannot be read as one."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def set_aside(path: Path) -> str:
    """Renames a file to a free name and returns that."""
    names = (f"{path.name}.bak{number or ''}" for number in itertools.count())
    free = next(name for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(path.with_name(free))
    return free


def put(source: Path, target: Path) -> None:
    """Copies as a whole: a reader of `target` sees the old file or the new one."""
    if digest(source) != digest(target):
        fresh = target.with_name(f".{target.name}.new")
        shutil.copyfile(source, fresh)
        fresh.chmod(0o644)
        fresh.replace(target)


def install_handler(folder: Path) -> str:
    """Puts the example handler into `folder` if none is there; returns what it did or why not."""
    handler = folder / "taskproc.py"
    if os.path.lexists(handler):
        return f"the handler is {handler}, which was there"
    if not writable(folder):
        return f"{folder} cannot be written; the handler is the taskproc.py beside worker.py"
    put(PROJECT / "taskproc.py", handler)
    return f"the handler is {handler}, our example"


def writable(folder: Path) -> bool:
    """`folder` exists now, or could be made, and files can be put into it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()


def working_folder() -> tuple[Path, str]:
    """QR_DIR, or ./lab of the project where that cannot be written; and a remark about it."""
    wanted = Path(setting("QR_DIR", "/root/qr"))
    if writable(wanted):
        return wanted, ""
    if writable(PROJECT / "lab"):
        return PROJECT / "lab", f"{wanted} cannot be written, so this walk uses {PROJECT / 'lab'}; "
    raise Stop(f"neither {wanted} nor {PROJECT / 'lab'} can be written; name a folder with QR_DIR")


def setting(name: str, default: str) -> str:
    value = os.environ.get(name, default)
    if not value:
        raise Stop(f"{name} is set but empty; unset it for {default}")
    return value


# --- The Redis ----------------------------------------------------------------------------------


@contextlib.contextmanager
def some_redis() -> Iterator[tuple[str, redis.Redis, str]]:
    """REDIS_URL if it is set, else a private server: its URL, a client, and what it is.

    Raises Stop if the queue there is in use: the walk would eat what others pushed.
    """
    if "REDIS_URL" not in os.environ:
        kept = PROJECT / ".redis"
        kept.mkdir(exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="lab-", dir=kept) as folder,
            Server(Path(folder), append_only=True) as server,
            server.client() as client,
        ):
            yield server.url, client, f"a private server for this walk ({server.binary})"
        return
    url = setting("REDIS_URL", "a private server")
    try:
        client = redis.Redis.from_url(url)
        refuse_a_queue_in_use(client)
    except (redis.RedisError, ValueError) as error:
        raise Stop(f"the Redis that REDIS_URL names cannot be used: {error}") from None
    with client:
        yield url, client, "the one that REDIS_URL names"


def refuse_a_queue_in_use(client: redis.Redis) -> None:
    filled = [key for key in PLACES if client.exists(key)]
    if filled:
        raise Stop(
            f"this Redis has something in {', '.join(filled)}, and the walk would work it off. "
            "Unset REDIS_URL for a private server, or name another database"
        )
    seconds, _ = client.time()
    if client.zcount(f"{QUEUE}:workers", (seconds - 10) * 1000, "+inf"):
        raise Stop(f"a worker is at work on {QUEUE} there; stop it first")


# --- The walk -----------------------------------------------------------------------------------


class Walk:
    """A learner with a terminal: starts commands in QR_DIR, pushes, reads files and keys.

    Each step returns what was seen, or raises AssertionError with what was wrong.
    """

    def __init__(self, folder: Path, url: str, client: redis.Redis, streams: Path) -> None:
        self.folder, self.client, self.streams = folder, client, streams
        self.environment = {"REDIS_URL": url, "QR_DIR": str(folder), "QR_BASE": str(QUICK)}
        app = Path(os.environ.get("QR_APP_DIR", "/opt/app"))
        self.handler = app / "taskproc.py"
        if not self.handler.exists():  # that folder could not be written
            self.handler = folder / "taskproc.py"
        elif "QR_APP_DIR" in os.environ:
            self.environment["QR_APP_DIR"] = str(app)
        self.started: list[Process] = []
        self.mark = uuid.uuid4().hex[:8]  # tells our messages from everybody else's

    # What a learner can do

    def python(self, *command: object) -> Process:
        """Starts `python <command>` in QR_DIR."""
        process = Process(command, self.streams, self.environment, cwd=self.folder)
        self.started.append(process)
        return process

    def finish(self, *command: object) -> Process:
        """Runs `python <command>` to its end, which must be a good one."""
        process = self.python(*command)
        code = process.wait(PATIENCE * 3)
        assert code == 0, f"python {' '.join(map(str, command))} ended with {code}\n{process}"
        return process

    def message(self, kind: str, **more: float) -> str:
        return json.dumps({"kind": kind, "lab": self.mark, **more})

    def lines(self, name: str) -> list[str]:
        """The lines of a file in QR_DIR; none if it is not there."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def texts(self, key: str) -> list[Any]:
        """What a list holds, as bytes, from left to right."""
        return list(self.client.lrange(key, 0, -1))

    def dead(self) -> list[Any]:
        """The dead letters, oldest first."""
        return self.texts(f"{QUEUE}:dlq")[::-1]

    def until(self, condition: Callable[[], bool], process: Process) -> None:
        until(lambda: condition() or not process.running(), PATIENCE, lambda: process)
        assert condition(), f"the worker ended with {process.wait()}\n{process}"

    def ctrl_c(self, process: Process) -> None:
        """Stops a worker as a terminal does: the signal reaches it and its children."""
        process.send_group(signal.SIGINT)
        code = process.wait(PATIENCE)
        assert code == 0, f"Ctrl-C ended the worker with exit code {code}, not 0\n{process}"
        assert "Traceback" not in process.err, f"Ctrl-C left a traceback\n{process}"

    # The eight steps

    def consumes(self) -> str:
        self.client.lpush(QUEUE, self.message("ok"))
        self.client.rpush(QUEUE, self.message("ok"))
        worker = self.python("worker.py")
        self.until(lambda: not self.client.exists(*PLACES), worker)
        self.client.lpush(QUEUE, self.message("ok"))
        self.until(lambda: not self.client.exists(*PLACES), worker)
        assert worker.running(), f"the worker stopped by itself\n{worker}"
        self.ctrl_c(worker)
        return "3 of 3 done; Ctrl-C: exit code 0"

    def requeues(self) -> str:
        before = len(self.lines("requeue.out"))
        self.client.lpush(QUEUE, self.message("bad"))
        worker = self.python("worker.py")
        new: list[str] = []

        def twice() -> bool:
            new[:] = self.lines("requeue.out")[before:]
            return any(line.startswith("attempts=2 ") for line in new)

        self.until(twice, worker)
        self.ctrl_c(worker)
        assert [line.split()[0] for line in new[:2]] == ["attempts=1", "attempts=2"], new
        assert all(line in worker.out.splitlines() for line in new[:2]), worker
        return new[1]

    def schedule(self) -> str:
        self.finish("backoff.py")
        seen = self.lines("schedule.txt")
        assert seen == [f"attempt={n} wait={2**n}" for n in range(6)], seen
        return f"{seen[0]} … {seen[-1]}"

    def jitter(self) -> str:
        first = self.lines("jitter.txt")
        self.finish("backoff.py")
        seen = self.lines("jitter.txt")
        assert len(seen) == 20 and seen != first, seen
        assert all(re.fullmatch(r"\d\.\d{6}", line) and float(line) <= 8 for line in seen), seen
        return f"20 draws from {min(seen)} to {max(seen)}"

    def capped(self) -> str:
        seen = " ".join(self.lines("capped.txt"))
        assert seen == "1 2 4 8 16 30 30 30 30", seen
        return seen

    def buries(self) -> str:
        worker = self.python("worker.py")
        self.until(lambda: self.client.llen(f"{QUEUE}:dlq") == 1, worker)
        self.ctrl_c(worker)
        assert not self.client.exists(*PLACES[:-1]), "something is left outside the DLQ"
        return f"LLEN {QUEUE} 0, LLEN {QUEUE}:dlq 1"

    def explains(self) -> str:
        envelope = json.loads(self.dead()[0])
        wanted = ["payload", "error", "attempts", "first_seen_at"]
        assert list(envelope)[:4] == wanted, envelope
        assert envelope["payload"] == json.loads(self.message("bad")), envelope
        assert envelope["error"] and envelope["attempts"] == 5, envelope
        return f"attempts {envelope['attempts']}, {envelope['error']}"

    def replays(self) -> str:
        said = self.finish("replay.py").out
        assert self.client.llen(f"{QUEUE}:dlq") == 0, "the dead letter is still there"
        (text,) = self.texts(QUEUE)
        message = json.loads(text)
        assert message["attempts"] == 0 and message["kind"] == "bad", text
        self.finish("replay.py")
        assert self.texts(QUEUE) == [text], "an empty DLQ changed the queue"
        return said.strip().splitlines()[0]

    # The second act

    def push_each(self, kinds: list[str]) -> None:
        for kind in kinds:
            text = (
                f"no JSON {self.mark}" if kind == "(no JSON)" else self.message(kind, seconds=0.1)
            )
            self.client.lpush(QUEUE, text)

    def dead_by_kind(self) -> dict[str, tuple[str, str]]:
        """The kind of each dead letter of this walk → its reason and error."""
        found = {}
        for text in self.dead():
            facts = json.loads(text)
            payload = facts["payload"]
            kind = payload["kind"] if isinstance(payload, dict) else "(no JSON)"
            found[kind] = facts["reason"], facts["error"]
        return found

    # The end

    def tidy(self) -> None:
        """Ends every process, and takes back what this walk pushed."""
        for process in self.started:
            process.end()
        with contextlib.suppress(redis.RedisError):  # gone, and a step has said so
            self.take_back()

    def take_back(self) -> None:
        """Removes from the queue what this walk pushed, and nothing else."""
        mark = self.mark.encode()
        for key in (QUEUE, f"{QUEUE}:next", f"{QUEUE}:dlq"):
            for text in self.texts(key):
                if mark in text:
                    self.client.lrem(key, 1, text)
        for member in self.client.zrange(f"{QUEUE}:retry", 0, -1):
            if mark in member:
                self.client.zrem(f"{QUEUE}:retry", member)
                self.client.hdel(f"{QUEUE}:notes", member.partition(b":")[0])
        for token, text in self.client.hgetall(f"{QUEUE}:running").items():
            if mark in text:  # its lease ends, and is then forgotten
                self.client.hdel(f"{QUEUE}:running", token)
                self.client.hdel(f"{QUEUE}:notes", token)


STEPS: tuple[tuple[str, str, Callable[[Walk], str]], ...] = (
    ("1", "worker.py takes what LPUSH or RPUSH brings, before and during its run", Walk.consumes),
    ("2", "a failure goes back with its count: attempts=2 in requeue.out after two", Walk.requeues),
    ("3", "schedule.txt: the wait doubles", Walk.schedule),
    ("4", "jitter.txt: 20 draws of 0 to 8 s, fresh on each run", Walk.jitter),
    ("5", "capped.txt: never above 30 s", Walk.capped),
    ("6", "a restarted worker counts on; after five failures the message is dead", Walk.buries),
    ("7", "the dead letter says what, why, how often and since when", Walk.explains),
    (
        "8",
        "replay.py: back on the queue, attempts 0; on an empty DLQ it moves nothing",
        Walk.replays,
    ),
)


# What a step meets when something is wrong: not as it should be, not of that shape, not there.
TROUBLE = (AssertionError, LookupError, TypeError, ValueError, OSError, redis.RedisError)


def first_act(walk: Walk) -> bool:
    """The eight steps of the exercise, a row of the table each. True if all passed."""
    row("step", "what was checked", "what was seen", "")
    troubles = []
    for step, checked, look in STEPS:
        try:
            row(step, checked, look(walk), "pass")
        except TROUBLE as error:
            row(step, checked, str(error).partition("\n")[0], "FAIL")
            troubles.append(f"step {step}: {error}")
    print(f"\nRetries waited 0 to {QUICK:g} s, doubling (QR_BASE={QUICK:g}), to keep this short.")
    for trouble in troubles:
        print(f"\n{trouble}")
    return not troubles


WIDTHS = (4, 40, 44, 4)


def fitted(widths: tuple[int, ...]) -> tuple[int, ...]:
    """These columns, and the gaps between them, on a terminal that may be too narrow for them.

    The two in the middle give what is missing, and keep enough for a word.
    """
    first, left, right, last = widths
    room = shutil.get_terminal_size((100, 24)).columns - first - last - 6
    if room >= left + right:
        return widths
    narrower = max(12, room * left // (left + right))
    return first, narrower, max(12, room - narrower), last


def row(*cells: str, widths: tuple[int, ...] = WIDTHS) -> None:
    """Prints a row of the table, its cells wrapped to their columns."""
    fit = fitted(widths)
    wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, fit, strict=True)]
    for line in itertools.zip_longest(*wrapped, fillvalue=""):
        cut = (f"{cell:{width}}" for cell, width in zip(line, fit, strict=True))
        print("  ".join(cut).rstrip(), flush=True)


# --- The second act -----------------------------------------------------------------------------
# What a handler can do, and where that leads. Only with our example: another handler has other
# kinds.

ENDINGS = {
    "ok": "done",
    "slow": "done",
    "flaky": "done",
    "busy": "done",
    "bad": "exhausted",
    "crash": "worker_died",
    "hang": "timed_out",
    "permanent": "permanent",
    "missing": "permanent",
    "(no JSON)": "undecodable",
}
BURST = ("worker.py", "--burst", "--concurrency", "2", "--time-limit", "0.3")


def second_act(walk: Walk) -> bool:
    """Every way to end, pushed at once and worked off. True if each ended as it should."""
    if digest(walk.handler) != digest(PROJECT / "taskproc.py"):
        print("\nThe second act needs our taskproc.py, and workers here find another: left out.")
        return True
    print(f"\nEvery way to end, pushed at once and worked off by: python {' '.join(BURST)}\n")
    walk.take_back()
    walk.push_each(list(ENDINGS))
    try:
        said = walk.finish(*BURST).out
    except AssertionError as error:
        print(error)
        return False
    dead = walk.dead_by_kind()
    row("", "kind", "how it ended", "")
    for kind, wanted in ENDINGS.items():
        runs = 1 + len(re.findall(rf"^attempts=\d+ kind={re.escape(kind)} ", said, re.M))
        ended, why = dead.get(kind, ("done", ""))
        seen = f"dead, {ended}: {why}" if why else f"done at run {runs}"
        row("", kind, seen, "pass" if ended == wanted else "FAIL")
    return {kind: dead.get(kind, ("done", ""))[0] for kind in ENDINGS} == ENDINGS


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without "…"
    try:
        if not __debug__:
            raise Stop(
                "the checks of this walk are assertions; run it without -O or PYTHONOPTIMIZE"
            )
        folder, remark = working_folder()
        print(remark + install(folder, force=os.environ.get("FORCE") == "1"))
        print(install_handler(Path(setting("QR_APP_DIR", "/opt/app"))))
        with (
            tempfile.TemporaryDirectory(prefix="qr-lab-") as streams,
            some_redis() as (url, client, what),
        ):
            print(f"the Redis is {what}\n")
            walk = Walk(folder, url, client, Path(streams))
            try:
                return 0 if first_act(walk) & second_act(walk) else 1
            finally:
                walk.tidy()
    except (Stop, NoServer) as reason:
        print(reason, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `make lab | head`: everything is stopped, nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
