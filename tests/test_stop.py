"""How a worker ends: signals, the grace, the death of the foreman, and a worker that was frozen."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Conservation, ledger
from processes import Process, until

# Messages say how long to run; each beginning and end leaves a line of `id word pid`.
HANDLER = """
import ctypes, json, os, signal, sys, time

def mark(msg, word):
    fd = os.open(os.environ["QR_DIR"] + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, f"{msg['id']} {word} {os.getpid()}\\n".encode())
    os.close(fd)

def gate():
    while not os.path.exists(os.environ["QR_DIR"] + "/gate"):
        time.sleep(0.01)

def process(msg):
    mark(msg, "began")
    kind = msg.get("kind")
    if kind == "gate":
        gate()
    elif kind == "deaf":  # it does not hear the polite signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gate()
    elif kind == "default":  # as asyncio leaves it behind
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mark(msg, "ready")
        gate()
    elif kind == "free":  # from the kernel's promise to end it with its parent (Linux)
        ctypes.CDLL(None).prctl(1, 0)
        mark(msg, "ready")
        gate()
    elif kind == "stubborn":
        while True:
            try:
                time.sleep(0.02)
                mark(msg, "works")
            except BaseException:
                pass
    elif kind == "fails":
        gate()
        time.sleep(msg["seconds"])
        raise ValueError("at the end of the grace")
    mark(msg, "ended")
"""

LONG = ("--lease", 3600, "--time-limit", 3600)


class Stage:
    """A worker with the handler above, and what it noted."""

    def __init__(self, worker: Callable[..., Process], law: Conservation, folder: Path) -> None:
        self.worker, self.law, self.folder = worker, law, folder
        self.names = law.queue.names

    def marks(self, word: str = "") -> list[str]:
        path = self.folder / "marks"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if word in line]

    def began(self, process: Process, count: int = 1) -> list[int]:
        """The pids of the hands, once so many messages have begun."""
        until(lambda: len(self.marks("began")) >= count, saw=lambda: process)
        return [int(line.split()[2]) for line in self.marks("began")]

    def push(self, *kinds: str, **more: Any) -> None:
        first = self.law.pushed.total()
        texts = [json.dumps({"id": first + i, "kind": k} | more) for i, k in enumerate(kinds)]
        self.law.push(*texts)

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def counts(self) -> dict[str, int]:
        places = ledger(self.law.queue, self.law.client)
        return {place: len(texts) for place, texts in places.items() if texts}

    def stats(self) -> dict[str, int]:
        pairs = self.law.client.hgetall(self.names.stats)
        return {name.decode(): int(n) for name, n in pairs.items()}


@pytest.fixture
def stage(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> Stage:
    handler(HANDLER)
    return Stage(worker, conservation, qr_dir)


def says(process: Process, text: str) -> None:
    until(lambda: text in process.err, saw=lambda: process)


def ready(process: Process, hands: int = 1) -> None:
    """Returns when the worker has said all that it says at its start, and the hands exist."""
    says(process, "worker: handler ")
    until(lambda: len(process.children()) == hands, saw=lambda: process)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie whose parent died is reaped by the system, sooner or later; it does nothing.
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


# --- Idle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)]
)
def test_an_idle_worker_leaves_at_once_and_in_silence(
    stage: Stage, number: signal.Signals, group: bool
) -> None:
    """Exit code 0, long before its sleep in Redis would end; no traceback, no goodbye."""
    process = stage.worker("--concurrency", 2)
    ready(process, 2)
    before = process.err
    process.send_group(number) if group else process.send(number)
    assert process.wait(4) == 0, process  # the sleep lasts 5 s
    assert process.err == before
    assert stage.law.client.zcard(stage.names.workers) == 0


def test_a_worker_that_waits_for_redis_leaves_at_once(stage: Stage, tmp_path: Path) -> None:
    process = stage.worker(REDIS_URL=f"unix://{tmp_path}/nothing.sock")
    says(process, "does not answer")
    assert process.stop() == 0
    assert len(process.err.splitlines()) == 1


def test_a_worker_that_still_imports_its_handler_leaves_at_once(
    stage: Stage, handler: Callable[[str], Path]
) -> None:
    """Nothing runs yet, so there is no grace to be waited for; it would last an hour."""
    handler(HANDLER + 'mark({"id": 0}, "imports")\nwhile True: time.sleep(0.01)\n')
    process = stage.worker("--grace", 3600, *LONG)
    until(lambda: stage.marks("imports"), saw=lambda: process)
    assert process.stop() == 0, process
    assert "cannot load" not in process.err


def test_a_signal_at_any_moment_of_the_start_leaves_nothing_behind(stage: Stage) -> None:
    """B02: the message is done or waiting, and it never ran twice."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    stage.push(*["ok"] * 5)
    for _ in range(5):
        process = stage.worker(*LONG)
        says(process, "worker: ")
        time.sleep(rng.uniform(0, 0.1))  # not a wait: the moment is what is tried
        assert process.stop() == 0, (seed, process)
        assert "Traceback" not in process.err, (seed, process)
        assert stage.counts().keys() <= {"waiting"}, (seed, process)
    assert len(stage.marks("began")) == len(stage.marks("ended")) == stage.law.done(), seed


# --- Busy -----------------------------------------------------------------------------------------


def test_a_handler_that_finishes_in_the_grace_is_settled_and_nothing_more_is_claimed(
    stage: Stage,
) -> None:
    stage.push("gate", "ok")
    process = stage.worker(*LONG)
    stage.began(process)
    process.send(signal.SIGTERM)
    stage.open_gate()
    assert process.wait() == 0
    assert stage.stats() == {"done": 1}
    assert stage.counts() == {"waiting": 1}


def test_a_handler_that_does_not_finish_in_the_grace_is_released_uncharged(stage: Stage) -> None:
    """Byte for byte the message that was pushed, in front of those that wait."""
    stage.push("gate", "ok")
    process = stage.worker("--grace", 0.3, *LONG)
    stage.began(process)
    before = ledger(stage.law.queue, stage.law.client)
    assert process.stop() == 0
    after = ledger(stage.law.queue, stage.law.client)
    assert after["waiting"] == before["waiting"] + before["running"]
    assert (stage.counts(), stage.stats()) == ({"waiting": 2}, {"released": 1})
    assert "released token=" in process.err
    stage.open_gate()
    assert stage.worker("--burst", *LONG).wait() == 0
    assert stage.law.done() == 2


def test_a_handler_that_swallows_the_interruption_is_killed_before_its_message_is_released(
    stage: Stage,
) -> None:
    """B71: another worker waits for the message, and the two never run at once."""
    stage.push("stubborn")
    process = stage.worker("--grace", 0.1, *LONG)
    [first] = stage.began(process)
    second = stage.worker("--grace", 0.1, *LONG)
    assert process.stop() == 0
    assert "SIGKILL" not in process.err  # nobody is to be alarmed: we did it
    stage.began(second, 2)
    until(lambda: stage.marks()[-1].split()[2] != str(first), saw=lambda: second)
    pids = [line.split()[2] for line in stage.marks()]
    assert pids == sorted(pids, key=lambda pid: pid != str(first))
    assert second.stop() == 0
    assert stage.stats() == {"released": 2}


def test_a_handler_that_ignores_the_signal_still_finishes_as_the_last(stage: Stage) -> None:
    """The request to stop is not lost with the signal."""
    stage.push("deaf", "ok", "ok")
    process = stage.worker(*LONG)
    stage.began(process)
    process.send(signal.SIGTERM)
    time.sleep(0.2)  # the signal has met deaf ears; were it not so, the test would pass as well
    stage.open_gate()
    assert process.wait() == 0
    assert stage.marks("began") == stage.marks("0 began")
    assert stage.counts() == {"waiting": 2}


def test_a_handler_that_lets_the_signal_kill_it_is_released_uncharged(stage: Stage) -> None:
    """It has put SIGTERM back to the default: a stop is not an attempt."""
    stage.push("default")
    process = stage.worker(*LONG)
    until(lambda: stage.marks("ready"), saw=lambda: process)
    before = ledger(stage.law.queue, stage.law.client)
    assert process.stop() == 0
    after = ledger(stage.law.queue, stage.law.client)
    assert after["waiting"] == before["running"]
    assert (stage.counts(), stage.stats()) == ({"waiting": 1}, {"released": 1})
    assert "SIGTERM" not in process.err


@pytest.mark.parametrize("group", [False, True], ids=["foreman", "group"])
def test_a_second_signal_means_now(stage: Stage, group: bool) -> None:
    """The grace would last an hour."""
    stage.push("gate", "gate")
    process = stage.worker("--concurrency", 2, "--grace", 3600, *LONG)
    stage.began(process, 2)
    send = process.send_group if group else process.send
    send(signal.SIGINT)
    # Two signals within half a second are one request, so the second is sent until it is heard.
    until(lambda: send(signal.SIGINT) or not process.running() or time.sleep(0.1))
    assert process.wait() == 0
    assert (stage.counts(), stage.stats()) == ({"waiting": 2}, {"released": 2})


@pytest.mark.parametrize("group", [False, True], ids=["foreman", "group"])
def test_a_burst_of_signals_is_one_request(stage: Stage, group: bool) -> None:
    """As `timeout` sends two, and a nervous person ten."""
    stage.push("gate")
    process = stage.worker("--grace", 3600, *LONG)
    stage.began(process)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        process.send_group(number) if group else process.send(number)
    stage.open_gate()
    assert process.wait() == 0
    assert (stage.counts(), stage.stats()) == ({}, {"done": 1})


def test_a_hundred_signals_in_two_seconds_lose_nothing(stage: Stage) -> None:
    stage.push(*["gate"] * 4)
    process = stage.worker("--concurrency", 4, "--grace", 3600, *LONG)
    stage.began(process, 4)

    def storm() -> bool:
        if process.running():
            process.send_group(random.choice([signal.SIGTERM, signal.SIGINT]))
        return not process.running()

    until(storm)
    assert process.wait() == 0
    assert (stage.counts(), stage.stats()) == ({"waiting": 4}, {"released": 4})
    assert "Traceback" not in process.err


def test_failing_at_the_very_end_of_the_grace_leaves_one_copy(stage: Stage) -> None:
    """B68: charged or released, never both. The law is checked after every round."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    for n in range(3):
        (stage.folder / "gate").unlink(missing_ok=True)
        # The oldest goes first: a message that was released runs again in the next round.
        stage.push("fails", seconds=0.3 + rng.uniform(-0.05, 0.05))
        process = stage.worker("--grace", 0.3, *LONG, "--base", 1000, "--cap", 1000)
        stage.began(process, n + 1)
        stage.open_gate()
        assert process.stop() == 0, (seed, process)
        stage.law.check()
        assert stage.counts().keys() <= {"waiting", "retry"}, (seed, process)
        assert sum(stage.counts().values()) == n + 1, (seed, process)


def test_leases_are_renewed_while_a_worker_is_stopping(stage: Stage) -> None:
    """B70: for longer than a lease, beside an idle worker that would take over what has expired."""
    stage.push("gate")
    process = stage.worker("--lease", 1, "--grace", 60)
    stage.began(process)
    second = stage.worker("--lease", 1)
    ready(second)
    process.send(signal.SIGTERM)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 1.6)
    stage.open_gate()
    assert process.wait() == 0 and second.stop() == 0
    assert len(stage.marks("began")) == 1
    assert stage.stats() == {"done": 1}


# --- Dead and frozen foremen ----------------------------------------------------------------------


def test_when_the_foreman_is_killed_its_hands_stop_and_another_worker_takes_over(
    stage: Stage,
) -> None:
    """Even hands that swallow everything; each message costs one attempt, and says why."""
    stage.push("stubborn", "gate")
    process = stage.worker("--concurrency", 2, "--lease", 1)
    hands = stage.began(process, 2)
    process.send(signal.SIGKILL)
    process.wait()
    until(lambda: all(map(gone, hands)))
    second = stage.worker("--lease", 1, "--base", 1000, "--cap", 1000)
    until(lambda: stage.stats().get("retried") == 2, saw=lambda: second)
    assert second.stop() == 0
    assert stage.counts() == {"retry": 2}
    for text in ledger(stage.law.queue, stage.law.client)["retry"]:
        message = json.loads(text)
        assert message["attempts"] == 1
        assert message["_retry"]["history"][0]["error"].startswith("WorkerDied: its lease ended ")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_hand_that_the_kernel_does_not_end_leaves_when_its_foreman_is_dead(stage: Stage) -> None:
    """A change of the user id clears the death signal, too. It settles and claims nothing more."""
    stage.push("free", "ok")
    process = stage.worker(*LONG)
    until(lambda: stage.marks("ready"), saw=lambda: process)
    process.send(signal.SIGKILL)
    process.wait()
    stage.open_gate()
    [line] = until(lambda: stage.marks("ended"), saw=lambda: process)  # it has outlived its foreman
    until(lambda: gone(int(line.split()[2])), saw=stage.counts)
    assert (stage.counts(), stage.stats()) == ({"waiting": 1, "running": 1}, {})


def test_the_notes_of_a_dead_worker_are_removed_by_the_next_on_its_machine(stage: Stage) -> None:
    """Its own number may be that of the dead one; who lives or is elsewhere is left alone."""
    client, workers = stage.law.client, stage.names.workers
    dead = stage.worker()
    until(lambda: client.zcard(workers) == 2, saw=lambda: dead)
    dead.send(signal.SIGKILL)
    dead.wait()

    def notes() -> set[str]:
        return {note.decode() for note in client.zrange(workers, 0, -1)}

    removed = notes()
    [host] = {note.partition(":")[0] for note in removed}
    other = stage.worker("--lease", 1)
    removed.add(f"{host}:{other.pid}:0000/foreman")
    kept = {f"{host}:{os.getpid()}:0000/foreman", f"{host}x:{dead.pid}:0000/foreman", f"{host}:x"}
    client.zadd(workers, dict.fromkeys(removed | kept, stage.law.queue.now_ms()))
    until(lambda: not notes() & removed, saw=notes)
    assert kept < notes()
    assert other.stop() == 0
    assert notes() == kept


def test_a_worker_frozen_past_its_lease_is_refused_says_so_once_and_works_on(
    stage: Stage,
) -> None:
    """B10 too: no lease and no record comes back for what it no longer owns."""
    stage.push("gate")
    frozen = stage.worker("--lease", 1)
    stage.began(frozen)
    frozen.send_group(signal.SIGSTOP)
    second = stage.worker("--lease", 1, "--base", 0.01)
    until(lambda: stage.stats().get("retried") == 1, saw=lambda: second)
    stage.open_gate()
    stage.push("ok")  # wakes the second worker, which then meets the retry too
    until(lambda: stage.law.done() == 2, saw=lambda: second)
    frozen.send_group(signal.SIGCONT)
    says(frozen, "its result is refused")
    assert second.stop() == 0
    stage.push("ok")
    until(lambda: stage.law.done() == 3, saw=lambda: frozen)
    assert frozen.stop() == 0
    assert frozen.err.count("refused") == 1
    assert stage.stats() == {"reclaimed": 1, "retried": 1, "done": 3, "refused": 1}
    assert stage.law.client.zcard(stage.names.leases) == 0


def test_a_worker_frozen_for_less_than_its_lease_keeps_its_message(stage: Stage) -> None:
    """B04: another worker's recovery runs meanwhile, time and again."""
    stage.push("gate")
    frozen = stage.worker("--lease", 3)
    stage.began(frozen)
    second = stage.worker("--lease", 1)
    ready(second)
    frozen.send_group(signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 0.8)
    frozen.send_group(signal.SIGCONT)
    stage.open_gate()
    until(lambda: stage.law.done() == 1, saw=lambda: frozen)
    assert frozen.stop() == 0 and second.stop() == 0
    assert stage.stats() == {"done": 1}


def test_a_frozen_foreman_does_not_stop_its_hand(stage: Stage) -> None:
    """Short messages flow while the foreman stands still, and it catches up afterwards."""
    process = stage.worker("--lease", 1)
    ready(process)
    process.send(signal.SIGSTOP)
    stage.push(*["ok"] * 5)
    until(lambda: stage.law.done() == 5, saw=lambda: process)
    process.send(signal.SIGCONT)
    assert process.stop() == 0
    assert stage.stats() == {"done": 5}
