"""The exercise to the letter: what its steps and its graders see, by running the commands as a
learner does. They know the commands, the files and the keys, and nothing of our code."""

from __future__ import annotations

import ast
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from processes import PROJECT, Process, clean_environment, until
from server import Server

QUEUE = "q:tasks"
PLACES = (QUEUE, QUEUE + ":next", QUEUE + ":running", QUEUE + ":retry", QUEUE + ":dlq")
QUICK = 0.01  # seconds, the base of the retries here; the exercise's is 1
LONG = 10**9  # seconds: no retry is due while a test looks
DATE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
SCRIPTS = ("worker.py", "replay.py", "backoff.py", "taskproc.py")
BAD, OK = '{"kind": "bad"}', '{"kind": "ok"}'


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """The four scripts beside each other in a folder, nothing else there: a learner's copy."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for name in SCRIPTS:
        shutil.copy(PROJECT / name, folder)
    return folder


def dead(client: redis.Redis) -> list[Any]:
    """The envelopes, oldest first."""
    return [json.loads(text) for text in client.lrange(QUEUE + ":dlq", 0, -1)[::-1]]


def empty(client: redis.Redis) -> bool:
    return not client.exists(*PLACES)


def requeues(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("attempts=")]


def wait_for_a_requeue(worker: Process) -> None:
    until(lambda: requeues(worker.out), saw=lambda: worker)


# ---- Step 1: a worker --------------------------------------------------------------------------


def test_a_worker_takes_what_is_pushed_left_or_right_before_or_during_its_run(
    redis_client: redis.Redis, flat: Path, run: Callable[..., Process]
) -> None:
    redis_client.lpush(QUEUE, OK)
    redis_client.rpush(QUEUE, OK)
    worker = run(flat / "worker.py", cwd=Path("/"))
    until(lambda: empty(redis_client), saw=lambda: worker)
    for push in (redis_client.lpush, redis_client.rpush):
        push(QUEUE, OK)
        until(lambda: empty(redis_client), saw=lambda: worker)
    assert worker.running()
    assert worker.stop(signal.SIGINT) == 0
    assert worker.out.count("done kind=ok") == 4
    assert redis_client.hget(QUEUE + ":stats", "done") == b"4"


def test_messages_run_one_at_a_time_and_in_their_order(
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    tmp_path: Path,
) -> None:
    ran = tmp_path / "ran"
    handler(f"""
def process(msg):
    with open({str(ran)!r}, "a", buffering=1) as out:
        out.write(f"begin {{msg['id']}}\\n")
        out.write(f"end {{msg['id']}}\\n")
""")
    redis_client.lpush(QUEUE, *[f'{{"id": {i}}}' for i in range(50)])
    assert worker("--burst").wait() == 0
    assert ran.read_text() == "".join(f"begin {i}\nend {i}\n" for i in range(50))


def test_the_handler_in_the_app_folder_goes_before_the_one_beside_the_worker(
    redis_client: redis.Redis, flat: Path, run: Callable[..., Process], tmp_path: Path
) -> None:
    """Without QR_APP_DIR: /opt/app, for which this copy has another name."""
    opt = tmp_path / "opt"
    source = (flat / "worker.py").read_text()
    assert source.count('"/opt/app"') == 1
    (flat / "worker.py").write_text(source.replace('"/opt/app"', repr(str(opt))))
    (flat / "taskproc.py").write_text("def process(msg):\n    print('beside')\n")

    def printed() -> str:
        redis_client.lpush(QUEUE, OK)
        worker = run(flat / "worker.py", "--burst", QR_APP_DIR=None)
        assert worker.wait() == 0, worker
        assert f"worker: handler {opt if (opt / 'taskproc.py').exists() else flat}/" in worker.err
        return worker.out

    assert printed() == "beside\n"
    opt.mkdir()
    assert printed() == "beside\n"
    (opt / "taskproc.py").write_text(
        "import helper\n\ndef process(msg):\n    print(helper.WHERE)\n"
    )
    (opt / "helper.py").write_text("WHERE = 'app'\n")  # a handler of two files
    (flat / "helper.py").write_text("WHERE = 'beside'\n")
    assert printed() == "app\n"


# ---- Steps 2, 6 and 7: failures, requeue.out, the dead letter ----------------------------------

RAISES = {
    "ValueError": "raise ValueError('bad message')",
    "KeyError": "raise KeyError('no such key')",
    "RuntimeError": "raise RuntimeError('later')",
    "an exception without a text": "raise Exception()",
    "a bare raise": "raise",
}
FIRST_LINE = {  # what was pushed → the count in the line of its first re-queue
    '{"kind": "absent"}': 1,
    '{"kind": "zero", "attempts": 0}': 1,
    '{"kind": "one", "attempts": 1}': 2,
}


@pytest.mark.parametrize("statement", RAISES.values(), ids=RAISES)
def test_five_failures_make_a_dead_letter_whatever_was_raised(
    redis_client: redis.Redis,
    flat: Path,
    handler: Callable[[str], Path],
    run: Callable[..., Process],
    qr_dir: Path,
    statement: str,
) -> None:
    """`attempts=<n>` at every re-queue, in requeue.out and on stdout alike; then one envelope.

    Its dates are the server's, in UTC, wherever the worker is.
    """
    handler(f"def process(msg):\n    {statement}\n")
    redis_client.lpush(QUEUE, *FIRST_LINE)
    begin, _ = redis_client.time()
    worker = run(flat / "worker.py", QR_BASE=QUICK, TZ="Asia/Kolkata")
    until(lambda: redis_client.llen(QUEUE + ":dlq") == len(FIRST_LINE), saw=lambda: worker)
    assert worker.stop(signal.SIGINT) == 0
    assert "Traceback" not in worker.err + worker.out
    assert not redis_client.exists(*PLACES[:-1])
    assert (qr_dir / "requeue.out").read_text() == worker.out
    for text, first in FIRST_LINE.items():
        kind = json.loads(text)["kind"]
        lines = [line.split() for line in worker.out.splitlines() if f" kind={kind} " in line]
        assert [words[0] for words in lines] == [f"attempts={n}" for n in range(first, 5)]
        for words in lines:
            facts = dict(word.split("=", 1) for word in words[:5])
            assert list(facts) == ["attempts", "kind", "wait", "of", "token"]
            assert facts["of"] == f"{QUICK * 2 ** (int(facts['attempts']) - 1):g}"
            assert 0 <= float(facts["wait"]) <= float(facts["of"])
            assert re.fullmatch(r"\d+\.\d{3}", facts["wait"])
    name = re.sub(r"^raise\W*|\W.*$", "", statement) or "RuntimeError"
    for envelope in dead(redis_client):
        assert list(envelope)[:4] == ["payload", "error", "attempts", "first_seen_at"]
        assert "/taskproc.py" in envelope["traceback"]
        assert statement in envelope["traceback"] and name in envelope["traceback"]
        assert envelope["payload"].keys() == {"kind"}
        assert envelope["attempts"] == 5
        assert type(envelope["attempts"]) is int
        assert envelope["reason"] == "exhausted"
        assert envelope["error"].startswith(name)
        for name_of_date in ("first_seen_at", "failed_at"):
            assert re.fullmatch(DATE, envelope[name_of_date])
            at = datetime.fromisoformat(envelope[name_of_date]).timestamp()
            assert begin - 1 <= at <= redis_client.time()[0] + 1


def test_a_line_is_there_at_once_while_the_worker_runs_on(
    redis_client: redis.Redis, worker: Callable[..., Process], qr_dir: Path
) -> None:
    redis_client.lpush(QUEUE, BAD)
    started = worker("--base", LONG, "--cap", LONG)
    wait_for_a_requeue(started)
    until((qr_dir / "requeue.out").exists)
    until(lambda: requeues((qr_dir / "requeue.out").read_text()) == requeues(started.out))
    assert started.running()
    assert started.stop() == 0


def test_counting_goes_on_after_a_restart(
    redis_client: redis.Redis, worker: Callable[..., Process], qr_dir: Path
) -> None:
    redis_client.lpush(QUEUE, BAD)
    for n in (1, 2):
        started = worker("--base", LONG, "--cap", LONG)
        wait_for_a_requeue(started)
        assert started.stop(signal.SIGINT) == 0
        assert requeues(started.out)[0].startswith(f"attempts={n} ")
        [member] = redis_client.zrange(QUEUE + ":retry", 0, -1)
        assert json.loads(member.partition(b":")[2])["attempts"] == n
        redis_client.zadd(QUEUE + ":retry", {member: 0})  # its time has come
    last = worker("--burst", QR_BASE=QUICK)
    assert last.wait() == 0
    assert [line.split()[0] for line in requeues(last.out)] == ["attempts=3", "attempts=4"]
    [envelope] = dead(redis_client)
    assert envelope["attempts"] == 5
    assert len(requeues((qr_dir / "requeue.out").read_text())) == 4


def test_requeue_out_is_never_truncated_and_never_grows_without_end(
    redis_client: redis.Redis, worker: Callable[..., Process], qr_dir: Path
) -> None:
    path = qr_dir / "requeue.out"
    path.write_text("the learner's own note\n")
    redis_client.lpush(QUEUE, BAD)
    first = worker("--burst", QR_BASE=QUICK)
    assert first.wait() == 0
    text = path.read_text()
    assert text == "the learner's own note\n" + first.out
    with path.open("a") as out:
        out.truncate(100_000_000)
    redis_client.lpush(QUEUE, BAD)
    second = worker("--burst", QR_BASE=QUICK)
    assert second.wait() == 0
    assert len(requeues(second.out)) == 4
    assert path.stat().st_size == 100_000_000


@pytest.mark.parametrize("redirection", ["> '{}'", ">> '{}'"])
def test_a_line_is_written_once_if_stdout_is_requeue_out(
    redis_client: redis.Redis,
    server: Server,
    qr_dir: Path,
    handler: Callable[[str], Path],
    redirection: str,
) -> None:
    app_dir = handler((PROJECT / "taskproc.py").read_text()).parent
    path = qr_dir / "requeue.out"
    path.write_text("before\n")
    redis_client.lpush(QUEUE, BAD)
    command = f"'{sys.executable}' '{PROJECT / 'worker.py'}' --burst --base {QUICK}"
    subprocess.run(
        f"{command} {redirection.format(path)}",
        shell=True,
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=60,
        cwd=qr_dir,
        env=clean_environment({"REDIS_URL": server.url, "QR_DIR": qr_dir, "QR_APP_DIR": app_dir}),
    )
    text = path.read_text()
    assert [line.split()[0] for line in requeues(text)] == [f"attempts={n}" for n in range(1, 5)]
    assert text.startswith("before\n") == (redirection[:2] == ">>")


def test_without_the_folder_the_lines_are_only_printed(
    redis_client: redis.Redis, worker: Callable[..., Process], tmp_path: Path
) -> None:
    redis_client.lpush(QUEUE, BAD)
    started = worker("--burst", QR_BASE=QUICK, QR_DIR=tmp_path / "not there")
    assert started.wait() == 0
    assert len(requeues(started.out)) == 4
    assert not (tmp_path / "not there").exists()
    assert list(tmp_path.rglob("requeue.out")) == []


# ---- Stopping ----------------------------------------------------------------------------------

STOPS: dict[str, Callable[[Process], object]] = {
    "kill": lambda process: process.send(signal.SIGTERM),
    "kill -INT": lambda process: process.send(signal.SIGINT),
    "Ctrl-C": lambda process: process.send_group(signal.SIGINT),
    "timeout": lambda process: (process.send(signal.SIGTERM), process.send_group(signal.SIGTERM)),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_an_idle_worker_stops_without_a_word_of_python(
    redis_client: redis.Redis, worker: Callable[..., Process], stop: Callable[[Process], object]
) -> None:
    redis_client.lpush(QUEUE, OK)
    started = worker()
    until(lambda: "done" in started.out, saw=lambda: started)
    stop(started)
    assert started.wait() == 0
    assert started.children() == []
    assert "Traceback" not in started.out + started.err
    assert empty(redis_client)


@pytest.mark.parametrize("stop", [STOPS["Ctrl-C"], STOPS["timeout"]], ids=["Ctrl-C", "timeout"])
def test_a_stop_waits_for_the_running_message_and_takes_no_other(
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    tmp_path: Path,
    stop: Callable[[Process], object],
) -> None:
    go = tmp_path / "go"
    handler(f"""
import os, time

def process(msg):
    print("begin", flush=True)
    while not os.path.exists({str(go)!r}):
        time.sleep(0.01)
    print("end", flush=True)
""")
    redis_client.lpush(QUEUE, OK, BAD)
    started = worker()
    until(lambda: "begin" in started.out, saw=lambda: started)
    stop(started)
    assert started.running()
    go.touch()
    assert started.wait() == 0
    assert started.out == "begin\nend\n"
    assert "Traceback" not in started.err
    assert redis_client.lrange(QUEUE, 0, -1) + redis_client.lrange(QUEUE + ":next", 0, -1) == [
        BAD.encode()
    ]
    assert redis_client.hget(QUEUE + ":stats", "done") == b"1"


# ---- Steps 3 to 5: the three files -------------------------------------------------------------


def test_the_three_files_are_what_the_exercise_asks_for(
    flat: Path, run: Callable[..., Process], tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "by backoff.py"
    drawn = set()
    for _ in range(2):
        assert run(flat / "backoff.py", cwd=Path("/"), QR_DIR=folder, REDIS_URL=None).wait() == 0
        schedule, jitter, capped = (
            (folder / name).read_bytes().decode("ascii")
            for name in ("schedule.txt", "jitter.txt", "capped.txt")
        )
        assert schedule == "".join(f"attempt={n} wait={2**n}\n" for n in range(6))
        assert capped == "1\n2\n4\n8\n16\n30\n30\n30\n30\n"
        assert re.fullmatch(r"(\d\.\d{6}\n){20}", jitter)
        assert all(0 <= float(line) <= 8 for line in jitter.splitlines())
        drawn.add(jitter)
    assert len(drawn) == 2


# ---- Step 8: replay ----------------------------------------------------------------------------


def test_replay_puts_the_oldest_dead_letter_back_and_only_that(
    redis_client: redis.Redis, flat: Path, run: Callable[..., Process]
) -> None:
    for number in (1, 2):
        redis_client.lpush(QUEUE, f'{{"kind": "bad", "id": {number}}}')
        assert run(flat / "worker.py", "--burst", QR_BASE=QUICK).wait() == 0
    first, second = dead(redis_client)
    for left, envelope in ((1, first), (0, second)):
        assert run(flat / "replay.py", cwd=Path("/")).wait() == 0
        assert redis_client.llen(QUEUE + ":dlq") == left
        [text] = redis_client.lrange(QUEUE, 0, -1)
        message = json.loads(text)
        assert text.startswith(b'{"kind": "bad", "id": %d, "attempts": 0' % (2 - left))
        assert (message["attempts"], message["id"]) == (0, 2 - left)
        assert message["first_seen_at"] == envelope["first_seen_at"]
        redis_client.delete(QUEUE)
    last = run(flat / "replay.py")
    assert last.wait() == 0
    assert last.out
    assert "Traceback" not in last.err
    assert empty(redis_client)


@pytest.mark.parametrize(
    "entry", ['{"payload": {"kind": "bad"}}', r'{"payload": "{\"kind\": \"bad\"}"}']
)
def test_replay_accepts_an_entry_made_by_hand_and_leaves_what_it_cannot_read(
    redis_client: redis.Redis, flat: Path, run: Callable[..., Process], entry: str
) -> None:
    redis_client.lpush(QUEUE + ":dlq", "unreadable", entry)
    assert run(flat / "replay.py").wait() == 0
    assert redis_client.lrange(QUEUE + ":dlq", 0, -1) == [b"unreadable"]
    [text] = redis_client.lrange(QUEUE, 0, -1)
    assert text.startswith(b'{"kind": "bad", "attempts": 0')


def test_a_replayed_message_has_its_five_runs_again(
    redis_client: redis.Redis, flat: Path, run: Callable[..., Process]
) -> None:
    redis_client.lpush(QUEUE, BAD)
    for _ in range(2):
        worker = run(flat / "worker.py", "--burst", QR_BASE=QUICK)
        assert worker.wait() == 0
        assert len(requeues(worker.out)) == 4
        assert run(flat / "replay.py").wait() == 0
    message = json.loads(redis_client.lindex(QUEUE, 0))
    assert message["_retry"]["replays"] == 2
    assert message["_retry"]["earlier_attempts"] == 10
    assert len(message["_retry"]["history"]) == 10


# ---- The four rooms ----------------------------------------------------------------------------

OURS = {
    "worker": {"backoff"},
    "replay": {"backoff", "worker"},
    "backoff": set(),
    "taskproc": {"backoff"},
}


@pytest.mark.parametrize("name", OURS)
def test_a_script_needs_its_neighbours_redis_and_nothing_else(name: str) -> None:
    """And none has a standard module's name: a sibling `queue.py` would break `import redis`."""
    assert name not in sys.stdlib_module_names
    imported = set()
    for node in ast.walk(ast.parse((PROJECT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    foreign = {module.partition(".")[0] for module in imported} - sys.stdlib_module_names
    assert foreign - {"redis"} <= OURS[name]


@pytest.mark.parametrize("name", OURS)
def test_nothing_happens_at_import(flat: Path, tmp_path: Path, name: str) -> None:
    before = sorted(flat.iterdir())
    seen = subprocess.run(
        [sys.executable, "-B", "-c", f"import {name}"],
        capture_output=True,
        check=True,
        cwd=flat,
        env=clean_environment({"QR_DIR": tmp_path / "none", "REDIS_URL": "no URL"}),
    )
    assert (seen.stdout, seen.stderr) == (b"", b"")
    assert sorted(flat.iterdir()) == before
