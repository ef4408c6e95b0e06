"""What a handler can do to its hand, and what becomes of its message.

One worker runs a whole zoo of handlers, each an entry of ENDS or GOOD; then one test per animal
looks at what is left. The rest of the file needs a worker of its own each: time limits, the death
of hands, what `run` offers, handlers that cannot be loaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from conftest import Conservation, ledger
from processes import PROJECT, Process, until
from server import Server

from worker import Claim, Note, Queue, Run

# Every handler can note, in the order of the system, what it did: `mark` appends one line.
PRELUDE = """
import asyncio, concurrent.futures, ctypes, itertools, json, multiprocessing, os, random, re
import resource, signal, socket, subprocess, sys, threading, time

def mark(*words):
    fd = os.open(os.environ["QR_DIR"] + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)
"""


def marks(folder: Path) -> list[str]:
    path = folder / "marks"
    return path.read_text().splitlines() if path.exists() else []


def envelopes(queue: Queue, client: redis.Redis) -> list[dict[str, Any]]:
    """The dead letters, oldest first."""
    return [json.loads(text) for text in reversed(client.lrange(queue.names.dlq, 0, -1))]


def stats(queue: Queue, client: redis.Redis) -> dict[str, int]:
    return {name.decode(): int(n) for name, n in client.hgetall(queue.names.stats).items()}


def notes(queue: Queue, client: redis.Redis) -> list[tuple[str, str]]:
    """Reason and error of the runs that nobody settled, of messages that are not settled yet."""
    lines = b"".join(client.hvals(queue.names.notes))
    return [(note.reason, note.error) for note in Note.read(lines)]


# --- The zoo --------------------------------------------------------------------------------------
# Two runs each and then dead, with this reason and an error that starts with this text. The code is
# the body of a function `kind(msg)`.

ENDS: dict[str, tuple[str, str, str]] = {
    "exit_0": ("exhausted", "SystemExit: 0", "sys.exit(0)"),
    "exit_text": ("exhausted", "SystemExit: bye", "sys.exit('bye')"),
    "keyboard": ("exhausted", "KeyboardInterrupt", "raise KeyboardInterrupt"),
    "generator": ("exhausted", "GeneratorExit", "raise GeneratorExit"),
    "stop_iteration": ("exhausted", "StopIteration", "next(iter([]))"),
    "cancelled": ("exhausted", "CancelledError", "raise asyncio.CancelledError"),
    "base": ("exhausted", "Own: x", "class Own(BaseException): pass\nraise Own('x')"),
    "recursion": ("exhausted", "RecursionError", "def f(): f()\nf()"),
    "memory": ("exhausted", "MemoryError", "bytearray(2**62)"),
    "bare_raise": ("exhausted", "RuntimeError: No active exception", "raise"),
    "empty": ("exhausted", "Exception (", "raise Exception()"),
    "str_raises": ("exhausted", "Own: <", """
class Own(Exception):
    def __str__(self): raise SystemExit('in str')
raise Own"""),
    "str_recurses": ("exhausted", "Own: <", """
class Own(Exception):
    def __str__(self): return str(self)
raise Own"""),
    "str_is_none": ("exhausted", "Own: <", """
class Own(Exception):
    def __str__(self): return None
raise Own"""),
    "repr_raises": ("exhausted", "Own: <", """
class Own(Exception):
    def __repr__(self): raise ValueError('in repr')
raise Own(Own(), 1)"""),
    "args_raise": ("exhausted", "Own: x", """
class Own(Exception):
    @property
    def args(self): raise ValueError('in args')
raise Own('x')"""),
    "attributes_raise": ("exhausted", "Own: x", """
class Own(Exception):
    def __getattr__(self, name): raise KeyboardInterrupt(name)
raise Own('x')"""),
    "traceback_raises": ("exhausted", "Own: ", """
class Own(Exception):
    @property
    def __traceback__(self): raise ValueError('in traceback')
raise Own('x')"""),
    "no_name": ("exhausted", "Exception: x", "raise type('', (Exception,), {})('x')"),
    "two_arguments": ("exhausted", "Own: a b", """
class Own(Exception):
    def __init__(self, a, b): super().__init__(f'{a} {b}'); self.lock = threading.Lock()
raise Own('a', 'b')"""),
    "huge": ("exhausted", "ValueError: xxx", "raise ValueError('x' * 20_000_000)"),
    "cyclic": ("exhausted", "ValueError: a", """
a, b = ValueError('a'), ValueError('b')
a.__cause__, b.__cause__, a.__context__ = b, a, a
raise a"""),
    "deep_cause": ("exhausted", "ValueError: top", """
error = ValueError('bottom')
for i in range(5000):
    error, error.__cause__ = ValueError(i), error
raise ValueError('top') from error"""),
    "forged": ("exhausted", r"ValueError: a\nworker: dead\r\x1b[2J\x85\u2028", r"""
raise ValueError('a\nworker: dead\r\x1b[2J\x85\u2028 {"kind": "x"}' )"""),
    "os_exit_3": ("worker_died", "WorkerDied: its process ", "os._exit(3)"),
    "os_exit_0": ("worker_died", "WorkerDied: its process ", "os._exit(0)"),
    "sigkill": ("worker_died", "WorkerDied: its process ", "os.kill(os.getpid(), signal.SIGKILL)"),
    "sigsegv": ("worker_died", "WorkerDied: its process ", """
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.string_at(0)"""),
    "abort": ("worker_died", "WorkerDied: its process ", """
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.abort()"""),
}  # fmt: skip
if sys.version_info >= (3, 11):
    GROUP = "raise ExceptionGroup('two', [ValueError(1), ExceptionGroup('in', [KeyError('k')])])"
    ENDS["group"] = ("exhausted", "ExceptionGroup: two", GROUP)

HOW = {
    "os_exit_3": "exited with 3",
    "os_exit_0": "exited with 0",
    "sigkill": "was killed by SIGKILL",
    "sigsegv": "was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
}

# These return, whatever else they did, and are done after one run. They are begun in this order by
# few hands, so those come last that leave a process in which others of them would fail.
GOOD: dict[str, str] = {
    "returns": "return 17",
    "prints": "print('x' * 100_000)",
    "coroutine": "return asyncio.sleep(0.01)",
    "forks_return": "pid = os.fork()\nif pid: os.waitpid(pid, 0)",
    "forks_raise": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: raise ValueError('child')",
    "forks_exit": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: sys.exit(5)",
    "ends_a_child": """
pid = os.fork()
if pid == 0: time.sleep(60)
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM""",
    "pool_of_processes": """
with multiprocessing.get_context('fork').Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]""",
    "pool_of_futures": """
fork = multiprocessing.get_context('fork')
with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]""",
    "runs_a_command": "subprocess.run(['true'], check=True)",
    "thread": "threading.Thread(target=time.sleep, args=(3600,)).start()",
    "directory": "os.chdir('/')",
    "umask": "os.umask(0o777)",
    "environment": "qr = os.environ['QR_DIR']\nos.environ.clear()\nos.environ['QR_DIR'] = qr",
    "signals": """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)""",
    "mask": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "timer": "signal.alarm(0)",
    "default_timeout": "socket.setdefaulttimeout(0.000001)",
    "seed": "random.seed(42)",
    "leaves_its_group": "os.setpgid(0, os.getpgid(os.getppid()))",
    "close_ours": "os.closerange(3, 1000)",
    "close_all": "os.closerange(0, 1000)",
    "close_stdout": "sys.stdout.close()",
    "no_streams": "sys.stdout = sys.stderr = None",
    "path": "sys.path.clear()",
    "trace": "sys.settrace(lambda *a: None)",
    "changes_message": "msg.clear()\nmsg['attempts'] = 99",
}


class Zoo(NamedTuple):
    """What one worker left of the zoo."""

    dead: dict[str, dict[str, Any]]  # kind → envelope
    runs: dict[str, int]  # kind → how often the handler began
    stats: dict[str, int]
    left: list[bytes]  # messages that are neither done nor dead
    worker: Process
    code: int


def source(kinds: dict[str, str]) -> str:
    text = [PRELUDE]
    for kind, body in kinds.items():
        lines = body.strip("\n").splitlines()
        text += [f"def {kind}(msg):", *(f"    {line}" for line in lines), ""]
    text += ["def process(msg):", "    mark(msg['kind'])", "    return globals()[msg['kind']](msg)"]
    return "\n".join(text) + "\n"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    folder = tmp_path_factory.mktemp("zoo")
    kinds = GOOD | {kind: body for kind, (_, _, body) in ENDS.items()}
    (folder / "taskproc.py").write_text(source(kinds))
    with Server(folder / "server") as server, server.client() as client:
        queue = Queue(server.url)
        client.lpush(queue.names.waiting, *[json.dumps({"kind": kind}) for kind in kinds])
        environment = {"REDIS_URL": server.url, "QR_DIR": folder, "QR_APP_DIR": folder}
        flags = ["--burst", "--concurrency", 2, "--max-attempts", 2, "--base", 0.01]
        flags += ["--time-limit", 10, "--grace", 1]  # so that a hang is told from a failure
        worker = Process([PROJECT / "worker.py", *flags], folder / "streams", environment)
        try:
            code = worker.wait(60)
        finally:
            worker.end()
        places = ledger(queue, client)
        dead = {letter["payload"]["kind"]: letter for letter in envelopes(queue, client)}
        left = [text for place in places if place != "dlq" for text in places[place]]
        began = marks(folder)
        runs = {kind: began.count(kind) for kind in kinds}
        yield Zoo(dead, runs, stats(queue, client), left, worker, code)
        queue.close()


@pytest.mark.parametrize("kind", ENDS)
def test_a_handler_that_fails_in_any_way_costs_its_own_attempts_and_nothing_else(
    zoo: Zoo, kind: str
) -> None:
    """It runs exactly max_attempts times, and its dead letter says what happened, bounded."""
    reason, error, _ = ENDS[kind]
    assert zoo.runs[kind] == 2
    letter = zoo.dead[kind]
    assert (letter["reason"], letter["attempts"]) == (reason, 2)
    assert letter["error"].startswith(error), letter["error"]
    assert HOW.get(kind, "") in letter["error"]
    assert len(letter["error"]) <= 600 and letter["error"].isprintable()
    assert [entry["wait"] is None for entry in letter["history"]] == [False, True]


@pytest.mark.parametrize("kind", GOOD)
def test_a_handler_that_returns_is_done_whatever_it_did_to_its_process(zoo: Zoo, kind: str) -> None:
    assert kind not in zoo.dead, zoo.dead[kind]["error"]
    assert zoo.runs[kind] == 1


def test_the_worker_of_the_zoo_drains_it_and_leaves_in_peace(zoo: Zoo) -> None:
    """Nothing is left, nothing is counted twice, no traceback is shown, and one event is a line."""
    assert zoo.code == 0
    assert zoo.left == []
    assert zoo.dead.keys() == ENDS.keys()
    fallen = {"fallen": 2 * len(HOW)}  # runs whose hand died; the next hand charged them
    assert zoo.stats == {"done": len(GOOD), "dead": len(ENDS), "retried": len(ENDS), **fallen}
    assert "Traceback" not in zoo.worker.err
    assert all(line.startswith("worker: ") for line in zoo.worker.err.splitlines())
    assert zoo.worker.err.count("dead attempts=2") == len(ENDS)


# --- Time limits ----------------------------------------------------------------------------------

LIMITS = ("--time-limit", 0.3, "--grace", 0.3, "--max-attempts", 1)

OVERRUNS = {
    "sleeps": "time.sleep(60)",
    "computes": "while True: pass",
    "regular_expression": "re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "catches_exception": """
while True:
    try: time.sleep(60)
    except Exception: pass""",
    "catches_all": """
while True:
    try: time.sleep(60)
    except BaseException: pass""",
    "swallows_it": """
try: time.sleep(60)
except Exception: pass""",
    "turns_it_into_another": """
try: time.sleep(60)
except TimeoutError: raise ValueError('too slow')""",
    "one_call_in_c": "sum(itertools.repeat(0))",
    "holds_the_interpreter": """
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
ctypes.PyDLL(None).sleep(60)""",
    "cancels_the_alarm": "signal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(60)",
    "ignores_the_alarm": "signal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(60)",
    "child_returns_first": """
if os.fork() == 0: return
os.wait()
signal.signal(signal.SIGALRM, signal.SIG_IGN)
time.sleep(60)""",
}  # fmt: skip
HARD = {
    *("catches_exception", "catches_all", "one_call_in_c", "holds_the_interpreter"),
    *("cancels_the_alarm", "ignores_the_alarm", "child_returns_first"),
}


def test_every_handler_is_ended_at_its_limit_and_the_short_ones_flow_past(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """Softly if it lets us, by SIGKILL a grace later if not; a failed run either way."""
    handler(source(OVERRUNS | {"short": "return"}))
    conservation.push(*[json.dumps({"kind": kind}) for kind in OVERRUNS])
    conservation.push(*[json.dumps({"kind": "short", "id": i}) for i in range(20)])
    process = worker("--burst", "--concurrency", 4, *LIMITS)
    assert process.wait() == 0, process
    letters = envelopes(conservation.queue, conservation.client)
    assert {letter["payload"]["kind"] for letter in letters} == OVERRUNS.keys()
    assert {(letter["reason"], letter["attempts"]) for letter in letters} == {("timed_out", 1)}
    errors = {letter["payload"]["kind"]: letter["error"] for letter in letters}
    for kind in OVERRUNS.keys() - HARD:
        assert errors[kind].startswith("TimeLimitExceeded: ran longer than 0.3 s ("), errors
    for kind in HARD:
        assert errors[kind].endswith("0.3 s and 0.3 s of grace; killed"), errors
    assert conservation.done() == 20


def test_the_limit_begins_anew_with_each_message(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """Also after a handler that ignored, blocked or cancelled the alarm of its own run."""
    handler(source(GOOD | OVERRUNS))
    kinds = [kind for bad in ("signals", "mask", "timer") for kind in (bad, "sleeps")]
    conservation.push(*[json.dumps({"kind": kind, "n": n}) for n, kind in enumerate(kinds)])
    process = worker("--burst", "--time-limit", 0.3, "--grace", 60, "--max-attempts", 1)
    assert process.wait() == 0, process
    letters = envelopes(conservation.queue, conservation.client)
    assert [letter["reason"] for letter in letters] == ["timed_out"] * 3


def test_a_coroutine_is_run_and_limited_like_a_function(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    handler(PRELUDE + """
async def process(msg):
    await asyncio.sleep(msg["seconds"])
    if msg["seconds"]:
        raise ValueError("in a coroutine")
    mark("done")
""")  # fmt: skip
    conservation.push('{"seconds": 0}', '{"seconds": 0.01}', '{"seconds": 60}')
    assert worker("--burst", *LIMITS).wait() == 0
    letters = envelopes(conservation.queue, conservation.client)
    assert {(letter["payload"]["seconds"], letter["reason"]) for letter in letters} == {
        (0.01, "exhausted"),
        (60, "timed_out"),
    }
    assert conservation.done() == 1


def test_a_handler_in_c_code_keeps_its_lease(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """It holds the interpreter for longer than a lease, while another worker looks for prey.

    Each time: the other one lets fall whatever has expired by then.
    """
    handler(PRELUDE + """
def process(msg):
    mark("began")
    while not os.path.exists(os.environ["QR_DIR"] + "/gate"):
        ctypes.PyDLL(None).usleep(1_200_000)
        mark("held")
""")  # fmt: skip
    first = worker("--lease", 1, "--burst")
    conservation.push('{"kind": "long"}')
    until(lambda: marks(qr_dir), saw=lambda: first)
    second = worker("--lease", 1, "--burst")
    until(lambda: "held" in marks(qr_dir), saw=lambda: first)
    leases, client = conservation.queue.names.leases, conservation.client
    client.zadd(leases, {"1 nobody": 1})
    until(lambda: client.zscore(leases, "1 nobody") is None, saw=lambda: second)
    (qr_dir / "gate").touch()
    assert first.wait() == 0 and second.wait() == 0
    assert marks(qr_dir).count("began") == 1
    assert stats(conservation.queue, client) == {"done": 1}


# --- The hand dies --------------------------------------------------------------------------------

GATE = PRELUDE + """
def process(msg):
    mark(os.getpid(), msg["id"])
    while not os.path.exists(os.environ["QR_DIR"] + "/gate"):
        time.sleep(0.02)
"""  # fmt: skip


def test_a_killed_hand_costs_one_attempt_and_the_other_hands_never_notice(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """At once: the lease is an hour. The message runs again; the neighbours run on."""
    handler(GATE)
    conservation.push(*[json.dumps({"id": i}) for i in range(3)])
    process = worker("--concurrency", 3, "--lease", 3600, "--base", 0.01)
    began = until(lambda: len(marks(qr_dir)) == 3 and marks(qr_dir), saw=lambda: process)
    pid, victim = (int(word) for word in began[0].split())
    os.kill(pid, signal.SIGKILL)
    again = until(lambda: marks(qr_dir)[3:], saw=lambda: process)
    assert int(again[0].split()[1]) == victim
    others = {int(line.split()[0]) for line in began[1:]}
    assert others < set(process.children())
    (qr_dir / "gate").touch()
    until(lambda: conservation.done() == 3, saw=lambda: process)
    counters = {"done": 3, "retried": 1, "fallen": 1}
    assert stats(conservation.queue, conservation.client) == counters
    assert len(marks(qr_dir)) == 4
    assert process.err.count("was killed by SIGKILL") == 1
    assert process.stop() == 0


def test_an_idle_hand_that_is_killed_is_replaced(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """Three times in a row, before any message: the worker neither leaves nor spins."""
    handler(GATE)
    process = worker()
    for _ in range(3):
        [hand] = until(process.children, saw=lambda: process)
        until(lambda: "handler " in process.err, saw=lambda: process)
        os.kill(hand, signal.SIGKILL)
        until(lambda hand=hand: process.children() not in ([], [hand]), saw=lambda: process)
    (qr_dir / "gate").touch()
    conservation.push('{"id": 1}')
    until(conservation.done, saw=lambda: process)
    assert stats(conservation.queue, conservation.client) == {"done": 1}
    assert process.stop() == 0


@pytest.mark.parametrize("way", ["os._exit(1)", "time.sleep(600)"])
def test_what_a_handler_has_started_ends_with_its_hand(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
    way: str,
) -> None:
    """Whether the hand dies by itself or at the hard limit; and a hand that lives on keeps it."""
    handler(PRELUDE + f"""
def process(msg):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    mark(subprocess.Popen(["sleep", "600"]).pid)
    if msg["id"]: {way}
""")  # fmt: skip
    conservation.push('{"id": 0}')
    process = worker("--time-limit", 0.3, "--grace", 0.3, "--max-attempts", 1)
    until(conservation.done, saw=lambda: process)
    [kept] = map(int, marks(qr_dir))
    assert runs(kept) and os.getpgid(kept) == process.children()[0]
    conservation.push('{"id": 1}')
    until(lambda: envelopes(conservation.queue, conservation.client), saw=lambda: process)
    started = [int(pid) for pid in marks(qr_dir)]
    assert len(started) == 2
    until(lambda: not any(map(runs, started)), saw=lambda: process)
    assert process.stop() == 0


def runs(pid: int) -> bool:
    """Tells whether it is a living process, and no zombie that a parent forgot."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()[:1] not in "Z"


def test_a_hand_that_is_asked_to_leave_by_a_stranger_is_replaced(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """It finishes its message first; and its leaving unasked is worth a line."""
    handler(GATE)
    conservation.push('{"id": 1}')
    process = worker()
    [first] = until(lambda: marks(qr_dir), saw=lambda: process)
    os.kill(int(first.split()[0]), signal.SIGTERM)
    (qr_dir / "gate").touch()
    until(conservation.done, saw=lambda: process)
    conservation.push('{"id": 2}')
    until(lambda: conservation.done() == 2, saw=lambda: process)
    assert marks(qr_dir)[1].split()[0] != first.split()[0]
    assert process.err.count(f"/{first.split()[0]} exited with 0") == 1
    assert process.stop() == 0


# --- Handlers that cannot be loaded ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def process(msg:", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise KeyError('SETTING')", "KeyError: 'SETTING'"),
        ("import sys\nsys.exit(4)", "SystemExit: 4"),
        ("def other(msg): pass", "no attribute 'process'"),
        ("process = 3", "is not a callable"),
        ("\0", "null bytes"),
        ("def process(): pass", "process(msg) or process(msg, run) is needed"),
        ("def process(msg, other): pass", "process(msg) or process(msg, run) is needed"),
        ("def process(msg, *, other): pass", "process(msg) or process(msg, run) is needed"),
        ("def process(msg):\n    yield", "it has a yield"),
        ("async def process(msg):\n    yield", "it has a yield"),
    ],
)
def test_a_handler_that_cannot_be_loaded_ends_the_worker(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    text: str,
    says: str,
) -> None:
    """Exit code 3, one line that names the file and the reason, and nothing claimed."""
    path = handler(text)
    conservation.push('{"id": 1}')
    process = worker("--concurrency", 2)
    assert process.wait() == 3, process
    [line] = [line for line in process.err.splitlines() if "cannot load" in line]
    assert str(path) in line and says in line
    assert "Traceback" not in process.err
    assert conservation.client.llen(conservation.queue.names.waiting) == 1
    assert not stats(conservation.queue, conservation.client)


def test_a_handler_that_kills_its_process_while_it_is_loaded_ends_the_worker(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """A few tries, then exit code 3; not a respawn loop."""
    path = handler("import os\nos._exit(7)")
    conservation.push('{"id": 1}')
    process = worker()
    assert process.wait() == 3, process
    last = process.err.splitlines()[-1]
    assert "die while they load the handler" in last and str(path) in last
    assert conservation.client.llen(conservation.queue.names.waiting) == 1


def test_a_handler_that_breaks_while_the_worker_runs_ends_it_too(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """A new hand loads the file anew, and a syntax error there is no reason to fork for ever."""
    path = handler("import os\ndef process(msg): msg['code'] and os._exit(msg['code'])")
    process = worker("--base", 0.01)
    conservation.push('{"code": 0}')
    until(conservation.done, saw=lambda: process)
    path.write_text("def process(msg:")
    conservation.push('{"code": 9}')
    assert process.wait() == 3
    assert "exited with 9" in process.err and "cannot load" in process.err
    queue, client = conservation.queue, conservation.client
    assert ledger(queue, client)["retry"] == [b'{"code": 9}']
    assert notes(queue, client) == [("worker_died", "WorkerDied: its process exited with 9")]


def test_a_handler_that_closes_our_files_and_opens_its_own_gets_none_of_our_words(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """Its files have our numbers then; each message is settled once, and a new hand goes on."""
    handler(PRELUDE + """
files = []

def process(msg):
    if msg["closes"]:
        os.closerange(0, 256)
        files[:] = [open(f"{os.environ['QR_DIR']}/{msg['n']}-{i}", "w+") for i in range(20)]
    mark(os.getpid(), msg["closes"])
    assert msg["returns"]
""")  # fmt: skip
    texts = [{"closes": n % 2 == 0, "returns": n < 2, "n": n} for n in range(4)]
    conservation.push(*map(json.dumps, texts))
    process = worker("--burst", "--max-attempts", 2, "--base", 0.01)
    assert process.wait() == 0, process
    assert len({line.split()[0] for line in marks(qr_dir)}) == 4
    counters = {"done": 2, "dead": 2, "retried": 2}
    assert stats(conservation.queue, conservation.client) == counters
    files = list(qr_dir.glob("?-*"))
    assert len(files) == 2 * 20
    assert not [path for path in files if path.stat().st_size > 0]


def test_another_handler_can_be_named(
    worker: Callable[..., Process], conservation: Conservation, tmp_path: Path
) -> None:
    """--process module:function is looked for in the current folder, at any depth."""
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "mail.py").write_text("class Box:\n    def send(msg): print('sent', msg['to'])\n")
    conservation.push('{"to": "me"}')
    process = worker("--burst", "--process", "jobs.mail:Box.send", cwd=tmp_path)
    assert process.wait() == 0, process
    assert process.out == "sent me\n"
    assert "worker: handler jobs.mail:Box.send\n" in process.err


# --- What a handler may ask of its run ------------------------------------------------------------


def test_a_handler_that_takes_its_run_gets_token_attempts_and_stage(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """Tokens rise, attempts count failed runs, and the stage outlives a failure and a death."""
    handler(PRELUDE + """
def process(msg, run):
    mark(json.dumps([run.token, run.attempts, run.stage]))
    run.checkpoint({"step": run.attempts, "text": 'a "b"\\n'})
    if run.attempts == 0: raise ValueError
    if run.attempts == 1: os._exit(1)
""")  # fmt: skip
    conservation.push('{"n": 1.10}')
    assert worker("--burst", "--base", 0.01).wait() == 0
    runs = [json.loads(line) for line in marks(qr_dir)]
    assert [attempts for _, attempts, _ in runs] == [0, 1, 2]
    stages = [stage for _, _, stage in runs]
    assert stages == [None, {"step": 0, "text": 'a "b"\n'}, {"step": 1, "text": 'a "b"\n'}]
    tokens = [token for token, _, _ in runs]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("signature", ["msg, *, run", "msg, extra=None, run=None"])
def test_run_is_asked_for_by_its_name(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    signature: str,
) -> None:
    handler(f"def process({signature}): run.checkpoint('x')")
    conservation.push('{"n": 1}')
    assert worker("--burst", "--max-attempts", 1).wait() == 0
    assert conservation.done() == 1


def test_the_last_stage_is_in_the_dead_letter(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    handler("def process(msg, run):\n    run.checkpoint(['half', 1])\n    raise ValueError")
    conservation.push('{"n": 1.10}')
    assert worker("--burst", "--max-attempts", 1).wait() == 0
    [letter] = envelopes(conservation.queue, conservation.client)
    assert (letter["stage"], letter["payload"], letter["attempts"]) == (["half", 1], {"n": 1.1}, 1)


def test_the_limit_and_the_end_of_grace_reach_a_handler_in_the_middle_of_a_checkpoint(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """The client that talks to Redis must not take them for a network's time-out."""
    handler("def process(msg, run):\n    while msg['busy']: run.checkpoint('x')")
    conservation.push('{"busy": true}', '{"busy": false}')
    flags = ("--time-limit", 0.5, "--grace", 3600, "--max-attempts", 1)
    assert worker("--burst", *flags).wait() == 0
    [letter] = envelopes(conservation.queue, conservation.client)
    assert letter["error"].startswith("TimeLimitExceeded: ran longer than 0.5 s")
    conservation.push('{"busy": true}')
    process = worker("--grace", 0.3)
    until(lambda: conservation.client.hlen(conservation.queue.names.running), saw=lambda: process)
    assert process.stop() == 0
    assert stats(conservation.queue, conservation.client) == {"done": 1, "dead": 1, "released": 1}


def test_the_limit_between_a_question_to_redis_and_its_answer_spoils_no_other_answer(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """What the hand asks next is not answered by what the checkpoint left unread."""
    handler(PRELUDE + """
def process(msg, run):
    connection = run.hand.queue.connection
    def too_late(*_, **__):
        del connection.read_response
        time.sleep(60)
    if msg["slow"]:
        connection.read_response = too_late
        run.checkpoint("x")
""")  # fmt: skip
    conservation.push(*[json.dumps({"slow": n % 2 == 0, "n": n}) for n in range(6)])
    process = worker("--burst", "--time-limit", 0.3, "--grace", 3600, "--max-attempts", 1)
    assert process.wait() == 0, process
    letters = envelopes(conservation.queue, conservation.client)
    assert [letter["payload"]["n"] for letter in letters] == [0, 2, 4]
    assert {letter["reason"] for letter in letters} == {"timed_out"}
    assert stats(conservation.queue, conservation.client) == {"done": 3, "dead": 3}
    assert "worker: hand " not in process.err and "Traceback" not in process.err


def test_a_thread_that_outlives_its_run_cannot_speak_for_the_next(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """Nor can a child process. Its token stays its own; what it asks for raises LeaseLost."""
    handler(PRELUDE + """
threads, next_run = [], threading.Event()

def speak(run, token):
    mark(run.token == token, run.stage)
    for method in (run.push, run.checkpoint):
        try: method({"from": "the dead"})
        except Exception as error: mark(type(error).__name__)

def wait_and_speak(run, token):
    next_run.wait()
    speak(run, token)

def process(msg, run):
    run.checkpoint(msg["id"])
    if msg["id"] == 1:
        threads.append(threading.Thread(target=wait_and_speak, args=(run, run.token)))
        threads[0].start()
    else:
        next_run.set()
        threads[0].join()
        if os.fork() == 0:
            speak(run, run.token)
            os._exit(0)
        os.wait()
        raise ValueError
""")  # fmt: skip
    conservation.push('{"id": 1}', '{"id": 2}')
    assert worker("--burst", "--max-attempts", 1).wait() == 0
    lost = ["LeaseLost", "LeaseLost"]
    assert marks(qr_dir) == ["True 1", *lost, "True 2", *lost]
    [letter] = envelopes(conservation.queue, conservation.client)
    assert letter["stage"] == 2
    assert conservation.done() == 1


def test_follow_up_messages_appear_when_the_run_is_done_and_only_then(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """Pushed once, although the run failed once after pushing."""
    handler(PRELUDE + """
def process(msg, run):
    mark(msg["kind"])
    if msg["kind"] == "parent":
        run.push({"kind": "child"})
        if run.attempts == 0: raise ValueError
""")  # fmt: skip
    conservation.push('{"kind": "parent"}')
    conservation.pushed['{"kind": "child"}'] += 1
    assert worker("--burst", "--base", 0.01).wait() == 0
    assert marks(qr_dir) == ["parent", "parent", "child"]


def test_a_follow_up_that_is_no_dict_is_the_handlers_error(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """At once, where it is pushed: it could be no more than a dead letter later."""
    handler("def process(msg, run): run.push(msg['next'])")
    conservation.push('{"next": "{}"}', '{"next": [{}]}', '{"next": null}')
    assert worker("--burst", "--max-attempts", 1).wait() == 0
    letters = envelopes(conservation.queue, conservation.client)
    for letter, kind in zip(letters, ("str", "list", "NoneType"), strict=True):
        assert letter["error"].startswith(f"TypeError: a message is a dict, this is {kind} (")


@pytest.mark.parametrize("stage", ["float('nan')", "{1, 2}", "object()"])
def test_a_stage_that_is_no_json_is_the_handlers_error(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    stage: str,
) -> None:
    handler(f"def process(msg, run): run.checkpoint({stage})")
    conservation.push('{"n": 1}')
    assert worker("--burst", "--max-attempts", 1).wait() == 0
    [letter] = envelopes(conservation.queue, conservation.client)
    assert letter["error"].startswith(("ValueError", "TypeError")) and "stage" not in letter


def take_over(queue: Queue, client: redis.Redis) -> Run:
    """What becomes of a run whose lease has ended: it falls, and somebody else claims its message.

    What it says of itself, its token and its lease, stays true and is worth nothing any more.
    """
    leases = [lease.decode() for lease in client.zrange(queue.names.leases, 0, -1)]
    queue.do(queue.fall("released", "for a test", *leases))
    [reply] = queue.do(queue.claim("thief", 3600))
    run = Claim.of(reply, "thief").run
    assert run is not None
    return run


def test_a_run_that_was_taken_over_learns_it_at_its_checkpoint(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
) -> None:
    """LeaseLost is raised in the handler; what it does after that has no effect."""
    handler(PRELUDE + """
def process(msg, run):
    mark(run.token)
    for number in (signal.SIGALRM, signal.SIGTERM):  # so that nobody tells it before
        signal.signal(number, signal.SIG_IGN)
    while not os.path.exists(os.environ["QR_DIR"] + "/gate"): time.sleep(0.02)
    try: run.checkpoint(1)
    except Exception as error: mark(type(error).__name__); raise
""")  # fmt: skip
    conservation.push('{"n": 1}')
    process = worker("--lease", 3600)
    until(lambda: marks(qr_dir), saw=lambda: process)
    queue = conservation.queue
    take_over(queue, conservation.client)
    (qr_dir / "gate").touch()
    until(lambda: marks(qr_dir)[1:] == ["LeaseLost"], saw=lambda: process)
    assert process.stop() == 0
    assert process.err.count("its result is refused") == 1
    assert ledger(queue, conservation.client)["running"] == [b'{"n": 1}']
    assert stats(queue, conservation.client) == {"released": 1, "refused": 1}


@pytest.mark.parametrize("wait", ["time.sleep(600)", "return asyncio.sleep(600)"])
def test_a_run_that_was_taken_over_is_interrupted(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    qr_dir: Path,
    wait: str,
) -> None:
    """At the foreman's next renewal, instead of working in vain; and the hand takes the next."""
    handler(PRELUDE + f"""
def process(msg):
    mark(msg["id"])
    if msg["id"] == 1: {wait}
""")  # fmt: skip
    conservation.push('{"id": 1}')
    process = worker("--lease", 1, "--time-limit", 3600, "--max-attempts", 1)
    until(lambda: marks(qr_dir), saw=lambda: process)
    queue, client = conservation.queue, conservation.client
    thief = take_over(queue, client)
    until(lambda: "taken over" in process.err, saw=lambda: process)
    conservation.push('{"id": 2}')
    until(conservation.done, saw=lambda: process)
    assert process.err.count(": interrupted") == 1
    assert marks(qr_dir) == ["1", "2"]
    assert queue.do(queue.done(thief)) == [b"ok"]
    assert stats(queue, client) == {"released": 1, "refused": 1, "done": 2}
    assert process.stop() == 0
