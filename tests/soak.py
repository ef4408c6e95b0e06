#!/usr/bin/env python3
"""The proof for anyone: break everything for SOAK_S seconds, drain, and account for every message.

    make soak                      two minutes
    SOAK_S=3600 make soak          an hour
    SOAK_SEED=42 make soak         the same choices again (the timing differs all the same)

Three workers of three hands each work on a private Redis that keeps every write. Messages of all
kinds are pushed: most return, others fail, hang, swallow what interrupts them, ask for time, kill
their process, kill whoever reads them, or are no JSON. Meanwhile hands, foremen, workers and the
server are killed with -9, frozen and thawed, asked to stop and replaced, paused and cut off, and
dead letters are replayed. Then the breaking ends, what is left is drained, and the ledger is drawn
up. The laws:

    lost                a message that Redis had accepted is in no place, and no run of it returned
    in two places       a message was found twice, or left the queue more often than it entered
    charged unjustly    a message counts more failed runs than it had
    changed             the payload of a dead letter is not what the producer wrote, byte for byte
    same token          two runs of the handler got one fencing token
    left behind         leases or notes of messages that are gone
    stuck               not drained in the end
    a worker left       one that was not killed ended, or one that was asked to stop left with ≠ 0

How many failed runs a message had is known from outside the queue. Each run of the handler leaves a
mark when it begins, with the failed runs that the message counts by then, and one that says how it
ended. Before a blow kills somebody, it holds them still and writes down what they hold: these runs
have failed, too, and no others. To be stopped, to be cut off, to have Redis restarted under it, to
be frozen for less than a lease justifies no charge.

Messages may run to their end more than once: a hand that is killed or frozen after its work and
before Redis knows of it leaves no other choice. The table says how many did. Nor need tokens begin
in order: a hand that is frozen between its claim and its handler begins late, with a low token;
that is what a store can refuse it by.

Exit code: 0 every law held; 1 one did not, and then the folder with all files is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from processes import PROJECT, Process, until
from server import Server

QUEUE = "q:tasks"
WORKERS, HANDS = 3, 3
LEASE, TIME_LIMIT, GRACE = 1.5, 0.8, 0.5  # seconds
SHORT = LEASE / 2  # who is frozen for less has renewed in time: a third of the lease had passed
REJOIN = 5.0  # seconds after an outage in which a worker may not have renewed yet
BACKLOG = 200  # messages waiting at most: what is pushed can be drained
PATIENCE = 120.0  # seconds to drain in
SHOWN = 10  # messages that a sentence names
ID = re.compile(rb'\\?"id\\?": (\d+)')  # the first member of each message, in a dead letter, too

HANDLER = """
import os, re, resource, signal, sys, time
import __main__
from backoff import PermanentError

def mark(id, token, word, charged=0, last=""):
    line = f"{time.monotonic():.6f} {os.getpid()} {id} {token} {word} {charged} {last}\\n"
    fd = os.open(os.environ["QR_DIR"] + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, line.encode())
    os.close(fd)

def process(msg, run):
    kept = msg.get("_retry", {})
    charged = run.attempts + kept.get("earlier_attempts", 0)
    last = kept["history"][-1]["error"] if charged else ""
    try:
        mark(msg["id"], run.token, "began", charged, last)
        work(msg, run)
        if msg["kind"] != "swallow":
            mark(msg["id"], run.token, "ended")
    except BaseException as error:
        mark(msg["id"], run.token, type(error).__name__)
        raise

def work(msg, run):
    kind = msg["kind"]
    if kind == "slow":
        time.sleep(msg["seconds"])
    elif kind == "bad" or (kind == "flaky" and run.attempts < 2):
        raise ValueError(kind)
    elif kind == "permanent":
        raise PermanentError(kind)
    elif kind == "crash":
        mark(msg["id"], run.token, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind in ("swallow", "deaf"):
        swallow(msg, run)
        while kind == "deaf":
            swallow(msg, run)
    elif kind == "hang":
        time.sleep(60)
    elif kind == "stage" and run.stage is None:
        run.checkpoint("half")
        raise ConnectionError("after the first half")
    elif kind == "huge":
        raise ValueError("it could be read")

def swallow(msg, run):
    try:
        time.sleep(60)
    except BaseException as error:
        mark(msg["id"], run.token, type(error).__name__)

# What kills its reader does so before there is a run: the mark has a name of its own for that.

def load(raw, really=__main__.load):
    deadly = raw.startswith(b'{"id": ') and re.match(rb'.{7}(\\d+), "kind": "deadly"', raw)
    if deadly:
        mark(deadly[1].decode(), f"read-{os.getpid()}", "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return really(raw)
    except MemoryError:
        id = re.match(rb'.{7}(\\d+)', raw)[1].decode()
        mark(id, f"read-{os.getpid()}-{time.monotonic_ns()}", "MemoryError")
        raise

__main__.load = load
if sys.platform == "linux":
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 16_000_000, -1))
"""

# How often of a hundred.
KINDS = {
    "ok": 49, "slow": 16, "flaky": 9, "stage": 6, "bad": 4, "permanent": 3, "crash": 3,
    "undecodable": 3, "hang": 2, "swallow": 2, "deaf": 1, "deadly": 2,
    "huge": 0.4 if sys.platform == "linux" else 0,  # only Linux bounds the address space
}  # fmt: skip
NOT_THEIRS = ("Stop", "LeaseLost")  # interruptions that are no failure of the handler
UNCOUNTED = "PermanentError"  # dead at once, `attempts` as they are


def text_of(number: int, kind: str, seconds: float) -> bytes:
    """What the producer pushes; the identity comes first."""
    text = json.dumps({"id": number, "kind": kind, "seconds": seconds}).encode()
    if kind == "undecodable":
        return text[:-1] + b"\xff\xfe"
    if kind == "huge":  # 1.2 MB, and more than 16 MB once it is parsed
        return text[:-1] + b', "a": [' + b"[]," * 400_000 + b"[]]}"
    return text


# ── What happened, seen from outside the queue ────────────────────────────────────────────────


class Mark(NamedTuple):
    """What a run of the handler wrote down.

    `charged`: the failed runs that its message counted when it began; `last`: the error of the
    last of them.
    """

    at: float
    pid: int
    id: int
    token: str
    word: str
    charged: int
    last: str


class Held(NamedTuple):
    """A lease: who has which run."""

    token: str
    foreman: int
    hand: int


class Freeze(NamedTuple):
    """Somebody stood still. `held`: the tokens that they held when it began."""

    start: float
    end: float
    hands: list[int]
    foreman: bool
    held: set[str]


class Soak:
    """The server, the workers, what was pushed, and the ways to break things."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        (folder / "taskproc.py").write_text(HANDLER)
        (folder / "marks").touch()
        self.server = Server(
            folder / "server", append_only=True, options={"appendfsync": "always"}
        ).start()
        self.client = self.server.client(socket_timeout=30)
        self.pushed: dict[int, tuple[str, float]] = {}  # kind and seconds by id
        self.blows: Counter[str] = Counter()
        self.broken: list[str] = []  # laws, as sentences
        self.killed: dict[int, set[str]] = defaultdict(set)  # tokens that the killed held, by id
        self.id_of: dict[str, int] = {}  # by token, where a blow has looked
        self.freezes: list[Freeze] = []
        self.frozen: list[tuple[float, int, Callable[[], None]]] = []  # until, who, how to thaw
        self.thawed: dict[int, float] = {}  # when, by foreman
        self.outages: list[tuple[float, float]] = []  # from when to when
        self.leaving: list[tuple[float, Process]] = []  # since when they have been asked to stop
        self.workers = [self.worker() for _ in range(WORKERS)]

    def start(self, script: str) -> Process:
        settings = {
            "REDIS_URL": self.server.url,
            "QR_DIR": self.folder,
            "QR_APP_DIR": self.folder,
            "QR_CONCURRENCY": HANDS,
            "QR_LEASE": LEASE,
            "QR_TIME_LIMIT": TIME_LIMIT,
            "QR_GRACE": GRACE,
            "QR_BASE": 0.05,
            "QR_CAP": 0.5,
            "QR_DLQ_ALERT": 1_000_000,
        }
        return Process([PROJECT / script], self.folder / "streams", settings)

    def worker(self) -> Process:
        return self.start("worker.py")

    # Messages ─────────────────────────────────────────────────────────────────────────────────

    def push(self, count: int) -> None:
        """As a producer does. Redis has answered, so each of these is the queue's to keep."""
        for kind in self.random.choices(list(KINDS), list(KINDS.values()), k=count):
            number, seconds = len(self.pushed), self.random.uniform(0, TIME_LIMIT * 0.7)
            self.client.lpush(QUEUE, text_of(number, kind, seconds))
            self.pushed[number] = kind, seconds

    def left(self) -> dict[str, int]:
        """What there is to do; and what there must not be if there is nothing to do."""
        with self.client.pipeline(transaction=True) as look:
            look.llen(QUEUE).llen(QUEUE + ":next")
            look.hlen(QUEUE + ":running").zcard(QUEUE + ":retry")
            look.zcard(QUEUE + ":leases").hlen(QUEUE + ":notes")
            places = ("waiting", "next", "running", "retrying", "leases", "notes")
            return dict(zip(places, look.execute(), strict=True))

    def found(self) -> Counter[int]:
        """In how many places each message is, all looked at in one instant."""
        with self.client.pipeline(transaction=True) as look:
            look.lrange(QUEUE, 0, -1).lrange(QUEUE + ":next", 0, -1)
            look.hvals(QUEUE + ":running").zrange(QUEUE + ":retry", 0, -1)
            look.lrange(QUEUE + ":dlq", 0, -1)
            texts = [text for place in look.execute() for text in place]
        return Counter(int(found[1]) for text in texts if (found := ID.search(text[:200])))

    def marks(self) -> Iterator[Mark]:
        for line in (self.folder / "marks").read_text().splitlines():
            at, pid, number, token, word, charged, last = line.split(" ", 6)
            yield Mark(float(at), int(pid), int(number), token, word, int(charged), last)

    def look(self) -> None:
        """Nothing is lost and nothing is in two places, at this instant."""
        found = self.found()
        ended = {mark.id for mark in self.marks() if mark.word == "ended"}
        self.law_of_places(found, ended, "in the middle of it all")

    def law_of_places(self, found: Counter[int], ended: set[int], when: str) -> None:
        """What is in no place must have run to its end."""
        lost = [number for number in self.pushed if not found[number] and number not in ended]
        twice = [number for number, times in found.items() if times > 1]
        if lost:
            self.broken.append(
                f"LOST, {when}: {len(lost)} messages that Redis had accepted are in no place, and "
                f"no run of theirs returned: {self.named(lost)}. This must never happen."
            )
        if twice:
            self.broken.append(
                f"IN TWO PLACES, {when}: {self.named(twice)}: some transition added and did not "
                "remove, or was applied twice; each copy will run."
            )

    def named(self, numbers: list[int]) -> str:
        shown = [f"{number} ({self.pushed[number][0]})" for number in numbers[:SHOWN]]
        if len(numbers) > SHOWN:
            shown.append(f"and {len(numbers) - SHOWN} more")
        return ", ".join(shown)

    # Who holds what ───────────────────────────────────────────────────────────────────────────

    def held(self, *, foreman: int = 0, hand: int = 0) -> set[str]:
        """The tokens that the hands of a foreman, or one hand, have leases for, and their ids."""
        tokens = set()
        for lease in self.client.zrange(QUEUE + ":leases", 0, -1):
            found = re.fullmatch(rb"(\d+) [^:]*:(\d+):[^/]*/(\d+)", lease)
            one = Held(found[1].decode(), int(found[2]), int(found[3])) if found else None
            if one and (one.foreman == foreman or one.hand == hand):
                tokens.add(one.token)
        for token in tokens:
            text = self.client.hget(QUEUE + ":running", token)
            if text and (number := ID.search(text[:200])):
                self.id_of[token] = int(number[1])
        return tokens

    def justify(self, tokens: set[str]) -> None:
        """Their holders are being killed: each of these runs may be charged, once."""
        for token in tokens:
            if token in self.id_of:  # else it was over when we looked
                self.killed[self.id_of[token]].add(token)

    # Blows ────────────────────────────────────────────────────────────────────────────────────

    def kill_hand(self) -> None:
        if hands := self.random.choice(self.workers).children():
            hand = self.random.choice(hands)
            hold_still(hand)
            self.justify(self.held(hand=hand))
            hit(hand, signal.SIGKILL)

    def kill_foreman(self) -> None:
        self.kill(self.random.choice(self.workers), hands_too=False)

    def kill_worker(self) -> None:
        self.kill(self.random.choice(self.workers), hands_too=True)

    def kill(self, worker: Process, hands_too: bool) -> None:
        hands = worker.children()
        before = self.held(foreman=worker.pid)
        worker.send(signal.SIGKILL)
        for hand in hands if hands_too else []:
            hit(hand, signal.SIGKILL)
        worker.wait()
        self.workers.remove(worker)
        # Its leases last for a while yet. A run that began after the first look is among them.
        self.justify(before | self.held(foreman=worker.pid))
        worker.end()

    def stop_worker(self) -> None:
        worker = self.random.choice(self.workers)
        if "handler" in worker.err:  # before that it may not listen yet, and would just die
            worker.send(self.random.choice([signal.SIGTERM, signal.SIGINT]))
            self.workers.remove(worker)
            self.leaving.append((time.monotonic(), worker))

    def farewells(self) -> None:
        """Those who were asked to stop and have ended: they have given back what they held.

        Who left while Redis was away could not: its leases end by themselves, and count.
        """
        for asked, worker in [each for each in self.leaving if not each[1].running()]:
            self.leaving.remove((asked, worker))
            worker.end()
            if code := worker.wait():
                self.broken.append(f"A WORKER LEFT with {code}, asked to stop\n{worker}")
            kept = self.held(foreman=worker.pid)
            if any(end + REJOIN > asked for _, end in self.outages):
                self.justify(kept)
            elif kept:
                self.broken.append(
                    f"LEFT BEHIND: a worker that was asked to stop, with Redis there, has ended "
                    f"and still has leases for {sorted(kept)}\n{worker}"
                )

    def freeze_hand(self) -> None:
        self.freeze(foreman=False, some=True)

    def freeze_foreman(self) -> None:
        self.freeze(foreman=True, some=False)

    def freeze_worker(self) -> None:
        self.freeze(foreman=True, some=True)

    def freeze(self, foreman: bool, some: bool) -> None:
        """A worker or a part of it stands still, for less than a lease or for longer."""
        worker, now = self.random.choice(self.workers), time.monotonic()
        if worker.pid in {who for _, who, _ in self.frozen} or now < self.thawed.get(worker.pid, 0):
            return
        hands = worker.children()
        these = hands if foreman else hands[:1]
        pids = [worker.pid] * foreman + these * some
        for pid in pids:
            hold_still(pid)
        held = self.held(foreman=worker.pid)

        def thaw() -> None:
            for pid in pids:
                hit(pid, signal.SIGCONT)
            end = time.monotonic()
            self.freezes.append(Freeze(now, end, these, foreman, held))
            self.thawed[worker.pid] = end + LEASE / 3  # by then it has renewed

        until = now + self.random.choice([SHORT / 2, SHORT / 2, 2 * LEASE, 3 * LEASE])
        self.frozen.append((until, worker.pid, thaw))

    def restart_server(self) -> None:
        began = time.monotonic()
        self.server.kill()
        time.sleep(self.random.uniform(0, 2 * LEASE))
        self.server.start()
        self.outages.append((began, time.monotonic()))

    def freeze_server(self) -> None:
        began = time.monotonic()
        self.server.freeze()
        time.sleep(self.random.uniform(0, 2 * LEASE))
        self.server.thaw()
        self.client.ping()
        self.outages.append((began, time.monotonic()))

    def cut_connections(self) -> None:
        self.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def flush_scripts(self) -> None:
        self.client.script_flush()

    def pause(self) -> None:
        self.client.set(QUEUE + ":pause", "soak")
        time.sleep(self.random.uniform(0, 1))
        self.client.delete(QUEUE + ":pause")

    def replay_one(self) -> None:
        replay = self.start("replay.py")
        if code := replay.wait():
            self.broken.append(f"THE DESK FAILED: replay.py left with {code}\n{replay}")
        replay.end()

    def blow(self) -> None:
        """One thing is broken, and the workers that died of it are replaced."""
        blows = [
            (self.kill_hand, 8),
            (self.kill_foreman, 3),
            (self.kill_worker, 2),
            (self.stop_worker, 3),
            (self.freeze_hand, 4),
            (self.freeze_foreman, 3),
            (self.freeze_worker, 4),
            (self.restart_server, 2),
            (self.freeze_server, 1),
            (self.cut_connections, 4),
            (self.flush_scripts, 4),
            (self.pause, 1),
            (self.replay_one, 2),
        ]
        methods, weights = zip(*blows, strict=True)
        [method] = self.random.choices(methods, weights)
        name, began = method.__name__.replace("_", " "), time.time()
        method()
        self.blows[name] += 1
        with (self.folder / "blows").open("a") as file:
            print(f"{began:.3f} {time.time():.3f} {name}", file=file)
        self.farewells()
        self.thaw(time.monotonic())
        for worker in [each for each in self.workers if not each.running()]:
            self.left_unasked(worker)
            self.workers.remove(worker)
            worker.end()
        self.workers += [self.worker() for _ in range(WORKERS - len(self.workers))]

    def thaw(self, now: float) -> None:
        for entry in [entry for entry in self.frozen if entry[0] <= now]:
            self.frozen.remove(entry)
            entry[2]()

    def left_unasked(self, worker: Process) -> None:
        self.broken.append(
            f"A WORKER LEFT: nobody had killed it or asked it to stop, and it ended with "
            f"{worker.wait()}\n{worker}"
        )

    # The two halves ───────────────────────────────────────────────────────────────────────────

    def rage(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        report = time.monotonic() + 10
        while time.monotonic() < end:
            self.push(max(0, min(40, BACKLOG - self.left()["waiting"])))
            time.sleep(self.random.uniform(0, 0.6))
            self.blow()
            if time.monotonic() > report:
                report += 10
                so_far = f"{len(self.pushed)} pushed, {self.blows.total()} blows"
                print(f"{so_far}, left: {self.left()}", flush=True)
                self.look()

    def drain(self) -> None:
        """Lets the workers finish in peace and stops them."""
        self.thaw(float("inf"))
        end = time.monotonic() + PATIENCE
        while any((left := self.left()).values()) and time.monotonic() < end:
            time.sleep(0.1)
        work, rest = dict(list(left.items())[:4]), dict(list(left.items())[4:])
        if any(work.values()):
            self.broken.append(
                f"STUCK: {left} after {PATIENCE:g} s of peace: somebody has stopped working."
            )
        elif any(rest.values()):
            self.broken.append(
                f"LEFT BEHIND: {rest}, and no message is running or retrying: a lease that nobody "
                "gives up, or a note that would be read with a message that has gone."
            )
        for worker in self.workers:
            if not worker.running():
                self.left_unasked(worker)
                continue
            until(lambda worker=worker: "handler" in worker.err or not worker.running())
            worker.send(signal.SIGTERM)
            self.leaving.append((time.monotonic(), worker))
        self.workers = []
        for _, worker in self.leaving:
            worker.wait()
        self.farewells()

    def close(self) -> None:
        self.thaw(float("inf"))
        for worker in [worker for _, worker in self.leaving] + self.workers:
            worker.end()
        self.client.close()
        self.server.close()


def hit(pid: int, number: signal.Signals) -> None:
    """Signals a hand, which may have gone in the meantime."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def hold_still(pid: int) -> None:
    """Freezes a process, and returns when it stands still or has gone."""
    hit(pid, signal.SIGSTOP)

    def state() -> str:
        return subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        ).stdout.strip()

    until(lambda: state()[:1] in ("", "T", "Z"))


# ── The ledger ────────────────────────────────────────────────────────────────────────────────


def failed_runs(soak: Soak) -> dict[int, set[str]]:
    """The tokens of the runs of each message that have failed: each may be charged once."""
    failed = {number: set(tokens) for number, tokens in soak.killed.items()}
    began: dict[str, Mark] = {}
    for mark in soak.marks():
        failed.setdefault(mark.id, set())
        if mark.word == "began":
            began[mark.token] = mark
        elif mark.word == "TimeLimitExceeded":  # a failure only if the limit had really passed
            if mark.at >= began[mark.token].at + TIME_LIMIT - 0.05:
                failed[mark.id].add(mark.token)
        elif mark.word not in ("ended", UNCOUNTED, *NOT_THEIRS):
            failed[mark.id].add(mark.token)
    for freeze in soak.freezes:
        within = {
            token
            for token, mark in began.items()
            if mark.pid in freeze.hands and freeze.start <= mark.at <= freeze.end
        }
        upset = any(x < freeze.end and freeze.start < end + REJOIN for x, end in soak.outages)
        expired = freeze.foreman and (freeze.end - freeze.start > SHORT or upset)
        for token in freeze.held | within:
            mark = began.get(token)
            number = mark.id if mark else soak.id_of.get(token)
            overrun = mark and freeze.end > mark.at + TIME_LIMIT + GRACE - 0.05
            if number is not None and (expired or overrun):
                failed.setdefault(number, set()).add(token)
    return failed


class Letter(NamedTuple):
    """A dead letter. `charged`: the failed runs that it counts, before its replays too."""

    id: int
    reason: str
    charged: int
    intact: bool
    history: list[Any]

    @classmethod
    def read(cls, raw: bytes, soak: Soak) -> Letter:
        facts = json.loads(raw)
        charged = facts["attempts"] + facts.get("earlier_attempts", 0)
        number = int(ID.search(raw)[1])  # type: ignore[index]
        own = text_of(number, *soak.pushed[number])
        if isinstance(facts["payload"], dict):
            intact = raw.startswith(b'{"payload": ' + own + b', "error": ')
        else:  # it was not read, so what it counted before is in it
            payload = facts["payload"].encode(errors="surrogateescape")
            intact = payload.startswith(own[:-1]) and payload.endswith(own[-1:])
            with contextlib.suppress(ValueError):
                before = json.loads(payload)
                charged += before.get("attempts", 0)
                charged += before.get("_retry", {}).get("earlier_attempts", 0)
        return cls(number, facts["reason"], charged, intact, facts.get("history", []))


def ledger(soak: Soak) -> None:
    """Prints what became of every message, and notes the laws that were broken."""
    began: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    tokens: Counter[str] = Counter()
    charged: Counter[int] = Counter()
    last: dict[int, str] = {}
    for mark in soak.marks():
        if mark.charged > charged[mark.id]:
            charged[mark.id], last[mark.id] = mark.charged, mark.last
        if mark.word == "began":
            began[mark.id] += 1
            tokens[mark.token] += 1
        elif mark.word == "ended":
            ended[mark.id] += 1
    letters = [Letter.read(raw, soak) for raw in soak.client.lrange(QUEUE + ":dlq", 0, -1)]
    dead = Counter(letter.id for letter in letters)
    for letter in letters:
        if letter.charged > charged[letter.id]:
            charged[letter.id] = letter.charged
            last[letter.id] = str(letter.history[-5:])

    stats = {k.decode(): int(n) for k, n in soak.client.hgetall(QUEUE + ":stats").items()}
    found = soak.found()
    # Each message leaves the queue once, by `done` or as dead, and Redis counts `done` in the step.
    surplus = stats.get("done", 0) + found.total() - len(soak.pushed)
    failed = failed_runs(soak)
    unjust = [n for n, times in charged.items() if times > len(failed.get(n, ()))]
    spared = sum(len(tokens) - charged[n] for n, tokens in failed.items() if n not in unjust)
    changed = [letter.id for letter in letters if not letter.intact]
    reused = [token for token, runs in tokens.items() if runs > 1]
    strange = [n for n in dead if ended[n]]
    reasons = Counter(letter.reason for letter in letters)

    rows = [
        ("pushed", len(soak.pushed), ""),
        ("done", stats.get("done", 0), ""),
        ("dead", dead.total(), ", ".join(f"{n} {reason}" for reason, n in reasons.items())),
        ("runs", began.total(), f"{stats.get('retried', 0)} retried"),
        ("failed runs", sum(map(len, failed.values())), f"{charged.total()} of them charged"),
        ("not charged", spared, "stopped, or nearly: settled before the blow, back in time"),
        ("charged unjustly", len(unjust), "none may be"),
        ("changed", len(changed), "none may be"),
        ("same token", len(reused), "none may be"),
        ("ran to the end twice", sum(n > 1 for n in ended.values()), "killed or frozen after work"),
        ("ended, yet dead", len(strange), "their last runs were killed after the work"),
        ("fallen", stats.get("fallen", 0), "runs that nobody settled"),
        ("released", stats.get("released", 0), "by workers that were stopped"),
        ("refused", stats.get("refused", 0), "results that came too late"),
        ("replayed", stats.get("replayed", 0), ""),
    ]
    print(f"\nblows: {', '.join(f'{n} {name}' for name, n in soak.blows.most_common())}\n")
    for name, count, remark in rows:
        print(f"{name:>21} {count:>7}   {remark}".rstrip())
    soak.law_of_places(found, set(ended), "in the end")
    if surplus:
        soak.broken.append(
            f"IN TWO PLACES or LOST: {stats.get('done', 0)} were done and {found.total()} are "
            f"there still, which is {surplus:+} against the {len(soak.pushed)} that were pushed: a "
            "message was done more than once, or was done and stayed, or left without being done."
        )
    if unjust:
        soak.broken.append(
            f"CHARGED UNJUSTLY: {soak.named(unjust)}: something that is not their fault has "
            "brought them nearer to their death."
        )
    for n in unjust[:SHOWN]:
        soak.broken.append(
            f"    {n} counts {charged[n]} failed runs, but had {len(failed.get(n, ()))}, with the "
            f"tokens {sorted(failed.get(n, ()))}; the end of its history: {last[n]}"
        )
    if changed:
        soak.broken.append(
            f"CHANGED: {soak.named(changed)}: the payload is not what the producer wrote."
        )
    if reused:
        soak.broken.append(
            f"SAME TOKEN: {reused[:SHOWN]} were given to two runs each: a store that refuses late "
            "writers by the token cannot tell them apart."
        )


def main() -> int:
    seconds = float(os.environ.get("SOAK_S") or 120)
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))
    folder = Path(tempfile.mkdtemp(prefix="qr-soak-"))
    print(f"SOAK_SEED={seed}: {seconds:g} s of blows, then a drain", flush=True)
    soak = Soak(folder, seed)
    try:
        soak.rage(seconds)
        soak.drain()
        ledger(soak)
    except BaseException:
        print(f"the files are in {folder}", file=sys.stderr)
        raise
    finally:
        soak.close()
    if soak.broken:
        print("\n" + "\n".join(soak.broken) + f"\nThe files are in {folder}")
        return 1
    print("\nNothing was lost, nothing is in two places, and no message was charged unjustly.")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
