"""The desk: look at dead letters, discard and restore them, watch the whole queue."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import select
import signal
import string
import struct
import subprocess
import sys
import termios
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from letters import DLQ, ERROR, SEEN, dead_for, desk, envelope
from processes import PROJECT, Process, clean_environment, until
from server import Server
from test_replay import fork_desk, kill_after

import replay
from worker import Queue, host_name, iso

Run = Callable[..., Process]
HOSTILE = "\x1b[31mred\x1b]0;title\x07\r\n\u2028\u202e\x85\x9b1m"


def columns(line: str) -> list[str]:
    return re.split(r" {2,}", line)


def on_terminal(
    server: Server, *argv: str, typed: str = "", enough: str = "", **environment: str
) -> tuple[str, int]:
    """What the desk shows on a terminal of 80 columns and 24 lines, and its exit code.

    `enough`: a pattern after which it gets a SIGINT, as by Ctrl-C.
    """
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    settings = {"REDIS_URL": server.url, "TERM": "xterm", **environment}
    child = subprocess.Popen([sys.executable, PROJECT / "replay.py", *argv], stdin=inside,
                             stdout=inside, stderr=inside,
                             env=clean_environment(settings))  # fmt: skip
    os.close(inside)
    os.write(terminal, typed.encode())
    shown = b""
    while select.select([terminal], [], [], 30)[0]:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        shown += piece
        if enough and re.search(enough, shown.decode(errors="replace"), re.DOTALL):
            child.send_signal(signal.SIGINT)
            enough = ""
    os.close(terminal)
    return shown.decode(), child.wait(30)


# ── Look ──────────────────────────────────────────────────────────────────────────────────────


def test_a_list_shows_the_newest_first_in_pages(
    server: Server, redis_client: redis.Redis, queue: Queue
) -> None:
    now = queue.now_ms()
    letters = [dead_for(90 - n, now, {"kind": f"k{n}"}, attempts=n) for n in range(50)]
    redis_client.lpush(DLQ, *letters)
    said = desk(server, "--list")
    head, *rows = map(columns, said.out.splitlines())
    assert head == ["ID", "AGE", "KIND", "ATTEMPTS", "REASON", "ERROR"]
    assert [row[2] for row in rows] == [f"k{n}" for n in range(49, 29, -1)]
    assert rows[0] == [replay.Letter(letters[49]).id, "41 s", "k49", "49", "exhausted", ERROR]
    assert "--page 2" in said.err
    third = desk(server, "--list", "--page", 3)
    assert [columns(row)[2] for row in third.out.splitlines()[1:]] == [
        f"k{n}" for n in range(9, -1, -1)
    ]
    assert third.err == "replay: letters in all: 50\n"
    oldest = desk(server, "--list", "--oldest", "--limit", 2).out.splitlines()
    assert [columns(row)[2] for row in oldest[1:]] == ["k0", "k1"]
    assert desk(server, "--list", "--all").out.count("\n") == 51


def test_json_is_one_strict_object_per_line(server: Server, redis_client: redis.Redis) -> None:
    """All of them, in pipes; what is no JSON number, and what cannot be read, included."""
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(30)))
    redis_client.lpush(DLQ, envelope('{"kind": NaN}'), "junk")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for look in ("--list", "--show", "--group"):
        lines = desk(server, look, "--json", "--all").out.splitlines()
        facts = [json.loads(line, parse_constant=refuse) for line in lines]
        assert sum(fact.get("count", 1) for fact in facts) == 32
        assert all(isinstance(fact, dict) for fact in facts)


def test_nothing_out_of_a_letter_commands_the_terminal(
    server: Server, redis_client: redis.Redis, queue: Queue
) -> None:
    """Errors, kinds, field names, values, whole entries: escaped wherever they are shown."""
    payload = {"kind": HOSTILE, HOSTILE: {HOSTILE: [HOSTILE]}}
    history = [{"at": HOSTILE, "error": HOSTILE, "wait": HOSTILE}]
    facts = {name: HOSTILE for name in ("error", "attempts", "reason", "failed_at", "worker", "x")}
    redis_client.lpush(DLQ, envelope(payload, history=history, **facts), HOSTILE.encode())
    redis_client.lpush(DLQ, envelope(json.dumps(json.dumps(payload, ensure_ascii=False)), **facts))
    redis_client.hset("q:tasks:running", "7", json.dumps(payload))
    redis_client.zadd("q:tasks:leases", {f"7 {HOSTILE}": 1, HOSTILE: 2})
    redis_client.hset("q:tasks:notes", "7", HOSTILE)
    redis_client.hset("q:tasks:stats", HOSTILE, 1)
    redis_client.zadd("q:tasks:workers", {f"{HOSTILE}/{HOSTILE}": queue.now_ms() - 90_000})
    redis_client.zadd("q:tasks:retry", {f"1:{json.dumps(payload)}": 1})
    looks = ("--list", "--show --all", "--group", "--check", "--status", "--health",
             "--list --json", "--status --json", "--show --all --json", "--prometheus",
             "--all --dry-run",
             f"--all --dry-run --set {HOSTILE}={HOSTILE}", "--all")  # fmt: skip
    for look in looks:
        said = desk(server, *look.split(" ", 3))
        unsafe = {c for c in said.out + said.err if not c.isprintable()} - {"\n"}
        assert not unsafe, (look, unsafe, said)
        assert "red" in said.out + said.err or look == "--all", look


def test_a_letter_is_shown_with_everything_and_its_failures_in_order(
    server: Server, redis_client: redis.Redis
) -> None:
    """The payload's values look as the producer wrote them: no digit and no duplicate is lost."""
    history = [
        {"at": "2026-11-30T12:00:00.500+00:00", "error": "KeyError: 'a'", "wait": 0.25},
        {"at": "2026-11-30T12:00:01.000+00:00", "error": ERROR, "wait": None},
    ]
    payload = '{"kind": "bad", "n": 1.10, "big": 1e400, "u": {"id": 1, "id": 2}}'
    redis_client.lpush(DLQ, envelope(payload, history=history, replays=2, stage={"done": 3}))
    shown = desk(server, "--show", replay.Letter(redis_client.lindex(DLQ, 0)).id[:5]).out
    for line in ("n: 1.10", "big: 1e400", "id: 1", "id: 2", 'stage +{"done": 3}', "replays +2"):
        assert re.search(rf"^ +{line if '+' in line else re.escape(line)}$", shown, re.M), line
    times = re.findall(r"\+(\d\.\d+) s  (waits 0.25 s|then dead) +(\S+)", shown)
    assert times == [("0.377", "waits 0.25 s", "KeyError:"), ("0.500", "then dead", "ValueError:")]


def test_what_cannot_be_read_can_be_shown(server: Server, redis_client: redis.Redis) -> None:
    redis_client.lpush(DLQ, b"\xff junk", b"[1]", b'{"payload": 3}', b"", b"[" * 100_000)
    said = desk(server, "--show", "--all")
    assert said.code == 0 and said.out.count("cannot be replayed: ") == 5
    assert "\\udcff junk" in said.out


@pytest.mark.parametrize("date", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_date_at_the_end_of_the_calendar_hides_no_group(
    server: Server, redis_client: redis.Redis, date: str
) -> None:
    redis_client.lpush(DLQ, envelope(), envelope(failed_at=date, first_seen_at=date))
    for look in ("--group", "--group --json", "--list", "--list --json", "--show --all"):
        said = desk(server, *look.split())
        assert said.code == 0 and "ValueError" in said.out, look
    [group] = desk(server, "--group", "--json").out.splitlines()
    assert json.loads(group)["count"] == 2


@pytest.mark.parametrize("depth", [900, 2_000])
def test_a_payload_is_shown_however_deep_it_is(
    server: Server, redis_client: redis.Redis, depth: int
) -> None:
    """Some Pythons read two thousand levels; those that do not say that they cannot."""
    payload = '{"a": ' * depth + "{}" + "}" * depth
    redis_client.lpush(DLQ, envelope(payload))
    said = desk(server, "--show")
    assert said.code == 0 and ("a:" in said.out or "cannot be replayed: " in said.out)


def test_groups_count_equal_faults_as_one(server: Server, redis_client: redis.Redis) -> None:
    """Numbers, ids and quoted texts do not matter; the reason, the place and the status do."""
    place = " (taskproc.py:3 in process)"
    errors = [
        *(f"KeyError: 'user {n}'{place}" for n in range(5)),
        *(f"Timeout: 3f2a91c0-{n:04x}-4f after {n}.5 s{place}" for n in range(3)),
        *(f"NotFound: HTTP {status}{place}" for status in (404, 404, 410)),
        "NotFound: HTTP 404 (taskproc.py:9 in process)",
    ]
    redis_client.lpush(DLQ, *(envelope({"n": n}, error=e) for n, e in enumerate(errors)))
    redis_client.lpush(DLQ, envelope(error=errors[0], reason="timed_out"))
    said = desk(server, "--group")
    rows = [columns(row) for row in said.out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["5", "3", "2", "1", "1", "1"]
    assert rows[0][6] == f"KeyError: '…'{place}" and rows[2][6] == errors[8]
    assert said.err.startswith("replay: 13 letters in 6 groups")
    assert desk(server, "--show", rows[1][5]).out.startswith(f"{rows[1][5]}  Timeout")


LOWER = string.ascii_lowercase + string.digits
HEX, BASE62, CROCKFORD = "0123456789abcdef", LOWER + string.ascii_uppercase, string.digits + "ABCDE"
KINDS: list[Callable[[random.Random, Callable[[str, int], str]], str]] = [
    lambda rng, some: f"CardError: charge ch_{some(LOWER, 4)} was declined (pay.py:1 in f)",
    lambda rng, some: f"CardError: no customer cus_{some(BASE62, 14)} (pay.py:1 in f)",
    lambda rng, some: f"Gone: order 01{some(CROCKFORD, 24)} (pay.py:2 in f)",
    lambda rng, some: f"Gone: user {uuid.UUID(int=rng.getrandbits(128))} (pay.py:2 in f)",
    lambda rng, some: f"Refused: no box {some(LOWER, 3)}.x+y@{some(LOWER, 4)}.org (m.py:2 in f)",
    lambda rng, some: f"OSError: [Errno 2] cannot read /srv/{some(LOWER, 5)}/x.csv (m.py:9 in f)",
    lambda rng, some: f"OSError: [Errno 28] cannot read /srv/{some(LOWER, 5)}/x.csv (m.py:9 in f)",
    lambda rng, some: f"Slow: {rng.choice(('12 ms', '1.5s'))} for 0x{some(HEX, 9)} (m.py:1 in f)",
    lambda rng, some: f"HTTPError: 404 Client Error: no {rng.random()} (m.py:3 in f)",
    lambda rng, some: f"HTTPError: 410 Client Error: no {rng.random()} (m.py:3 in f)",
    lambda rng, some: f"DBError: SQLSTATE 23505: digest {some(HEX, 40)} is there (m.py:4 in f)",
    lambda rng, some: f"DBError: SQLSTATE 42P01: digest {some(HEX, 40)} is there (m.py:4 in f)",
]  # fmt: skip


def test_two_thousand_letters_of_twelve_kinds_are_twelve_rows(
    server: Server, redis_client: redis.Redis
) -> None:
    """Ids go, whatever their form; the type, HTTP status, errno and SQLSTATE stay."""
    rng = random.Random(7)

    def some(alphabet: str, n: int) -> str:
        return "".join(rng.choices(alphabet, k=n))

    errors = [kind(rng, some) for kind in KINDS for _ in range(167)]
    assert len(set(errors)) > 1_500
    redis_client.lpush(DLQ, *(envelope({"kind": e[:3]}, error=e) for e in errors))
    rows = [json.loads(row) for row in desk(server, "--group", "--json").out.splitlines()]
    assert sorted(row["count"] for row in rows) == [167] * len(KINDS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A: x (m.py:1 in f)", "B: x (m.py:1 in f)"),
        ("A: x (m.py:1 in f)", "A: x (m.py:2 in f)"),
        ("A: HTTP 404", "A: HTTP 410"),
        ("A: status code 404", "A: status code 410"),
        ("A: '404 Not Found' for url 'x'", "A: '410 Gone' for url 'x'"),
        ("A: [Errno 111] no", "A: [Errno 104] no"),
        ("A: (1062, 'x')", "A: (1213, 'x')"),
        ("A: no [from S3Error: 5 (m.py:1 in f)]", "A: no [from KeyError: 5 (m.py:1 in f)]"),
        ("A: no [from KeyError: 5 (m.py:1 in f)]", "A: no [from KeyError: 5 (m.py:2 in f)]"),
        ("A: card_declined", "A: card_expired"),
    ],
)
def test_what_tells_two_faults_apart_stays_in_the_fingerprint(one: str, other: str) -> None:
    assert replay.fingerprint(one) != replay.fingerprint(other)


def test_a_group_shows_its_kinds_and_like_means_all_of_it(
    server: Server, redis_client: redis.Redis
) -> None:
    """`--like` works wherever letters are chosen, and with other conditions."""
    for n in range(6):
        error = f"KeyError: '{n}' (m.py:1 in f)"
        redis_client.lpush(DLQ, envelope({"kind": "pay", "n": n}, error=error))
        redis_client.lpush(DLQ, envelope({"kind": "mail", "n": n}, error=error, reason="permanent"))
    redis_client.lpush(DLQ, envelope({"kind": "trip"}, error="KeyError: 'x' (m.py:1 in f)"))
    rows = [columns(row) for row in desk(server, "--group").out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [["7", "exhausted", "pay +1"], ["6", "permanent", "mail"]]
    example = rows[0][5]
    assert desk(server, "--list", "--like", example, "--json").out.count("\n") == 7
    assert desk(server, "--group", "--like", example, "--kind", "pay").out.splitlines()[1][0] == "6"
    assert desk(server, "--like", example, "--limit", 2).out == "replayed 2\n"
    assert desk(server, "--like", example, "--like", rows[1][5]).out == "replayed 11\n"
    said = desk(server, "--list", "--like", example)
    assert said.code == 1 and "no dead letter" in said.err


def test_the_beginning_of_ids_of_two_groups_is_like_neither(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.lpush(DLQ, *(envelope(error=f"E{n}: x") for n in range(17)))
    first = Counter(replay.Letter(raw).id[0] for raw in redis_client.lrange(DLQ, 0, -1))
    said = desk(server, "--like", first.most_common(1)[0][0])
    assert said.code == 2 and "groups" in said.err and redis_client.llen(DLQ) == 17


def test_the_traceback_and_what_was_no_failure_are_shown(
    server: Server, redis_client: redis.Redis
) -> None:
    trace = f'  File "t.py", line 3, in f\n    x[{HOSTILE!r}]\nKeyError: {HOSTILE}'
    history = [
        {"at": SEEN, "error": "A: b", "wait": 0.041, "of": 4.0},
        {"at": SEEN, "error": "A: b", "wait": None},
    ]
    redis_client.lpush(DLQ, envelope(traceback=trace, history=history, released=2))
    shown = desk(server, "--show").out
    lines = shown.splitlines()
    at = lines.index("  traceback of the last run")
    assert lines[at + 1] == '      File "t.py", line 3, in f'
    assert lines[at + 3].startswith("    KeyError: ")
    assert re.search(r"waits 0.041 s of 4 s +A: b\n", shown) and "then dead" in shown
    assert "    broken off by stops of workers, uncharged: 2\n" in shown
    assert {c for c in shown if not c.isprintable()} == {"\n"}
    assert desk(server, "--show", "--json").out.count("traceback") == 1


def test_colours_and_width_are_for_terminals(server: Server, redis_client: redis.Redis) -> None:
    redis_client.lpush(DLQ, envelope(error="E" * 300))
    assert "\x1b" not in desk(server, "--list").out and "E" * 300 in desk(server, "--list").out
    shown, code = on_terminal(server, "--list")
    assert code == 0 and "\x1b[1mID" in shown
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) == 80 and lines[1].endswith("E…")
    shown, code = on_terminal(server, "--list", NO_COLOR="1")
    assert code == 0 and "\x1b" not in shown


def test_a_reader_that_has_seen_enough_ends_it_quietly(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(5000)))
    script = '"$0" "$1" --list --json | head -1; exit ${PIPESTATUS[0]}'
    command = ["bash", "-c", script, sys.executable, str(PROJECT / "replay.py")]
    done = subprocess.run(command, env=clean_environment({"REDIS_URL": server.url}),
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_a_full_disk_is_one_sentence(server: Server, redis_client: redis.Redis) -> None:
    redis_client.lpush(DLQ, envelope())
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, PROJECT / "replay.py", "--list"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60,
                              env=clean_environment({"REDIS_URL": server.url}))  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "space" in done.stderr


# ── Discard and restore ───────────────────────────────────────────────────────────────────────

ODD = [b"\xff\x00\x80 junk", b"", "\u2028".encode(), b'{"payload":\t{"a" : 1.10}}', b"\xed\xa0\x80"]


def test_what_is_discarded_can_be_restored_to_the_byte(
    server: Server, redis_client: redis.Redis, tmp_path: Path, queue: Queue
) -> None:
    """Twins too. Restored letters lie at the oldest end, by age. A second time adds nothing."""
    file, now = tmp_path / "letters", queue.now_ms()
    gone = [dead_for(100 - n, now, {"n": n}, reason="permanent") for n in range(500)]
    kept = [dead_for(10, now, {"n": -1}), envelope({"n": -2})]
    redis_client.lpush(DLQ, kept[0], *gone, gone[7], kept[1])
    said = desk(server, "--discard", "--reason", "permanent", "--yes", "--file", file)
    assert said.code == 0 and said.out.startswith("discarded 501\n") and str(file) in said.out
    assert redis_client.lrange(DLQ, 0, -1) == kept[::-1]
    said = desk(server, "--restore", file)
    assert said == (0, "restored 501\n", "")
    restored = redis_client.lrange(DLQ, 0, -1)[::-1]
    assert restored == sorted([*gone, gone[7]], key=lambda raw: replay.Letter(raw).died_ms) + kept
    said = desk(server, "--restore", file)
    assert said.code == 2 and f"it is {file}.restored now" in said.err
    assert desk(server, "--restore", f"{file}.restored").out == (
        "restored 0; 501 were there already\n"
    )
    assert redis_client.lrange(DLQ, 0, -1)[::-1] == restored


def test_what_others_took_before_the_yes_is_not_restored(
    server: Server, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have replayed it; of two twins, the one that was left is restored."""
    letters = [envelope({"n": n}) for n in range(5)]
    redis_client.lpush(DLQ, *letters, letters[1])

    class Hesitant:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            for taken in (letters[1], letters[3]):
                redis_client.lrem(DLQ, 1, taken)
            return "6\n"

    monkeypatch.setattr(sys, "stdin", Hesitant())
    said = desk(server, "--discard", "--all", "--file", tmp_path / "f")
    assert "discarded 4; 2 had been taken by someone else\n" in said.out
    assert not redis_client.exists(DLQ)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["f"]
    assert desk(server, "--restore", tmp_path / "f").out == "restored 4\n"
    assert sorted(redis_client.lrange(DLQ, 0, -1)) == sorted(set(letters) - {letters[3]})


def test_any_bytes_survive_discard_and_restore(
    server: Server, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.lpush(DLQ, *ODD)
    assert desk(server, "--discard", "--all", "--yes", "--file", tmp_path / "f").code == 0
    assert not redis_client.exists(DLQ)
    assert desk(server, "--restore", tmp_path / "f").code == 0
    assert Counter(redis_client.lrange(DLQ, 0, -1)) == Counter(ODD)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_discard_killed_at_any_moment_loses_nothing_that_is_not_in_the_file(
    server: Server, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Killed, then restored, killed while restoring, then restored: everything is there, once."""
    letters = [envelope({"n": n}) for n in range(600)]
    redis_client.lpush(DLQ, *letters)
    for n in range(25):
        file = tmp_path / f"{n}"
        kill_after(fork_desk(server, "--discard", "--all", "--yes", "--file", str(file)), n / 500)
        if file.exists() and redis_client.llen(DLQ) < 600:
            kill_after(fork_desk(server, "--restore", str(file)), n / 1000)
            if file.exists():
                assert desk(server, "--restore", file).code == 0
        assert sorted(redis_client.lrange(DLQ, 0, -1)) == sorted(letters), f"kill {n}"


def test_discard_needs_a_choice_and_a_yes(
    server: Server, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    redis_client.lpush(DLQ, envelope(), envelope({"n": 1}))
    taken = tmp_path / "mine"
    taken.write_text("precious")
    for argv in (["--yes"], ["--all"], ["--all", "--yes", "--file", taken]):
        said = desk(server, "--discard", *argv)
        assert said.code == 2 and said.err, argv
    assert desk(server, "--discard", "--all", "--dry-run").out.count("would discard") == 3
    assert desk(server, "--discard", "--kind", "none", "--yes").err.endswith("fits\n")
    for typed in ("yes\n", "\n", "\x04"):
        shown, code = on_terminal(server, "--discard", "--all", typed=typed)
        assert code == 1 and "nothing was discarded" in shown, typed
    assert redis_client.llen(DLQ) == 2
    assert taken.read_text() == "precious" and list(tmp_path.iterdir()) == [taken]
    shown, code = on_terminal(server, "--discard", "--all", typed="2\n")
    assert code == 0 and "discarded 2" in shown and redis_client.llen(DLQ) == 0


@pytest.mark.parametrize(
    "line", ["", "junk", "[]", '{"dlq": "other:dlq", "envelope": "x"}', '{"dlq": "q:tasks:dlq"}']
)
def test_a_file_that_is_not_ours_restores_nothing(
    server: Server, redis_client: redis.Redis, tmp_path: Path, line: str
) -> None:
    """Not even the good lines before the bad one."""
    (tmp_path / "f").write_text(replay.saved(DLQ, envelope()) + line + "\n")
    said = desk(server, "--restore", tmp_path / "f")
    assert said.code == 2 and said.err.count("\n") == 1
    assert not redis_client.exists(DLQ)


# ── See the whole ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def busy(redis_client: redis.Redis, queue: Queue) -> int:
    """A queue with something in every state; the server's time (ms) when it was made."""
    now = queue.now_ms()
    message = json.dumps({"kind": "pay", "attempts": 2, "first_seen_at": iso(now - 120_000)})
    redis_client.lpush("q:tasks", message, "{}")
    redis_client.lpush("q:tasks:next", message)
    token = (now - 30_000) * 1000
    redis_client.hset("q:tasks:running", str(token), message)
    redis_client.zadd("q:tasks:leases", {f"{token} me/2": now + 30_000})
    redis_client.zadd("q:tasks:retry", {f"40:{message}": now + 60_000, "39:{}": now - 1000})
    redis_client.lpush(DLQ, dead_for(7200, now), dead_for(5, now))
    redis_client.hset("q:tasks:stats", mapping={"done": 10, "dead": 2})
    redis_client.zadd("q:tasks:workers", {"host:1:ab/foreman": now, "host:1:ab/hand1": now - 2000})
    redis_client.zadd("q:tasks:arrivals", {str(now - 120_000): 16, str(now - 1): 18})
    return now


def test_status_shows_every_state(server: Server, busy: int) -> None:
    said = desk(server, "--status")
    rows = [columns(line) for line in said.out.splitlines()]
    assert ["waiting", "3", "≥ 2 min"] in rows
    assert ["running", "1", "30 s"] in rows
    assert ["retrying", "2", "2 min"] in rows
    assert ["dead", "2", "2.0 h"] in rows
    assert [str((busy - 30_000) * 1000), "pay", "me/2", "30 s"] in rows
    assert ["host:1:ab", "1", "2 s ago"] in rows
    assert ["1", "in 0.0 s", "-", "0"] in rows
    assert any(row[:2] == ["done", "10"] for row in rows)
    facts = json.loads(desk(server, "--status", "--json").out)
    assert {name: state["count"] for name, state in facts["states"].items()} == {
        "waiting": 3, "running": 1, "retrying": 2, "dead": 2}  # fmt: skip
    assert facts["overdue"] == 1 and facts["counters"] == {"done": 10, "dead": 2}


@pytest.mark.parametrize("token", ["253402300800000000", "9" * 400, "9" * 5_000, "-1", "", "x y"])
def test_a_run_with_an_absurd_token_hides_nothing(
    server: Server, redis_client: redis.Redis, busy: int, token: str
) -> None:
    """A token is the server's time (µs) at the start of the run, if nobody meddled with it."""
    redis_client.hset("q:tasks:running", token, "{}")
    redis_client.zadd("q:tasks:leases", {f"{token} me/3": 1})
    for look in ("--status", "--status --json", "--prometheus", "--health", "--check"):
        desk(server, *look.split())
    assert json.loads(desk(server, "--status", "--json").out)["states"]["running"]["count"] == 2
    assert "me/3" in desk(server, "--status").out


def test_the_url_cannot_change_the_protocol(server: Server, busy: int, run: Run) -> None:
    """RESP 3 has replies of another shape."""
    process = run("replay.py", "--status", "--json", REDIS_URL=server.url + "&protocol=3")
    assert process.wait() == 0, process
    assert json.loads(process.out)["states"]["running"]["count"] == 1


def test_watch_goes_on_until_ctrl_c_and_shows_rates(
    run: Run, redis_client: redis.Redis, busy: int
) -> None:
    process = run("replay.py", "--status", "--watch", 0.05)
    until(lambda: process.out.count("STATE") > 2, saw=lambda: process)
    redis_client.hincrby("q:tasks:stats", "done", 1000)
    until(lambda: re.search(r"done +1010 +[1-9][0-9.]*/s", process.out), saw=lambda: process)
    assert process.stop(signal.SIGINT) == 0
    assert process.err == ""


def test_prometheus_gets_valid_exposition_text(
    server: Server, redis_client: redis.Redis, busy: int
) -> None:
    """Each metric has its HELP and TYPE before its samples; each sample is well formed."""
    redis_client.zadd("q:tasks:workers", {'a"b\\c\nd/hand1': busy})
    said = desk(server, "--prometheus")
    assert said.code == 0 and said.out.endswith("\n")
    label = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*"'
    sample = re.compile(rf"([a-zA-Z_:][\w:]*)\{{({label}(?:,{label})*)\}} (-?\d+(?:\.\d+)?)")
    types: dict[str, str] = {}
    values: dict[tuple[str, str], float] = {}
    for line in said.out.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in types and len(line.split(" ", 3)[3]) > 10
        elif line.startswith("# TYPE "):
            _, _, named, types[name] = line.split(" ")
            assert named == name and types[name] in ("counter", "gauge")
        else:
            match = sample.fullmatch(line)
            assert match and match[1] == name, line
            assert (match[1], match[2]) not in values, line
            values[match[1], match[2]] = float(match[3])
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types.items())
    assert values["qr_messages", 'queue="q:tasks",state="waiting"'] == 3
    assert values["qr_transitions_total", 'queue="q:tasks",transition="done"'] == 10
    assert any('worker="a\\"b\\\\c\\\\nd"' in labels for _, labels in values)


@pytest.mark.parametrize(
    ("progress", "code", "named"),
    [
        ({"w/foreman": 1, "w/hand1": 1}, 0, "workers 1"),
        ({"w/foreman": 1, "w/hand1": 1, "w/hand2": 90}, 1, "w: its hand2 has not moved for 1 min"),
        ({"w/foreman": 90, "w/hand1": 1}, 1, "w: its foreman has not moved"),
        ({"w/foreman": 90, "w/hand1": 95, "v/foreman": 0}, 1, "w: its hand1 has not moved"),
        ({"w/foreman": 7000, "w/hand1": 7000, "v/foreman": 0}, 0, "workers 1"),
        ({"w/foreman": 7000}, 1, "no worker is alive anywhere; messages to be worked on: 6"),
        ({}, 1, "no worker is alive anywhere; messages to be worked on: 6"),
    ],
)
def test_health_names_the_loop_that_stands_still(
    server: Server,
    redis_client: redis.Redis,
    busy: int,
    progress: dict[str, int],
    code: int,
    named: str,
) -> None:
    """Seconds since each loop moved; a worker silent for ten times the limit has gone."""
    redis_client.delete("q:tasks:workers")
    for loop, age in progress.items():
        redis_client.zadd("q:tasks:workers", {loop: busy - age * 1000})
    said = desk(server, "--health")
    assert said.code == code and named in said.out


def test_health_here_asks_only_for_the_workers_of_this_machine(
    server: Server, redis_client: redis.Redis, busy: int
) -> None:
    """What stands still elsewhere is an alert for a person, and no reason to restart this one."""
    here, there = f"{host_name()}:1:ab", "elsewhere:2:cd"
    redis_client.delete("q:tasks:workers")
    moved = {f"{here}/foreman": busy, f"{there}/foreman": busy - 99_000}
    redis_client.zadd("q:tasks:workers", moved)
    assert desk(server, "--health", "--here").code == 0
    assert desk(server, "--health").code == 1
    redis_client.zadd("q:tasks:workers", {f"{here}/hand1": busy - 99000})
    said = desk(server, "--health", "--here")
    assert said.code == 1 and "hand1" in said.out and "elsewhere" not in said.out


def test_a_page_that_is_not_there_is_not_an_empty_queue(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.lpush(DLQ, envelope())
    for flags in ([], ["--json"]):
        said = desk(server, "--list", "--page", "9", *flags)
        assert said.code == 1 and "there is no page 9" in said.err, said


def test_a_page_of_everything_is_that_page(server: Server, redis_client: redis.Redis) -> None:
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(replay.SHOWN + 3)))
    for flag in ("--all", "--json"):
        said = desk(server, "--list", flag, "--page", 2)
        assert said.code == 0
        assert len(said.out.splitlines()) == 3 + (flag == "--all")  # the table has a head


def test_a_change_that_does_not_fit_the_oldest_is_not_made_to_the_next(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.rpush(DLQ, envelope(), envelope("no object"))
    said = desk(server, "--set", "note=hi", "--dry-run")
    assert said.code == 1 and "stays where it is" in said.err and "would replay" not in said.out


def test_a_reason_that_does_not_exist_is_refused(server: Server) -> None:
    said = desk(server, "--reason", "exhaused")
    assert said.code == 2 and "exhausted" in said.err


def test_without_work_and_without_workers_all_is_well(
    server: Server, redis_client: redis.Redis
) -> None:
    assert desk(server, "--health").code == 0


def test_a_frozen_foreman_is_found_by_name(
    server: Server, redis_client: redis.Redis, worker: Callable[..., Process]
) -> None:
    """A real worker is healthy; with its foreman stopped, --health says so."""
    process = worker("--lease", 1)
    until(lambda: redis_client.zcard("q:tasks:workers") == 2, saw=lambda: process)
    assert desk(server, "--health", "--stale", 30).code == 0
    process.send(signal.SIGSTOP)
    until(lambda: "its foreman has not moved" in desk(server, "--health", "--stale", 1).out)
    assert desk(server, "--health", "--stale", 1).code == 1
    process.send(signal.SIGCONT)


@pytest.mark.parametrize(
    ("ages", "argv", "code"),
    [
        ([], [], 0),
        ([5], [], 1),
        ([5], ["--warn-depth", 2], 0),
        ([5] * 3, ["--warn-depth", 2], 1),
        ([5] * 3, ["--crit-depth", 3], 2),
        ([7200, 5], ["--warn-depth", 9, "--warn-age", "1h"], 1),
        ([7200, 5], ["--warn-depth", 9, "--warn-age", "1h", "--crit-age", "2h"], 2),
        ([5], ["--warn-depth", 9, "--crit-age", "2h"], 0),
    ],
)
def test_check_is_one_line_as_nagios_wants_it(
    server: Server,
    redis_client: redis.Redis,
    queue: Queue,
    ages: list[int],
    argv: list[object],
    code: int,
) -> None:
    """Word, text, a bar, performance data; the exit code says the same as the word."""
    for age in ages:
        redis_client.lpush(DLQ, dead_for(age, queue.now_ms(), error="a | b\nc"))
    said = desk(server, "--check", *argv)
    data = r"depth=(\d+);\d+;\d+;0 oldest=(\d+)s;\d*;\d*;0 wait=0s;;;0"
    line = rf"DLQ (OK|WARNING|CRITICAL) - ([^|\n]+) \| {data}\n"
    match = re.fullmatch(line, said.out)
    assert match and said.err == "" and said.code == code, said
    assert match[1] == ("OK", "WARNING", "CRITICAL")[code] and int(match[3]) == len(ages)
    assert abs(int(match[4]) - max(ages, default=0)) < 60


@pytest.mark.parametrize(("warn", "code"), [("1m", 1), ("1h", 0)])
def test_check_warns_of_a_line_that_does_not_move(
    server: Server, redis_client: redis.Redis, busy: int, warn: str, code: int
) -> None:
    redis_client.delete(DLQ)
    said = desk(server, "--check", "--warn-wait", warn)
    assert said.code == code, said
    assert "; messages wait for 2 min and more | " in said.out
    assert re.search(rf" wait=1[0-9]{{2}}s;{60 if code else 3600};;0\n", said.out), said


def test_check_says_unknown_when_redis_does_not_answer(run: Run) -> None:
    process = run("replay.py", "--check", REDIS_URL="redis://:secret@127.0.0.1:1")
    assert process.wait() == 3
    assert process.out.startswith("DLQ UNKNOWN - ") and "secret" not in process.out + process.err
