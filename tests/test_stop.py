"""How a worker ends: signals, the grace, the death of the foreman, and a worker that was frozen."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Conservation, ledger
from processes import PROJECT, Process, descendants, until
from server import Server

from worker import FINISH, NOW, ONE_REQUEST, Foreman, Note, read_settings, release_wait

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
    elif kind == "asks":
        mark(msg, os.read(0, 100).decode().strip())
    elif kind == "fails":
        gate()
        time.sleep(msg["seconds"])
        raise ValueError("at the end of the grace")
    mark(msg, "ended")
"""

LONG = ("--lease", 3600, "--time-limit", 3600)
NEVER = ("--base", 10**9, "--cap", 10**9)  # seconds: no retry is due while a test looks


class Stage:
    """A worker with the handler above, and what it noted."""

    def __init__(self, run: Callable[..., Process], law: Conservation, folder: Path) -> None:
        self.run, self.law, self.folder = run, law, folder
        self.names = law.queue.names

    def worker(self, *flags: object, **settings: object) -> Process:
        return self.run("worker.py", *flags, **settings)

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

    def released(self) -> list[tuple[bytes, float, list[Note]]]:
        """What is retrying: its text, when it is due (ms), and its notes."""
        client, found = self.law.client, []
        for member, due in client.zrange(self.names.retry, 0, -1, withscores=True):
            token, _, text = member.partition(b":")
            found.append((text, due, [*Note.read(client.hget(self.names.notes, token) or b"")]))
        return found

    def recovered(self, process: Process) -> None:
        """Returns when somebody has let fall whatever had expired when this was called."""
        client, leases = self.law.client, self.names.leases
        client.zadd(leases, {"1 nobody": 1})
        until(lambda: client.zscore(leases, "1 nobody") is None, saw=lambda: process)


@pytest.fixture
def stage(
    run: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> Stage:
    handler(HANDLER)
    return Stage(run, conservation, qr_dir)


def says(process: Process, text: str) -> None:
    until(lambda: text in process.err, saw=lambda: process)


def ready(process: Process, hands: int = 1) -> None:
    """Returns when the worker has said all that it says at its start, and the hands exist."""
    says(process, "worker: handler ")
    until(lambda: len(process.children()) == hands, saw=lambda: process)


def send_all(process: Process, number: signal.Signals) -> None:
    """To the foreman, and then to its hands, which are not in its group."""
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):  # ended by the signal before
            os.kill(pid, number)


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
    ("number", "group"),
    [
        *((signal.SIGTERM, group) for group in (False, True)),
        *((signal.SIGINT, group) for group in (False, True)),
        *((signal.SIGQUIT, True), (signal.SIGHUP, True)),
    ],
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
    """B02: the message is done or waiting, or was given back at once, and it never ran twice."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    stage.push(*["ok"] * 5)
    for _ in range(5):
        process = stage.worker(*LONG)
        says(process, "worker: ")
        time.sleep(rng.uniform(0, 0.1))  # not a wait: the moment is what is tried
        assert process.stop() == 0, (seed, process)
        assert "Traceback" not in process.err, (seed, process)
        assert stage.counts().keys() <= {"waiting", "retry"}, (seed, process)
        for text, due, notes in stage.released():
            assert b"attempts" not in text and due == 0, (seed, process)
            assert {note.reason for note in notes} == {"released"}, (seed, process)
    assert len(stage.marks("began")) == len(stage.marks("ended")) == stage.law.done(), seed


# --- Busy -----------------------------------------------------------------------------------------


def test_a_handler_that_finishes_in_the_grace_is_settled_and_nothing_more_is_claimed(
    stage: Stage,
) -> None:
    stage.push("gate", "ok")
    process = stage.worker(*LONG)
    stage.began(process)
    process.send(signal.SIGTERM)
    for hand in process.children():  # as its foreman will, but before the gate is open
        os.kill(hand, signal.SIGTERM)
    stage.open_gate()
    assert process.wait() == 0
    assert stage.stats() == {"done": 1}
    assert stage.counts() == {"waiting": 1}


def test_a_handler_that_does_not_finish_in_the_grace_is_released_uncharged(stage: Stage) -> None:
    """Byte for byte the message that was pushed, due at once, with a note that does not count."""
    stage.push("gate", "ok")
    process = stage.worker("--grace", 0.3, *LONG)
    [hand] = stage.began(process)
    before = ledger(stage.law.queue, stage.law.client)
    assert process.stop() == 0
    after = ledger(stage.law.queue, stage.law.client)
    assert (after["waiting"], after["retry"]) == (before["waiting"], before["running"])
    assert (stage.counts(), stage.stats()) == ({"waiting": 1, "retry": 1}, {"released": 1})
    [(_, due, [note])] = stage.released()
    assert (due, note.reason, note.error) == (0, "released", "stopped in mid-run")
    assert re.fullmatch(rf".+:{process.pid}:[0-9a-f]{{16}}/{hand}", note.owner)
    assert "released token=" in process.err
    stage.open_gate()
    assert stage.worker("--burst", *LONG).wait() == 0
    assert stage.stats() == {"released": 1, "done": 2}
    assert not stage.law.client.exists(stage.names.notes)


def test_a_message_that_is_released_again_and_again_waits_longer_each_time(stage: Stage) -> None:
    """It may be what gets the worker stopped. It costs no attempt all the same."""
    stage.push("fails", seconds=0)
    for n in range(4):
        process = stage.worker("--grace", 0.1, *LONG)
        stage.began(process, n + 1)
        now_ms = stage.law.queue.now_ms()
        assert process.stop() == 0
        [(text, due, notes)] = stage.released()
        assert b"attempts" not in text
        assert [note.reason for note in notes] == ["released"] * (n + 1)
        wait = release_wait(n)
        assert wait == (None, 1, 2, 4)[n]
        if wait is None:
            assert due == 0
        else:
            assert now_ms + wait * 1000 <= due <= stage.law.queue.now_ms() + wait * 1000
        member = stage.law.client.zrange(stage.names.retry, 0, -1)[0]
        stage.law.client.zadd(stage.names.retry, {member: 0})  # its time has come
    assert stage.stats() == {"released": 4}
    assert release_wait(10**6) == 300
    stage.open_gate()
    assert stage.worker("--burst", "--max-attempts", 1, *LONG).wait() == 0
    [letter] = map(json.loads, stage.law.client.lrange(stage.names.dlq, 0, -1))
    assert (letter["attempts"], letter["released"], len(letter["history"])) == (1, 4, 1)
    assert not stage.law.client.exists(stage.names.notes)


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
    assert (stage.counts(), stage.stats()) == ({"retry": 1}, {"released": 2})
    [(_, due, notes)] = stage.released()
    assert [note.owner.rpartition("/")[2] for note in notes] == [str(first), pids[-1]]
    assert due == notes[1].at_ms + 1000  # its foreman knew that it had been released before


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
    assert after["retry"] == before["running"]
    assert (stage.counts(), stage.stats()) == ({"retry": 1}, {"released": 1})
    [(_, due, [note])] = stage.released()
    assert (due, note.reason) == (0, "released")
    assert "SIGTERM" not in process.err


@pytest.mark.parametrize("to", [Process.send, Process.send_group, send_all])
def test_a_second_signal_means_now(
    stage: Stage, to: Callable[[Process, signal.Signals], None]
) -> None:
    """The grace would last an hour."""
    stage.push("gate", "gate")
    process = stage.worker("--concurrency", 2, "--grace", 3600, *LONG)
    stage.began(process, 2)
    to(process, signal.SIGINT)
    # Two signals within half a second are one request, so the second is sent until it is heard.
    until(lambda: to(process, signal.SIGINT) or not process.running() or time.sleep(0.1))
    assert process.wait() == 0
    assert (stage.counts(), stage.stats()) == ({"retry": 2}, {"released": 2})


@pytest.mark.parametrize("to", [Process.send, send_all])
def test_a_burst_of_signals_is_one_request(
    stage: Stage, to: Callable[[Process, signal.Signals], None]
) -> None:
    """As `timeout` sends two, and a nervous person ten. All arrive at one instant."""
    stage.push("gate")
    process = stage.worker("--concurrency", 2, "--grace", 3600, *LONG)
    ready(process, 2)
    hands = stage.began(process)
    process.send(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        to(process, number)
    process.send(signal.SIGCONT)
    until(lambda: process.children() == hands, saw=lambda: process)  # the idle one has left
    stage.open_gate()
    assert process.wait() == 0
    assert (stage.counts(), stage.stats()) == ({}, {"done": 1})


def test_a_worker_under_nohup_goes_on_when_the_terminal_is_gone(
    stage: Stage, tmp_path: Path
) -> None:
    """SIGHUP arrives ignored, and stays so; SIGTERM stops it as ever."""
    launcher = tmp_path / "nohup.py"
    launcher.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        f"os.execv(sys.executable, [sys.executable, {str(PROJECT / 'worker.py')!r}])\n"
    )
    process = stage.run(launcher)
    ready(process)
    process.send_group(signal.SIGHUP)
    stage.push("ok")
    until(lambda: stage.law.done() == 1, saw=lambda: process)
    assert process.running()
    assert process.stop() == 0


def test_signals_within_half_a_second_are_one_request_however_they_arrive(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that comes later means now; a signal that asks for nothing never does."""
    foreman = Foreman(read_settings(["--redis", server.url]))
    foreman.wake, foreman.waker = os.pipe()
    orders = []
    monkeypatch.setattr(foreman, "order", lambda order, number: orders.append(order))
    for number in (signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.write(foreman.waker, bytes([number]))
        foreman.sleep()
    assert orders == [FINISH]
    foreman.stopped_at -= ONE_REQUEST
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        os.write(foreman.waker, bytes([number]))
        foreman.sleep()
    assert orders == [FINISH, NOW]
    for fd in (foreman.wake, foreman.waker):
        os.close(fd)


def test_a_hundred_signals_in_two_seconds_lose_nothing(stage: Stage) -> None:
    stage.push(*["gate"] * 4)
    process = stage.worker("--concurrency", 4, "--grace", 3600, *LONG)
    targets = [process.pid, *stage.began(process, 4)]

    def storm() -> bool:
        for pid in targets if process.running() else []:
            with suppress(ProcessLookupError):
                os.kill(pid, random.choice([signal.SIGTERM, signal.SIGINT]))
        return not process.running()

    until(storm)
    assert process.wait() == 0
    assert (stage.counts(), stage.stats()) == ({"retry": 4}, {"released": 4})
    assert "Traceback" not in process.err


def test_failing_at_the_very_end_of_the_grace_leaves_one_copy(stage: Stage) -> None:
    """B68: charged or released, never both. The law is checked after every round."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    for n in range(3):
        (stage.folder / "gate").unlink(missing_ok=True)
        # A message that was released runs again in the next round, or this one does.
        stage.push("fails", seconds=0.3 + rng.uniform(-0.05, 0.05))
        process = stage.worker("--grace", 0.3, *LONG, *NEVER)
        stage.began(process, n + 1)
        stage.open_gate()
        assert process.stop() == 0, (seed, process)
        stage.law.check()
        assert stage.counts().keys() <= {"waiting", "retry"}, (seed, process)
        assert sum(stage.counts().values()) == n + 1, (seed, process)
        for text, _, notes in stage.released():
            assert (b'"attempts": 1' in text) != bool(notes), (seed, text, notes)
        stats = stage.stats()
        assert stats.get("retried", 0) + stats.get("released", 0) == n + 1, (seed, process)


def test_leases_are_renewed_while_a_worker_is_stopping(stage: Stage) -> None:
    """B70: for longer than a lease, beside an idle worker that would take over what has expired."""
    stage.push("gate")
    process = stage.worker("--lease", 1, "--grace", 60)
    stage.began(process)
    second = stage.worker("--lease", 1)
    process.send(signal.SIGTERM)
    began = stage.law.queue.now_ms()
    until(lambda: stage.law.queue.now_ms() > began + 1600)
    stage.recovered(second)
    stage.open_gate()
    assert process.wait() == 0 and second.stop() == 0
    assert len(stage.marks("began")) == 1
    assert stage.stats() == {"done": 1}


# --- What belongs to a hand -----------------------------------------------------------------------


TERMINAL = """
import contextlib, fcntl, os, sys, termios
os.dup2(os.open(sys.argv[1], os.O_RDWR), 0)
with contextlib.suppress(OSError):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def test_on_a_terminal_a_handler_can_ask_and_ctrl_c_lets_it_finish(
    stage: Stage, tmp_path: Path
) -> None:
    """Its hand stays in the terminal's group: `breakpoint()` works."""
    launcher = tmp_path / "terminal.py"
    launcher.write_text(TERMINAL)
    person, terminal = pty.openpty()
    stage.push("asks", "ok")
    process = stage.run(launcher, os.ttyname(terminal), PROJECT / "worker.py", *LONG)
    [hand] = stage.began(process)
    assert os.getpgid(hand) == process.pid
    os.write(person, b"\x03")
    until(lambda: stage.law.done() or b"^C" in os.read(person, 100), saw=lambda: process)
    os.write(person, b"yes\n")
    assert process.wait() == 0, process
    assert stage.marks("yes") and len(stage.marks("began")) == 1
    assert (stage.counts(), stage.stats()) == ({"waiting": 1}, {"done": 1})
    for fd in (person, terminal):
        os.close(fd)


@pytest.mark.parametrize("how", ["--burst", "SIGTERM"])
@pytest.mark.parametrize("left", ["atexit.register(time.sleep, 3600)", "thread.start()"])
def test_what_does_not_end_with_its_hand_is_ended_when_the_grace_is_over(
    stage: Stage, handler: Callable[[str], Path], left: str, how: str
) -> None:
    """An exit hook, or a thread that nobody told: no alarm, for the messages are settled."""
    handler(f"""
import atexit, threading, time
thread = threading.Thread(target=time.sleep, args=(3600,))
{left}
def process(msg): pass
""")
    stage.push("ok")
    process = stage.worker("--grace", 0.3, *([how] if how == "--burst" else []))
    until(lambda: stage.law.done() == 1, saw=lambda: process)
    assert (process.wait() if how == "--burst" else process.stop()) == 0
    assert (stage.counts(), stage.stats()) == ({}, {"done": 1})
    assert "SIGKILL" not in process.err


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
    second = stage.worker("--lease", 1, *NEVER)
    until(lambda: stage.stats().get("retried") == 2, saw=lambda: second)
    assert second.stop() == 0
    assert (stage.counts(), stage.stats()) == ({"retry": 2}, {"fallen": 2, "retried": 2})
    for text, _, notes in stage.released():
        message = json.loads(text)
        assert (message["attempts"], notes) == (1, [])
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


def test_the_sign_of_life_of_a_dead_worker_fades_after_a_day(stage: Stage) -> None:
    """Nobody guesses who lives: a number that is no process here may be one in a container."""
    client, workers = stage.law.client, stage.names.workers
    dead = stage.worker()
    until(lambda: client.zcard(workers) == 2, saw=lambda: dead)
    dead.send(signal.SIGKILL)
    dead.wait()
    signs = client.zrange(workers, 0, -1)
    day = 86_400_000
    old, recent = b"x:1:0000/foreman", b"x:2:0000/foreman"
    now = stage.law.queue.now_ms()
    client.zadd(workers, {old: now - day - 1, recent: now - day + 3_600_000})
    other = stage.worker("--lease", 1)
    until(lambda: client.zscore(workers, old) is None, saw=lambda: other)
    until(lambda: client.zcard(workers) == 5, saw=lambda: client.zrange(workers, 0, -1))
    assert other.stop() == 0
    assert {*client.zrange(workers, 0, -1)} == {recent, *signs}


def test_a_worker_frozen_past_its_lease_is_refused_says_so_once_and_works_on(
    stage: Stage,
) -> None:
    """B10 too: no lease and no record comes back for what it no longer owns."""
    stage.push("gate")
    frozen = stage.worker("--lease", 1)
    stage.began(frozen)
    send_all(frozen, signal.SIGSTOP)
    second = stage.worker("--lease", 1, "--base", 0.01)
    until(lambda: stage.stats().get("retried") == 1, saw=lambda: second)
    stage.open_gate()
    stage.push("ok")  # wakes the second worker, which then meets the retry too
    until(lambda: stage.law.done() == 2, saw=lambda: second)
    send_all(frozen, signal.SIGCONT)
    says(frozen, "had been taken over")
    assert second.stop() == 0
    stage.push("ok")
    until(lambda: stage.law.done() == 3, saw=lambda: frozen)
    assert frozen.stop() == 0
    assert frozen.err.count("had been taken over") == 1
    assert stage.stats() == {"fallen": 1, "retried": 1, "done": 3, "refused": 1}
    assert not stage.law.client.exists(stage.names.leases, stage.names.notes)


def test_a_worker_frozen_for_less_than_its_lease_keeps_its_message(stage: Stage) -> None:
    """B04: another worker lets fall what has expired meanwhile, and not this."""
    stage.push("gate")
    frozen = stage.worker("--lease", 60)
    stage.began(frozen)
    second = stage.worker("--lease", 1)
    send_all(frozen, signal.SIGSTOP)
    stage.recovered(second)
    send_all(frozen, signal.SIGCONT)
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
