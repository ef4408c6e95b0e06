"""What a handler starts, keeps open, closes, changes, swallows: it costs its own run at most."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import Process, children, until
from proxy import Proxy

if TYPE_CHECKING:
    from stage import Stage

pytest_plugins = ("stage",)
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux has it, and no other")
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


# --- One event loop -----------------------------------------------------------------------------


def test_an_asynchronous_client_made_at_import_works_for_every_message(stage: Stage) -> None:
    """Its connections belong to an event loop: there is one, for the whole life of the hand."""
    stage.plays("""
import redis.asyncio
client = redis.asyncio.from_url(os.environ["REDIS_URL"])

async def process(msg):
    mark(await client.incr("runs"))
""")
    stage.push(*({"id": i} for i in range(20)))
    process = stage.drain()
    assert stage.stats() == {"done": 20}
    assert stage.marks() == [str(n) for n in range(1, 21)]
    assert "closed" not in process.err and "left" not in process.err


def test_a_task_that_the_handler_leaves_behind_is_named_and_goes_on(stage: Stage) -> None:
    """It runs while the next message does, and is cancelled, as its own code sees, at the end."""
    stage.plays("""
import asyncio
kept = []

async def beats():
    try:
        while True:
            mark("beat")
            await asyncio.sleep(0.005)
    finally:
        mark("cancelled")

async def process(msg):
    if msg["id"] == 0:
        kept.append(asyncio.create_task(beats()))
    await asyncio.sleep(0.1)
    mark("end", msg["id"])
""")
    stage.push(*({"id": i} for i in range(3)))
    process = stage.drain()
    assert stage.stats() == {"done": 3}
    [line] = stage.lines(process, "has left a task running")
    assert " beats;" in line
    marks = stage.marks()
    assert marks[-1] == "cancelled"
    for first in ("end 0", "end 1"):
        at = marks.index(first)
        assert "beat" in marks[at : marks.index("end 2")]


# --- Signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_a_stop_of_the_whole_group_does_not_reach_what_a_handler_has_started(
    stage: Stage, number: signal.Signals
) -> None:
    """As systemd and a closed terminal send it. The child ends in peace, and so does the run."""
    stage.plays("""
import subprocess

def process(msg):
    command = 'echo began >&3; while [ ! -e "$QR_DIR/gate" ]; do sleep 0.02; done'
    subprocess.run(["sh", "-c", command.replace("&3", f"&{MARKS}")], check=True, pass_fds=[MARKS])
    mark("ended")
""")
    stage.push({"kind": "good"})
    process = stage.start()
    stage.marked("began", process)
    process.send_group(number)
    until(lambda: stopping(process), saw=lambda: process)
    stage.open_gate()
    assert process.wait() == 0, process
    assert stage.stats() == {"done": 1} and stage.marks("ended")


def stopping(process: Process) -> bool:
    """Tells whether the foreman has heard a signal: it has passed it on to its hand."""
    for hand in process.children():
        status = Path(f"/proc/{hand}/status")
        if status.exists() and "SigPnd:\t0000000000000000" in status.read_text():
            continue
    return True


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGHUP])
def test_a_signal_that_asks_to_leave_lets_the_running_message_finish(
    stage: Stage, number: signal.Signals
) -> None:
    """Like SIGTERM: the run is settled, nothing new is claimed, exit code 0."""
    stage.plays("def process(msg):\n    mark('began')\n    gate()\n")
    stage.push({"id": 0}, {"id": 1})
    process = stage.start()
    stage.marked("began", process)
    process.send(number)
    time.sleep(0.05)  # if it is too short, nothing is tested, and nothing fails
    stage.open_gate()
    assert process.wait() == 0, process
    assert stage.stats()["done"] == len(stage.marks("began"))
    assert stage.counts().keys() <= {"waiting"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM])
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_that_means_nothing_changes_nothing(
    stage: Stage, number: signal.Signals, group: bool
) -> None:
    """The foreman ignores it, while it starts and later, and so its hands and their messages."""
    stage.plays("def process(msg):\n    mark('began')\n    gate()\n")
    stage.push({"id": 0}, {"id": 1})
    process = stage.start("--concurrency", 2, "--burst")
    stage.marked("began", process, count=2)
    hands = process.children()
    process.send_group(number) if group else process.send(number)
    for _ in range(20):
        process.send(number)
    time.sleep(0.05)
    assert process.children() == hands
    stage.open_gate()
    assert process.wait() == 0, process
    assert stage.stats() == {"done": 2}


@linux
def test_what_a_handler_starts_hears_the_signals_that_any_program_hears(stage: Stage) -> None:
    """Nothing of ours is inherited: neither what we ignore nor what we block."""
    stage.plays("""
import subprocess

def process(msg):
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    mark(int(facts["SigIgn"], 16) | int(facts["SigBlk"], 16))
""")
    stage.push({"id": 0})
    stage.drain()
    [ignored] = stage.marks()
    for number in (
        signal.SIGTERM,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCHLD,
    ):
        assert not int(ignored) >> (number - 1) & 1, number


# --- The foreman dies ---------------------------------------------------------------------------

USERS = {
    "at import": ("os.setuid(65534)", ""),
    "at import, group only": ("os.setgid(65534)", ""),
    "in an earlier run": ("", "if msg['id'] == 0: os.setuid(65534)"),
    "in an earlier run, group only": ("", "if msg['id'] == 0: os.setegid(65534)"),
    "in an earlier run, and back": ("", "if msg['id'] == 0: os.seteuid(65534), os.seteuid(0)"),
    "in this run": ("", "if msg['id'] == 1: os.setuid(65534)"),
}


@linux
@root
@pytest.mark.parametrize("when", USERS)
def test_a_hand_that_has_changed_its_user_ends_with_its_foreman(stage: Stage, when: str) -> None:
    """A change of user undoes the kernel's promise to kill it: gone within two seconds anyhow."""
    at_import, in_run = USERS[when]
    stage.plays(f"""
{at_import}

def process(msg):
    {in_run}
    mark(msg["id"], os.getpid())
    while msg["id"]:
        time.sleep(0.01)
""")
    stage.push({"id": 0}, {"id": 1})
    with Proxy(stage.server.socket) as proxy:  # the server's own socket is root's
        process = stage.start("--lease", 3600, REDIS_URL=proxy.url)
        [line] = stage.marked("1 ", process)
        hand = int(line.split()[1])
        assert not gone(hand)
        process.send(signal.SIGKILL)
        until(lambda: gone(hand), timeout=3)  # two, on a machine that is not busy


# --- Time limits --------------------------------------------------------------------------------

SWALLOWED = {
    "returns": """
def process(msg):
    try: time.sleep(600)
    except Exception: pass
""",
    "whatever it is": """
def process(msg):
    try: time.sleep(600)
    except BaseException: return 1
""",
    "finally": """
def process(msg):
    try: time.sleep(600)
    finally: return 1
""",
    "another": """
def process(msg):
    try: time.sleep(600)
    except Exception: raise KeyError("x")
""",
    "permanent": """
from backoff import PermanentError
def process(msg):
    try: time.sleep(600)
    except Exception: raise PermanentError("no such thing")
""",
    "loop": """
def process(msg):
    for _ in range(3):
        try: time.sleep(600)
        except Exception: return
""",
    "async": """
import asyncio
async def process(msg):
    try: await asyncio.sleep(600)
    except BaseException: pass
""",
    "async, gathered": """
import asyncio
async def process(msg):
    await asyncio.gather(asyncio.sleep(600), asyncio.sleep(600), return_exceptions=True)
""",
    "async, another": """
import asyncio
async def process(msg):
    try: await asyncio.sleep(600)
    except asyncio.CancelledError: raise KeyError("x")
""",
    "async, but blocking": """
async def process(msg):
    try: time.sleep(600)
    except Exception: pass
""",
    "in a thread pool": """
import concurrent.futures
def process(msg):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try: pool.submit(time.sleep, 1).result(600)
        except Exception: pass
""",
    "in a child": """
import subprocess
def process(msg):
    try: subprocess.run(["sleep", "600"])
    except Exception: pass
""",
}


@pytest.mark.parametrize("how", SWALLOWED)
def test_a_run_that_the_time_limit_has_interrupted_has_failed(stage: Stage, how: str) -> None:
    """Whatever the handler made of it. What comes after is not interrupted."""
    stage.plays(SWALLOWED[how] + "\nmeant = process\n" + (
        "def process(msg): return meant(msg) if msg['id'] else mark('good')\n"
    ))  # fmt: skip
    stage.push({"id": 1}, {"id": 0})
    stage.drain("--time-limit", 0.2, "--max-attempts", 1)
    [letter] = stage.letters()
    assert (letter["reason"], letter["attempts"]) == ("timed_out", 1)
    assert letter["error"].startswith("TimeLimitExceeded: ran longer than 0.2 s")
    assert stage.marks() == ["good"] and stage.stats() == {"done": 1, "dead": 1}


# --- The end of a hand --------------------------------------------------------------------------

AT_THE_END = """
import atexit, logging, logging.handlers, threading

folder = os.environ["QR_DIR"]
atexit.register(mark, "hook")
buffered = open(folder + "/buffered", "w")
memory = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(folder + "/logged"))
logging.getLogger().addHandler(memory)

def process(msg):
    mark("began")
    print("printed", end="")
    buffered.write("written")
    logging.error("logged")
    if msg["kind"] == "gate":
        gate()
"""


@pytest.mark.parametrize("end", ["burst", "stop", "stop in a run", "stop of all"])
def test_a_hand_that_leaves_in_order_writes_what_it_holds_and_runs_its_exit_hooks(
    stage: Stage, end: str
) -> None:
    """As any Python program does at its end: files, logging, atexit, and what was printed."""
    stage.plays(AT_THE_END)
    stage.push({"kind": "gate" if end == "stop in a run" else "good"})
    process = stage.start(*(["--burst"] if end == "burst" else []))
    stage.marked("began", process)
    if end == "stop in a run":
        process.send(signal.SIGTERM)
        stage.open_gate()
    elif end != "burst":
        until(lambda: stage.stats()["done"] == 1)
        process.send_group(signal.SIGTERM) if end == "stop of all" else process.send(signal.SIGTERM)
    assert process.wait() == 0, process
    assert stage.stats() == {"done": 1}
    assert stage.marks() == ["began", "hook"]
    assert (stage.folder / "buffered").read_text() == "written"
    assert (stage.folder / "logged").read_text() == "logged\n"
    assert process.out == "printed"


def test_an_exit_hook_that_hangs_is_waited_for_as_long_as_the_grace(stage: Stage) -> None:
    stage.plays("""
import atexit
atexit.register(lambda: (mark("hook"), time.sleep(600)))

def process(msg):
    mark("began")
""")
    stage.push({"kind": "good"})
    process = stage.start("--grace", 0.3)
    until(lambda: stage.stats()["done"] == 1, saw=lambda: process)
    assert process.stop() == 0
    assert stage.marks() == ["began", "hook"] and stage.stats() == {"done": 1}


# --- A hand that leaves by itself ---------------------------------------------------------------

LEAVES = {
    "exits with 0": "os._exit(0)",
    "exits with 1": "os._exit(1)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("how", LEAVES)
def test_a_hand_that_leaves_right_after_its_start_is_replaced_more_and_more_slowly(
    stage: Stage, how: str
) -> None:
    """Four in a row take more than 0.1 + 0.2 + 0.4 s; each has a line in the log."""
    stage.plays(f"""
import threading

def leave():
    time.sleep(0.01)
    mark("left", time.monotonic(), os.getpid())
    {LEAVES[how]}

def process(msg):
    pass

threading.Thread(target=leave).start()
""")
    process = stage.start()
    marks = [line.split() for line in stage.marked("left", process, count=4)[:4]]
    assert float(marks[3][1]) - float(marks[0][1]) > 0.7
    assert process.running()
    for _, _, pid in marks[:3]:
        assert stage.lines(process, f"/{pid} ")
    assert process.stop() == 0


def test_a_handler_whose_import_ends_its_hand_cannot_be_loaded(stage: Stage) -> None:
    """After five such hands a person is needed: exit code 3, and no message is touched."""
    stage.plays(LEAVES["exits with 0"])
    stage.push({"kind": "good"})
    process = stage.start()
    assert process.wait() == 3, process
    assert stage.lines(process, "die while they load the handler")
    assert stage.counts() == {"waiting": 1}


# --- Descriptors --------------------------------------------------------------------------------


@pytest.mark.parametrize("lowest", [3, 0])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_ours_goes_into_a_file_that_a_handler_opens_after_closing_all(
    stage: Stage, lowest: int, fails: bool
) -> None:
    """It gets the numbers of our files. They are its own: not written to, not closed, not shut."""
    stage.plays(f"""
import atexit, socket
own = []

def at_end():
    for number, file in enumerate(own[:-2]):
        file.write(b"end")
        file.close()
    own[-2].sendall(b"hello")
    with open(os.environ["QR_DIR"] + "/heard", "wb") as heard:
        heard.write(own[-1].recv(5))

def process(msg):
    if msg["id"] or msg.get("attempts"):
        return
    os.closerange({lowest}, 1000)
    for number in range(6):
        own.append(open(f"{{os.environ['QR_DIR']}}/own{{number}}", "wb", buffering=0))
    own.extend(socket.socketpair())
    atexit.register(at_end)
    if {fails}:
        raise ValueError("as asked")
""")
    stage.push({"id": 0}, {"id": 1}, {"id": 2})
    process = stage.drain()
    assert stage.stats() == {"done": 3} | ({"retried": 1} if fails else {})
    for number in range(6):
        assert (stage.folder / f"own{number}").read_bytes() == b"end", (number, process)
    assert (stage.folder / "heard").read_bytes() == b"hello"
    if fails:
        [line] = (stage.folder / "requeue.out").read_text().splitlines()
        assert line.startswith("attempts=1 ")


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000, reason="2,000 files may not be opened"
)
def test_a_handler_with_a_thousand_files_open_loses_no_line(stage: Stage) -> None:
    """Descriptors above 1024, where select() ends, are as good as any, for a connection, too."""
    stage.plays("""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [open(os.devnull) for _ in range(1100)]

def process(msg):
    print("printed")
    if not msg.get("attempts"):
        raise ValueError("as asked")
""")
    stage.push(*({"id": i} for i in range(10)))
    process = stage.start()
    until(lambda: stage.stats()["done"] >= 5, saw=lambda: process)
    stage.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    stage.push(*({"id": i} for i in range(10, 20)))
    until(lambda: stage.stats()["done"] == 20, saw=lambda: process)
    assert process.stop() == 0
    written = (stage.folder / "requeue.out").read_text().splitlines()
    assert len(written) == 20 and all(line.startswith("attempts=1 ") for line in written)
    assert [line for line in process.out.splitlines() if line != "printed"] == written


# --- PID 1 --------------------------------------------------------------------------------------


def zombies(parent: int) -> list[str]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    return [row[0] for row in rows if int(row[1]) == parent and row[2].startswith("Z")]


@linux
def test_a_worker_that_is_pid_1_reaps_what_is_left_to_it(stage: Stage, container: Path) -> None:
    """In a container nobody else does; and it still knows its hands from those."""
    stage.plays("""
import subprocess

def process(msg):
    mark("run", os.getpid())
    subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"])  # its child is now the foreman's
    if msg["kind"] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
""")
    stage.push(*({"kind": "good"} for _ in range(20)), {"kind": "dies"})
    process = stage.start("--max-attempts", 1, script=container)
    until(lambda: stage.stats() == {"done": 20, "dead": 1, "fallen": 1}, saw=lambda: process)
    [foreman] = until(lambda: children(process.pid))
    until(lambda: not zombies(foreman) and len(children(foreman)) == 1)
    os.kill(foreman, signal.SIGTERM)
    assert process.wait() == 0, process


# --- Redis is gone ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "result"), [("killed", "done"), ("killed", "failed"), ("frozen", "done")]
)
def test_a_result_that_could_not_be_settled_is_named_at_the_stop(
    stage_on: Callable[..., Stage], gone: str, result: str
) -> None:
    """One line: which run, and that the message will run again. It is no reason to stay."""
    stage = stage_on(append_only=True, options={"appendfsync": "always"})
    stage.plays(f"""
def process(msg):
    mark("began")
    gate()
    mark("ended")
    if {result == "failed"}:
        raise ValueError("as asked")
""")
    stage.push({"id": 0})
    process = stage.start("--grace", 0.5, "--lease", 5)
    stage.marked("began", process)
    [token] = stage.client.hkeys(stage.names.running)
    stage.server.kill() if gone == "killed" else stage.server.freeze()
    stage.open_gate()
    stage.marked("ended", process)
    assert process.stop() == 0
    stage.server.start() if gone == "killed" else stage.server.thaw()
    named = stage.lines(process, f"run {token.decode()} ")
    assert len(named) == 1, process
    assert "runs again" in named[0]
