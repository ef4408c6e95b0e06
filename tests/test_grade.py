"""`make grade`: it passes every good solution, and names the step of every classic mistake.

The good solutions are three: ours, a naive one (tests/solutions/naive), and one with a processing
list. A mistake is a patch of a good one. All are graded at once, before the first test: most of a
grading is waiting.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from grade import PATIENCE, STEPS, Row, begin, move_paths, rows_of, seconds_since_1970
from lab import SCRIPTS as OURS
from processes import PROJECT, clean_environment

SOLUTIONS = PROJECT / "tests/solutions"
GOOD = ("ours", "naive", "processing_list")
AT_ONCE = 12
BRIEF = 5.0  # seconds of patience with a mistake by which nothing happens any more


class Mistake(NamedTuple):
    """A textual patch of a good solution, and the step that must say so.

    With little patience, what is seen depends on how busy the machine is; such patterns allow it.
    """

    step: int
    script: str
    old: str
    new: str
    seen: str  # a pattern in what was seen
    solution: str = "naive"
    steps: tuple[int, ...] = ()  # what is graded, if not only that step
    patience: float = PATIENCE


PRINT_AND_WRITE = """\
    print(line, flush=True)
    with open("/root/qr/requeue.out", "a") as out:
        out.write(line + "\\n")
"""
COUNT = 'msg["attempts"] = msg.get("attempts", 0) + 1'
DRAWS = """\
    for _ in range(20):
        f.write(f"{random.uniform(0, 2**3)}\\n")
"""
DRAW = "random.uniform(0, 2**3)"
PUSH_BACK = 'r.lpush("q:tasks", json.dumps(msg))'
POP = 'r.rpop("q:tasks:dlq")'

MISTAKES = {
    # Step 1
    "leaves when the queue is empty": Mistake(
        1, "worker.py", "continue", "break", "when the queue was empty, .* exit code 0"
    ),
    "gives the handler bytes": Mistake(
        1, "worker.py", "process(msg)", "process(item[1])", "called with a bytes"
    ),
    "does not call the handler": Mistake(
        1,
        "worker.py",
        "from taskproc import process",
        "process = print",
        "was not called|0 of 2",
        patience=BRIEF,
    ),
    "reads another list": Mistake(
        1,
        "worker.py",
        '"q:tasks", timeout',
        '"tasks", timeout',
        "0 of 2 messages were run",
        patience=BRIEF,
    ),
    "cannot be stopped": Mistake(
        1,
        "worker.py",
        "while True:",
        "import signal\nfor n in (2, 15):\n    signal.signal(n, signal.SIG_IGN)\nwhile True:",
        "ended neither at Ctrl-C",
    ),
    "looks without taking": Mistake(
        1,
        "worker.py",
        'r.brpop("q:tasks", timeout=1)',
        '(0, r.lindex("q:tasks", -1))',
        "was run again",
    ),
    # Step 2
    "loses what fails": Mistake(
        2,
        "worker.py",
        "requeue(msg)\n        else",
        "pass\n        else",
        "run (once|. times), and not again",
        patience=BRIEF,
    ),
    "counts in a dict of its own": Mistake(
        2,
        "worker.py",
        COUNT,
        'counts = globals().setdefault("COUNTS", {})\n'
        '        counts[msg["id"]] = counts.get(msg["id"], 0) + 1\n'
        '        msg["attempts"] = counts[msg["id"]]',
        "pushed with attempts 1 failed once: requeue.out: attempts=1",
    ),
    "counts in a hash of Redis": Mistake(
        2,
        "worker.py",
        COUNT,
        'msg["attempts"] = r.hincrby("attempts", msg["id"])',
        "pushed with attempts 1 failed once: requeue.out: attempts=1",
    ),
    "pushes back the text that it took": Mistake(
        2, "worker.py", PUSH_BACK, 'r.lpush("q:tasks", item[1])', "attempts=1 attempts=1"
    ),
    "pushes back Python instead of JSON": Mistake(
        2, "worker.py", PUSH_BACK, 'r.lpush("q:tasks", str(msg))', "exit code 1: .*JSONDecodeError"
    ),
    "counts with text": Mistake(
        2, "worker.py", COUNT, 'msg["attempts"] = str(msg.get("attempts", 0)) + "1"', "exit code 1"
    ),
    "prints no line": Mistake(2, "worker.py", PRINT_AND_WRITE, "", "it is nowhere"),
    "prints to stderr": Mistake(
        2, "worker.py", PRINT_AND_WRITE, "    print(line, file=sys.stderr)\n", "it is on stderr"
    ),
    # Step 3
    "begins the schedule at 1": Mistake(
        3, "backoff.py", "range(6)", "range(1, 7)", "^attempt=1 wait=2"
    ),
    "has seven attempts": Mistake(3, "backoff.py", "range(6)", "range(7)", "wait=64 .7 lines"),
    "shifts the exponent": Mistake(
        3, "backoff.py", "wait={2**attempt}", "wait={2 ** (attempt + 1)}", "^attempt=0 wait=2"
    ),
    "caps the schedule": Mistake(
        3, "backoff.py", "wait={2**attempt}", "wait={min(30, 2**attempt)}", "wait=30"
    ),
    "writes decimals in the schedule": Mistake(
        3, "backoff.py", "wait={2**attempt}", "wait={2.0**attempt}", "wait=1.0"
    ),
    "appends to the schedule": Mistake(
        3, "backoff.py", 'schedule.txt", "w"', 'schedule.txt", "a"', "has 12 lines"
    ),
    "has no backoff.py that runs": Mistake(
        3, "backoff.py", "import random", "import randomness", "No module named 'randomness'"
    ),
    # Step 4
    "scatters around the ceiling": Mistake(
        4, "backoff.py", DRAW, "8 * random.uniform(0.5, 1.5)", "outside 0 to 8"
    ),
    "draws half of the ceiling only": Mistake(
        4, "backoff.py", DRAW, "random.uniform(4, 8)", "200 draws from [4-8]"
    ),
    "draws from 1 up": Mistake(
        4, "backoff.py", DRAW, "random.uniform(1, 8)", "200 draws from [1-8]"
    ),
    "draws for attempt 2": Mistake(
        4, "backoff.py", DRAW, "random.uniform(0, 4)", "200 draws from .* to [0-4]"
    ),
    "draws for attempt 4": Mistake(
        4, "backoff.py", DRAW, "random.uniform(9, 16)", "20 of 20 draws are outside"
    ),
    "draws whole seconds": Mistake(
        4, "backoff.py", DRAW, "random.randint(0, 8)", "whole seconds all of them"
    ),
    "seeds its generator": Mistake(
        4, "backoff.py", "import random", "import random\n\nrandom.seed(3)", "the same 20 numbers"
    ),
    "draws once and writes that twenty times": Mistake(
        4,
        "backoff.py",
        DRAWS,
        f'    f.write(f"{{{DRAW}}}\\n" * 20)\n',
        "all 20 lines say",
    ),
    "writes words beside the draws": Mistake(
        4, "backoff.py", f"{{{DRAW}}}", f"wait={{{DRAW}}}", "a line of jitter.txt is 'wait="
    ),
    "draws nineteen": Mistake(4, "backoff.py", "range(20)", "range(19)", "has 19 lines"),
    # Step 5
    "forgets the cap": Mistake(5, "backoff.py", "min(30, 2**attempt)", "2**attempt", "64 128 256"),
    "caps at a power": Mistake(5, "backoff.py", "min(30,", "min(32,", "16 32 32 32 32"),
    "takes the cap for a floor": Mistake(5, "backoff.py", "min(30,", "max(30,", "^30 30 30"),
    "caps with jitter": Mistake(
        5, "backoff.py", "min(30, 2**attempt)", "random.uniform(0, min(30, 2**attempt))", r"\."
    ),
    "caps eight attempts": Mistake(
        5, "backoff.py", "range(9)", "range(8)", "^1 2 4 8 16 30 30 30$"
    ),
    # Step 6
    "catches only ValueError": Mistake(
        6, "worker.py", "except Exception", "except ValueError", "exit code 1: KeyError"
    ),
    "allows six failures": Mistake(
        6, "worker.py", '["attempts"] < MAX', '["attempts"] <= MAX', "run 6 times and is in"
    ),
    "allows four failures": Mistake(
        6, "worker.py", "MAX_ATTEMPTS = 5", "MAX_ATTEMPTS = 4", "run 4 times and is in q:tasks:dlq"
    ),
    "never gives up": Mistake(
        6, "worker.py", "MAX_ATTEMPTS = 5", "MAX_ATTEMPTS = 999", r"run \d+ times and is not in"
    ),
    "counts in memory, which a restart forgets": Mistake(
        6,
        "worker.py",
        COUNT,
        'counts = globals().setdefault("COUNTS", {})\n'
        '        counts[msg["id"]] = counts.get(msg["id"], 0) + 1\n'
        '        msg["attempts"] = counts[msg["id"]]',
        "restarted after a failure, and a message failed 6 times",
    ),
    "buries and queues again": Mistake(
        6,
        "worker.py",
        "bury(msg, error)\n",
        "bury(dict(msg), error)\n            requeue(msg)\n",
        r"in \d+ dead letters|while it was in",
    ),
    "buries and leaves it in the processing list": Mistake(
        6,
        "worker.py",
        "settle(text, DLQ, json.dumps(letter))",
        "client.lpush(DLQ, json.dumps(letter))",
        r"in \d+ dead letters|while it was in",
        solution="processing_list",
    ),
    "drops what is dead": Mistake(
        6,
        "worker.py",
        "bury(msg, error)\n",
        "pass\n",
        "run (once|. times), and is n",
        patience=BRIEF,
    ),
    "buries in another list": Mistake(
        6, "worker.py", '"q:tasks:dlq"', '"q:dlq"', "run (once|. times), and is n", patience=BRIEF
    ),
    # Step 7
    "leaves its count in the payload": Mistake(
        7, "worker.py", 'msg.pop("attempts")', 'msg["attempts"]', "what differs: attempts$"
    ),
    "leaves its date in the payload": Mistake(
        7, "worker.py", 'msg.pop("first_seen_at")', 'msg["first_seen_at"]', "differs: first_seen_at"
    ),
    "makes the payload a text": Mistake(
        7, "worker.py", '"payload": msg', '"payload": json.dumps(msg)', "not an object but a str"
    ),
    "writes the attempts as text": Mistake(
        7, "worker.py", '"attempts": attempts', '"attempts": str(attempts)', 'attempts is "5"'
    ),
    "counts the last failure in no envelope": Mistake(
        7, "worker.py", '"attempts": attempts', '"attempts": attempts - 1', "attempts is 4"
    ),
    "has no error for a bare exception": Mistake(
        7, "worker.py", "repr(error)", "str(error)", r"AssertionError\(\), and error is ''"
    ),
    "dates every failure anew": Mistake(
        7,
        "worker.py",
        'msg.setdefault("first_seen_at", now())',
        'msg["first_seen_at"] = now()',
        "s too late",
    ),
    "has no date": Mistake(
        7, "worker.py", '        "first_seen_at": first_seen_at,\n', "", "has no first_seen_at"
    ),
    "has a date that says nothing": Mistake(
        7, "worker.py", '"first_seen_at": first', '"first_seen_at": "today" or first', '"today"'
    ),
    "writes the envelope as Python": Mistake(
        7, "worker.py", "json.dumps(envelope)", "str(envelope)", "a dead letter is no JSON object"
    ),
    # Step 8
    "moves all of them": Mistake(
        8,
        "replay.py",
        f"text = {POP}",
        f'while r.llen("q:tasks:dlq") > 1:\n    r.lpush("q:tasks", {POP})\ntext = {POP}',
        "3 of 3 left",
    ),
    "copies": Mistake(8, "replay.py", POP, 'r.lindex("q:tasks:dlq", -1)', "0 of 3 left .* 1 came"),
    "removes and pushes nothing": Mistake(8, "replay.py", PUSH_BACK, "", "1 of 3 left .* 0 came"),
    "replays the newest": Mistake(
        8, "replay.py", POP, 'r.lpop("q:tasks:dlq")', "the newest", steps=(6, 8)
    ),
    "keeps the attempts": Mistake(
        8, "replay.py", '["attempts"] = 0', '["attempts"] = letter["attempts"]', "attempts is 5"
    ),
    "says nothing of attempts": Mistake(
        8, "replay.py", '    msg["attempts"] = 0\n', "", "attempts is not there"
    ),
    "resets the attempts to text": Mistake(
        8, "replay.py", '["attempts"] = 0', '["attempts"] = "0"', 'attempts is "0"'
    ),
    "pushes the envelope": Mistake(
        8, "replay.py", "json.dumps(msg)", "json.dumps(letter)", "the envelope itself"
    ),
    "pushes a text in a text": Mistake(
        8, "replay.py", "json.dumps(msg)", "json.dumps(json.dumps(msg))", "no JSON object"
    ),
    "pushes only the count": Mistake(
        8, "replay.py", 'letter["payload"]', "{}", "is not the message"
    ),
    "fails on an empty DLQ": Mistake(
        8, "replay.py", "if text is None", "if text == ''", "empty DLQ .* exit code 1: TypeError"
    ),
    "waits at an empty DLQ": Mistake(
        8,
        "replay.py",
        POP,
        'r.brpop("q:tasks:dlq")[1]',
        "replay.py was still running",
        patience=BRIEF,
    ),
}


def solution(name: str, folder: Path) -> Path:
    """A good solution as a learner has it: what differs, over the naive one."""
    if name == "ours":
        folder.mkdir()
        for script in OURS:
            shutil.copy(PROJECT / script, folder)
        return folder
    shutil.copytree(SOLUTIONS / "naive", folder)
    return shutil.copytree(SOLUTIONS / name, folder, dirs_exist_ok=True)


def mistaken(mistake: Mistake, folder: Path) -> Path:
    """The solution with the mistake in it."""
    script = solution(mistake.solution, folder) / mistake.script
    text = script.read_text()
    assert text.count(mistake.old) == 1, f"{mistake.old!r} is {text.count(mistake.old)} times there"
    script.write_text(text.replace(mistake.old, mistake.new))
    return folder


def rows(
    folder: Path, steps: Collection[int] = tuple(STEPS), patience: float = PATIENCE
) -> list[Row]:
    with begin(folder, patience) as grader:
        return list(rows_of(grader, steps))


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[Row]]]]:
    """The rows of every solution and mistake, by its name, as they become known."""
    home = tmp_path_factory.mktemp("graded")

    def good(name: str) -> list[Row]:
        return rows(solution(name, home / name))

    def bad(name: str, mistake: Mistake) -> list[Row]:
        folder = mistaken(mistake, home / name)
        return rows(folder, mistake.steps or (mistake.step,), mistake.patience)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {name: pool.submit(good, name) for name in GOOD}
        found |= {name: pool.submit(bad, name, mistake) for name, mistake in MISTAKES.items()}
        yield found


@pytest.mark.parametrize("name", GOOD)
def test_a_good_solution_passes_every_step(graded: dict[str, Future[list[Row]]], name: str) -> None:
    seen = graded[name].result()
    assert [row.step for row in seen] == list(STEPS)
    assert [row for row in seen if not row.passed] == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_its_step_with_what_was_seen_and_a_hint(
    graded: dict[str, Future[list[Row]]], name: str
) -> None:
    mistake = MISTAKES[name]
    [failed] = [row for row in graded[name].result() if not row.passed]
    assert failed.step == mistake.step
    assert re.search(mistake.seen, failed.seen), failed
    assert failed.hint.isascii()
    assert "not foreseen" not in failed.hint, failed


# --- Nothing of the learner's is touched ----------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_learners_folder_stays_as_it_is_however_a_script_names_it(tmp_path: Path) -> None:
    """By the name that is replaced in the copy, or by one that no reader could recognise."""
    folder = solution("naive", tmp_path / "qr")
    script = folder / "backoff.py"
    text = script.read_text().replace("/root/qr", str(folder))
    script.write_text(text)
    (folder / "schedule.txt").write_text("the learner's own\n")
    before = contents(folder)
    assert [row.passed for row in rows(folder, {3, 4, 5})] == [True] * 3
    assert contents(folder) == before

    hidden = "bytes(" + repr(list(os.fsencode(folder))) + ").decode()"
    script.write_text(text.replace(f'"{folder}/schedule.txt"', f'{hidden} + "/schedule.txt"'))
    before = contents(folder)
    [row] = rows(folder, {3})
    assert "a script cannot change" in row.seen
    assert contents(folder) == before


CONNECTIONS = """
import asyncio, socket, sys
for family, host in ((0, "localhost"), (0, "127.0.0.1"), (0, "no.such.host.example"), (0, "::1")):
    print(socket.create_connection((host, 6379), 5).getpeername()[1])
async def aio():
    for host in ("127.0.0.1", "localhost", "no.such.host.example"):
        _, writer = await asyncio.open_connection(host, 6379)
        print(writer.get_extra_info("peername")[1])
        writer.close()
asyncio.run(aio())
with socket.socket(socket.AF_UNIX) as unix:
    unix.connect("/var/run/redis/redis.sock")
    unix.sendall(b"PING\\r\\n")
    print(unix.recv(5).decode())
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
except ConnectionRefusedError as error:
    print(error)
"""


def test_every_way_to_a_redis_leads_to_the_private_one(tmp_path: Path) -> None:
    """The one on port 6379, if there is one, is not met; another program's port is refused."""
    script = solution("naive", tmp_path / "qr") / "connections.py"
    script.write_text(CONNECTIONS)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        begin(script.parent) as grader,
    ):
        port = other.getsockname()[1]
        seen = subprocess.run(
            [sys.executable, script, str(port)],
            capture_output=True,
            text=True,
            env=clean_environment(grader.environment),
            timeout=60,
        )
        *ports, pong, refusal = seen.stdout.splitlines() or [seen.stderr]
        assert (ports, pong) == ([str(grader.server.port)] * 7, "+PONG"), seen
        assert f"not 127.0.0.1 port {port}" in refusal


def test_redis_cli_is_refused_rather_than_let_loose(tmp_path: Path) -> None:
    folder = solution("naive", tmp_path / "qr")
    (folder / "replay.py").write_text(
        "import subprocess\nsubprocess.run(['redis-cli', 'FLUSHALL'], check=True)\n"
    )
    [row] = rows(folder, {8})
    assert not row.passed
    assert "redis-cli" in row.seen


def test_nothing_is_left_running_or_lying_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody takes the remaining rows."""
    home = tmp_path / "temporary"
    home.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(home))
    with begin(solution("ours", tmp_path / "qr")) as grader:
        assert all(row.passed for row in rows_of(grader, {3, 4, 5}))
        [private] = home.iterdir()
        grader.start("worker.py")
    assert list(home.iterdir()) == []
    listing = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True, check=True)
    assert str(private) not in listing.stdout


# --- Small rules ----------------------------------------------------------------------------------


def test_only_whole_names_of_folders_are_replaced() -> None:
    moved = {
        "/root": Path("/new/root"),
        "/opt": Path("/new/opt"),
        "/home/ann": Path("/new/root/qr"),
    }
    text = b"'/root/qr' '/root' '/rootless' '~/root' 'x/root' '/home/ann/x' /opt/app {top}/opt"
    assert move_paths(text, moved) == (
        b"'/new/root/qr' '/new/root' '/rootless' '~/root' 'x/root' '/new/root/qr/x' /new/opt/app "
        b"{top}/opt"
    )


@pytest.mark.parametrize(
    "written",
    [
        1796040000,
        1796040000.0,
        "1796040000",
        1796040000000,
        "2026-11-30T12:00:00Z",
        "2026-11-30T12:00:00+00:00",
        "2026-11-30T17:30:00+05:30",
        "2026-11-30 12:00:00",
        "Mon Nov 30 12:00:00 2026",
    ],
)
def test_a_date_may_be_written_in_many_ways(written: object) -> None:
    assert seconds_since_1970(written) == 1796040000


# --- The command ----------------------------------------------------------------------------------


def command(folder: Path | str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROJECT / "tests/grade.py"],
        capture_output=True,
        text=True,
        env=clean_environment({"QR_DIR": folder, **settings}),
        timeout=300,
    )


def test_the_table_fits_a_narrow_terminal_of_any_encoding(tmp_path: Path) -> None:
    """Exit code 1, the hint under the row of the failure, and at most 80 columns of ASCII."""
    folder = solution("naive", tmp_path / "qr")
    (folder / "backoff.py").write_text(
        "raise SystemExit('\\u001b[31mzu spät \\u2026 ' + 'x' * 99)\n"
    )
    (folder / "replay.py").unlink()
    (folder / "worker.py").unlink()
    seen = command(folder, PYTHONIOENCODING="ascii")
    assert (seen.returncode, seen.stderr) == (1, "")
    assert seen.stdout.isascii()
    assert "\x1b" not in seen.stdout
    name, *lines = seen.stdout.splitlines()
    assert name == str(folder)
    assert max(map(len, lines)) <= 80
    assert len(re.findall(r"^[1-8] .* FAIL$", seen.stdout, re.M)) == 8
    assert seen.stdout.count("hint: ") == 8
    assert "there is no worker.py" in seen.stdout
    assert seen.stdout.endswith("0 of 8 steps pass.\n")


def test_what_cannot_be_graded_is_told_in_a_sentence(tmp_path: Path) -> None:
    empty = command(tmp_path)
    missing = command(tmp_path / "missing")
    unnamed = command("")
    no_server = command(solution("naive", tmp_path / "qr"), REDIS_SERVER="/no/such/server")
    for seen in (empty, missing, unnamed, no_server):
        assert seen.returncode == 2
        assert "Traceback" not in seen.stderr
        assert len(seen.stderr.splitlines()) == 1
        assert "step" not in seen.stdout
