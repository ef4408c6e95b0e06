#!/usr/bin/env python3
"""The proof for anyone: break everything for SOAK_S seconds, drain, and count every message.

    make soak                      two minutes
    SOAK_S=3600 make soak          an hour
    SOAK_SEED=42 make soak         the same choices again (the timing differs all the same)

Three workers of three hands each work on a private Redis that keeps every write. Messages of all
kinds are pushed: most return, others fail, hang, ask for time, kill their process, or are no JSON.
Meanwhile hands, foremen and the server are killed with -9, frozen and thawed, asked to stop and
replaced, and cut off. Then the breaking ends, what is left is drained, and the ledger is drawn up.

Every run of the handler leaves one line when it begins and one when it ends, so what happened to a
message is known from outside the queue. The laws:

    lost            a message that never ran to its end and is not dead: must be none
    in two places   a message that left the queue more than once, or is there still after it left:
                    must be none
    same token      two runs of the handler that got one fencing token: must be none
    stuck           not drained in the end: must be none

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
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from processes import PROJECT, Process
from server import Server

QUEUE = "q:tasks"
PLACES = {"waiting": "", "next": ":next", "running": ":running", "retrying": ":retry"}
WORKERS, HANDS = 3, 3
LEASE, TIME_LIMIT, GRACE = 1.0, 0.4, 0.4  # seconds
BACKLOG = 200  # messages waiting at most: what is pushed can be drained
PATIENCE = 120.0  # seconds to drain in

HANDLER = """
import os, signal, time
from backoff import PermanentError

def mark(msg, run, word):
    fd = os.open(os.environ["QR_DIR"] + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, f"{msg['id']} {run.token} {word}\\n".encode())
    os.close(fd)

def process(msg, run):
    mark(msg, run, "began")
    kind = msg["kind"]
    if kind == "slow":
        time.sleep(msg["seconds"])
    elif kind == "bad" or (kind == "flaky" and run.attempts < 2):
        raise ValueError(kind)
    elif kind == "permanent":
        raise PermanentError(kind)
    elif kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        time.sleep(60)
    elif kind == "deaf":
        while True:
            try: time.sleep(60)
            except BaseException: pass
    elif kind == "stage" and run.stage is None:
        run.checkpoint("half")
        raise ConnectionError("after the first half")
    mark(msg, run, "ended")
"""

# How often of a hundred, and whether it can succeed.
KINDS = {
    "ok": 50, "slow": 16, "flaky": 10, "stage": 6, "bad": 5, "permanent": 4, "crash": 3,
    "undecodable": 3, "hang": 2, "deaf": 1,
}  # fmt: skip


class Soak:
    """The server, the workers, what was pushed, and the ways to break things."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        (folder / "taskproc.py").write_text(HANDLER)
        self.server = Server(
            folder / "server", append_only=True, options={"appendfsync": "always"}
        ).start()
        self.client = self.server.client(socket_timeout=30)
        self.workers = [self.worker() for _ in range(WORKERS)]
        self.leaving: list[Process] = []
        self.pushed: dict[int, str] = {}
        self.blows: Counter[str] = Counter()
        self.frozen: list[tuple[float, Callable[[], object]]] = []  # until when, and how to thaw

    def worker(self) -> Process:
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
        return Process([PROJECT / "worker.py"], self.folder / "streams", settings)

    # Messages ---------------------------------------------------------------------------------

    def push(self, count: int) -> None:
        """As a producer does. Redis has answered, so each of these is the queue's to keep."""
        for kind in self.random.choices(list(KINDS), list(KINDS.values()), k=count):
            number = len(self.pushed)
            message = {"id": number, "kind": kind, "seconds": self.random.uniform(0, 0.3)}
            text = json.dumps(message)
            self.client.lpush(QUEUE, text[:-1] if kind == "undecodable" else text)
            self.pushed[number] = kind

    def left(self) -> dict[str, int]:
        with self.client.pipeline(transaction=True) as look:
            look.llen(QUEUE).llen(QUEUE + ":next")
            look.hlen(QUEUE + ":running").zcard(QUEUE + ":retry")
            return dict(zip(PLACES, look.execute(), strict=True))

    # Blows ------------------------------------------------------------------------------------

    def kill_hand(self) -> None:
        if hands := self.random.choice(self.workers).children():
            hit(self.random.choice(hands), signal.SIGKILL)

    def kill_foreman(self) -> None:
        worker = self.random.choice(self.workers)
        worker.send(signal.SIGKILL)
        worker.wait()

    def kill_worker(self) -> None:
        worker = self.random.choice(self.workers)
        worker.send_group(signal.SIGKILL)
        worker.wait()

    def stop_worker(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.err:  # before its first line it may not listen yet, and would just die
            worker.send(self.random.choice([signal.SIGTERM, signal.SIGINT]))
            self.workers.remove(worker)
            self.leaving.append(worker)

    def freeze_hand(self) -> None:
        if hands := self.random.choice(self.workers).children():
            hand = self.random.choice(hands)
            hit(hand, signal.SIGSTOP)
            self.thaw_later(lambda: hit(hand, signal.SIGCONT))

    def freeze_worker(self) -> None:
        worker = self.random.choice(self.workers)
        worker.send_group(signal.SIGSTOP)
        self.thaw_later(lambda: worker.running() and worker.send_group(signal.SIGCONT))

    def restart_server(self) -> None:
        self.server.kill()
        time.sleep(self.random.uniform(0, 2))
        self.server.start()

    def freeze_server(self) -> None:
        self.server.freeze()
        time.sleep(self.random.uniform(0, 4))
        self.server.thaw()

    def cut_connections(self) -> None:
        self.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def flush_scripts(self) -> None:
        self.client.script_flush()

    def thaw_later(self, thaw: Callable[[], object]) -> None:
        self.frozen.append((time.monotonic() + self.random.uniform(0, 3 * LEASE), thaw))

    def blow(self) -> None:
        """One thing is broken, and the workers that died of it are replaced."""
        blows = [
            (self.kill_hand, 8),
            (self.kill_foreman, 3),
            (self.kill_worker, 2),
            (self.stop_worker, 3),
            (self.freeze_hand, 4),
            (self.freeze_worker, 4),
            (self.restart_server, 2),
            (self.freeze_server, 1),
            (self.cut_connections, 4),
            (self.flush_scripts, 4),
        ]
        methods, weights = zip(*blows, strict=True)
        [method] = self.random.choices(methods, weights)
        method()
        self.blows[method.__name__.replace("_", " ")] += 1
        self.thaw(time.monotonic())
        self.workers = [each for each in self.workers if each.running()]
        self.workers += [self.worker() for _ in range(WORKERS - len(self.workers))]

    def thaw(self, now: float) -> None:
        for entry in [entry for entry in self.frozen if entry[0] <= now]:
            self.frozen.remove(entry)
            entry[1]()

    # The two halves ---------------------------------------------------------------------------

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

    def drain(self) -> bool:
        """Lets the workers finish in peace and stops them; False if they do not get done."""
        self.thaw(float("inf"))
        end = time.monotonic() + PATIENCE
        while any(self.left().values()) and time.monotonic() < end:
            time.sleep(0.1)
        drained = not any(self.left().values())
        for worker in self.workers:
            while not worker.err and worker.running():
                time.sleep(0.1)
            worker.send(signal.SIGTERM)
        for worker in self.leaving + self.workers:
            if code := worker.wait():
                raise AssertionError(f"a worker that was asked to stop left with {code}\n{worker}")
        return drained

    def close(self) -> None:
        for worker in self.leaving + self.workers:
            worker.end()
        self.client.close()
        self.server.close()


def hit(pid: int, number: signal.Signals) -> None:
    """Signals a hand, which may have gone in the meantime."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- The ledger -----------------------------------------------------------------------------------


def ledger(soak: Soak, drained: bool) -> list[str]:
    """Prints what became of every message; returns the laws that were broken, as sentences."""
    began: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    tokens: Counter[str] = Counter()
    for line in (soak.folder / "marks").read_text().splitlines():
        number, token, word = line.split()
        if word == "began":
            began[int(number)] += 1
            tokens[token] += 1
        else:
            ended[int(number)] += 1

    dead: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for text in soak.client.lrange(QUEUE + ":dlq", 0, -1):
        letter = json.loads(text)
        payload = letter["payload"]
        if isinstance(payload, str):  # the undecodable ones lack a bracket, and only that
            payload = json.loads(payload + "}")
        dead[payload["id"]] += 1
        reasons[letter["reason"]] += 1

    stats = {k.decode(): int(n) for k, n in soak.client.hgetall(QUEUE + ":stats").items()}
    left = soak.left()
    lost = [n for n in soak.pushed if not ended[n] and not dead[n]]
    doubled = [n for n, times in dead.items() if times > 1]
    # Each message leaves the queue once, by `done` or by `dead`, and Redis counts it in that step.
    surplus = stats.get("done", 0) + dead.total() + sum(left.values()) - len(soak.pushed)
    reused = [token for token, runs in tokens.items() if runs > 1]
    strange = [n for n in dead if soak.pushed[n] in ("ok", "slow", "flaky", "stage") and ended[n]]

    rows = [
        ("pushed", len(soak.pushed), ""),
        ("done", stats.get("done", 0), ""),
        ("dead", dead.total(), ", ".join(f"{n} {reason}" for reason, n in reasons.items())),
        ("left", sum(left.values()), "" if drained else f"STUCK: {left}"),
        ("lost", len(lost), "none may be"),
        ("in two places", len(doubled) + max(0, surplus), "none may be"),
        ("same token", len(reused), "none may be"),
        ("runs", began.total(), f"{stats.get('retried', 0)} retried"),
        ("ran to the end twice", sum(n > 1 for n in ended.values()), "killed or frozen after work"),
        ("done and dead", len(strange), "their last runs were killed after the work"),
        ("runs taken over", stats.get("reclaimed", 0), "their lease had ended"),
        ("late results refused", stats.get("refused", 0), ""),
        ("released", stats.get("released", 0), "by workers that were stopped"),
    ]
    print(f"\nblows: {', '.join(f'{n} {name}' for name, n in soak.blows.most_common())}\n")
    for name, count, remark in rows:
        print(f"{name:>21} {count:>7}   {remark}".rstrip())
    broken = []
    if lost or surplus < 0:
        broken.append(
            f"LOST: {max(len(lost), -surplus)} messages that Redis had accepted are in no place "
            f"and were never finished: {lost[:20]}. This must never happen."
        )
    if doubled or surplus > 0:
        broken.append(
            f"IN TWO PLACES: {doubled[:20]} are dead more than once, and the queue counts "
            f"{surplus} endings more than messages: some transition was applied twice."
        )
    if reused:
        broken.append(
            f"SAME TOKEN: {reused[:20]} were given to two runs each: a store that refuses late "
            "writers by the token cannot tell them apart."
        )
    if not drained:
        broken.append(f"STUCK: {left} after {PATIENCE:g} s of peace: somebody has stopped working.")
    return broken


def main() -> int:
    seconds = float(os.environ.get("SOAK_S") or 120)
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))
    folder = Path(tempfile.mkdtemp(prefix="qr-soak-"))
    print(f"SOAK_SEED={seed}: {seconds:g} s of blows, then a drain", flush=True)
    soak = Soak(folder, seed)
    try:
        soak.rage(seconds)
        broken = ledger(soak, soak.drain())
    except BaseException:
        print(f"the files are in {folder}", file=sys.stderr)
        raise
    finally:
        soak.close()
    if broken:
        print("\n" + "\n".join(broken) + f"\nThe files are in {folder}")
        return 1
    print("\nNothing was lost, and nothing is in two places.")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
