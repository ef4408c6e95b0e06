"""The scripts run as a learner runs them: real processes, output in files, always ended.

Nothing here sleeps for a fixed time and hopes. `until` looks again and again, and when it gives up
it says what it saw.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE = 30.0  # seconds; only a failing wait ever takes that long

T = TypeVar("T")


def until(
    condition: Callable[[], T], timeout: float = PATIENCE, saw: Callable[[], object] | None = None
) -> T:
    """The first true value of `condition()`. Raises AssertionError with what was seen instead.

    saw  what to show then, the worker's output for instance; else the condition's last value
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            shown = str(saw()) if saw else repr(value)
            raise AssertionError(f"not seen within {timeout:g} s; seen instead: {shown}")
        time.sleep(0.01)


def clean_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """What a fresh terminal has, and `settings`, where None is a variable that is not set."""
    mine = ("REDIS_URL", "QR_", "PYTHON", "PYTEST", "FORCE", "NO_COLOR", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return kept | {name: str(value) for name, value in settings.items() if value is not None}


def usual_signals() -> None:
    """As in a fresh terminal, whatever the test runner inherited: `nohup` ignores SIGHUP."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def rows() -> list[tuple[int, int]]:
    """Every process that still runs, with its parent."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    split = (line.split() for line in listing.stdout.splitlines())
    return [(int(pid), int(parent)) for pid, parent, state, *_ in split if state[0] != "Z"]


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid` now; a foreman's hands, for instance."""
    return sorted(each for each, parent in rows() if parent == pid)


def descendants(pid: int) -> list[int]:
    """The process, its children, and theirs."""
    return [pid, *(each for child in children(pid) for each in descendants(child))]


def session(leader: int) -> list[int]:
    """The processes of a session, orphans too: a hand leads its own group, but no session."""
    found = []
    for pid, _ in rows():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


class Guard:
    """A shell that kills a process group, and removes a folder, once we are gone, however we went.

    It reads from a pipe whose other end only we hold: end of file is our death, `kill -9` included,
    on Linux and macOS alike. What is left behind: the group, if the guard is killed as well; and if
    we forked without exec, that child holds the pipe too and the group lives as long as it does.
    """

    def __init__(self, leader: int, folder: Path | str = "") -> None:
        self.shell = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"; rm -rf "$1"', str(leader), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Call it before the group's leader is waited for: its number may then be another's."""
        self.shell.kill()
        self.shell.communicate()


class Process:
    """A running `python <script> <flags>`, its two streams in files of `folder`.

    The process leads a group of its own, so that signals can go to it alone or, as Ctrl-C does, to
    it and its children.
    """

    def __init__(
        self,
        command: Iterable[object],
        folder: Path,
        environment: Mapping[str, object],
        cwd: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        serial = len(list(folder.glob("*.out")))
        self.out_file, self.err_file = folder / f"{serial}.out", folder / f"{serial}.err"
        with self.out_file.open("wb") as out, self.err_file.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment(environment),
                cwd=cwd or folder,
                start_new_session=True,
                preexec_fn=usual_signals,
            )
        self.guard = Guard(self.popen.pid)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self.out_file.read_text(errors="surrogateescape")

    @property
    def err(self) -> str:
        """What it has logged so far."""
        return self.err_file.read_text(errors="surrogateescape")

    def running(self) -> bool:
        return self.popen.poll() is None

    def children(self) -> list[int]:
        return children(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        self.popen.send_signal(number)

    def send_group(self, number: signal.Signals) -> None:
        """Sends a signal to this process and its children at once, as a terminal does."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code (-9 after SIGKILL). Raises AssertionError if the process does not end."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s\n{self}") from None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to stop and returns the exit code."""
        self.send(number)
        return self.wait()

    def end(self) -> None:
        """Nothing of this process is left, nor of its session: hands lead groups of their own."""
        self.guard.dismiss()
        self.popen.kill()
        while left := [pid for pid in session(self.pid) if pid != self.pid]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    def __repr__(self) -> str:
        return f"--- stdout\n{self.out}--- stderr\n{self.err}---"
