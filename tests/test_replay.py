"""Replay moves dead letters back: those that are meant, each exactly once, whatever happens."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from conftest import Conservation, identity
from letters import DLQ, SEEN, dead_for, desk, envelope
from processes import Process, until
from server import Server

import replay
from worker import Message, Queue, iso

Run = Callable[..., Process]


def ended(process: Process, code: int = 0) -> Process:
    assert process.wait() == code, process
    assert "Traceback" not in process.err, process
    return process


def waiting(client: redis.Redis) -> list[dict[str, object]]:
    """The messages on the queue, the one that runs next first."""
    return [json.loads(text) for text in client.lrange("q:tasks", 0, -1)[::-1]]


# ── Without arguments ─────────────────────────────────────────────────────────────────────────


def test_one_message_goes_back_the_oldest_first(run: Run, redis_client: redis.Redis) -> None:
    """One letter per command, the rightmost first; flat, attempts 0, the first date kept."""
    redis_client.lpush(DLQ, envelope({"n": 1}), envelope({"n": 2}))
    said = ended(run("replay.py")).out
    assert said.count("\n") == 1 and "1 left" in said
    [text] = redis_client.lrange("q:tasks", 0, -1)
    assert b'"attempts": 0' in text
    [message] = waiting(redis_client)
    assert (message["n"], message["attempts"], message["first_seen_at"]) == (1, 0, SEEN)
    assert redis_client.lrange(DLQ, 0, -1) == [envelope({"n": 2})]
    ended(run("replay.py"))
    assert [message["n"] for message in waiting(redis_client)] == [1, 2]
    assert redis_client.llen(DLQ) == 0


def test_an_empty_dlq_is_said_and_is_no_failure(server: Server, redis_client: redis.Redis) -> None:
    said = desk(server)
    assert said.code == 0 and "is empty" in said.out
    assert redis_client.dbsize() == 0


def test_what_cannot_be_read_stays_and_the_next_oldest_goes(
    server: Server, redis_client: redis.Redis
) -> None:
    """The unreadable entry is named and untouched, and does not block the others."""
    junk = [b"\x1b[31mjunk", b'{"error": "no payload"}', b'{"payload": 7}']
    redis_client.lpush(DLQ, *junk, envelope({"n": 1}))
    said = desk(server)
    assert said.code == 0 and said.err.count("stays where it is") == 3 and "\x1b" not in said.err
    assert redis_client.lrange(DLQ, 0, -1) == junk[::-1]
    assert redis_client.llen("q:tasks") == 1
    assert desk(server).code == 1
    assert (redis_client.llen(DLQ), redis_client.llen("q:tasks")) == (3, 1)


def test_entries_made_by_hand_are_accepted(server: Server, redis_client: redis.Redis) -> None:
    """The payload may be an object or its JSON text; nothing else has to be there."""
    redis_client.lpush(DLQ, '{"payload": {"id": 1}}', json.dumps({"payload": '{"id": 2}'}))
    assert desk(server).code == desk(server).code == 0
    assert [(m["id"], m["attempts"]) for m in waiting(redis_client)] == [(1, 0), (2, 0)]


def test_bytes_that_never_were_json_come_back_as_they_were(
    server: Server, redis_client: redis.Redis
) -> None:
    raw = b"\xff\xfe no json \x00"
    text = json.dumps(raw.decode(errors="surrogateescape"))
    redis_client.lpush(DLQ, envelope(text, reason="undecodable", attempts=0))
    assert desk(server).code == 0
    assert redis_client.lrange("q:tasks", 0, -1) == [raw]


def test_history_and_the_number_of_replays_stay_with_the_message(
    server: Server, redis_client: redis.Redis
) -> None:
    history = [{"at": iso(0), "error": "KeyError: 'x'", "wait": None}]
    redis_client.lpush(DLQ, envelope(history=history, replays=1, earlier_attempts=5))
    assert desk(server).code == 0
    message = Message.parse(redis_client.lindex("q:tasks", 0))
    assert message.kept == {"history": history, "replays": 2, "earlier_attempts": 10}


# ── Which ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def five(redis_client: redis.Redis, queue: Queue) -> list[bytes]:
    """Five different letters, from the oldest to the newest."""
    now = queue.now_ms()
    letters = [
        dead_for(86400 * 3, now, {"n": 0, "kind": "pay", "user": {"id": 42, "vip": True}}),
        dead_for(7200, now, {"n": 1, "kind": "mail", "user": {"id": "42"}}, reason="permanent"),
        dead_for(600, now, {"n": 2, "kind": "pay", "user": {"id": 7}}, error="Timeout: 5 s [x]"),
        dead_for(60, now, '{"n": 3, "kind": 9}', error="timeout"),
        envelope(
            {"n": 4, "user": None, "items": [{"sku": "x"}, {"a.b": [7]}]}, failed_at="yesterday"
        ),
    ]
    redis_client.lpush(DLQ, *letters)
    return letters


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (["--all"], [0, 1, 2, 3, 4]),
        (["--limit", 2], [0, 1]),
        (["--newest", "--limit", 2], [4, 3]),
        (["--newest"], [4]),
        (["--kind", "pay"], [0, 2]),
        (["--kind", "9"], [3]),
        (["--reason", "permanent"], [1]),
        (["--error", "Timeout: 5 s [x]"], [2]),
        (["--error", "/(?i)timeout/"], [2, 3]),
        (["--older", "1h"], [0, 1]),
        (["--newer", "1h"], [2, 3]),
        (["--older", "5m", "--newer", "1d"], [1, 2]),
        (["--where", "user.id=42"], [0, 1]),
        (["--where", 'user.id="42"'], [1]),
        (["--where", "user.vip=true"], [0]),
        (["--where", "user.vip=1"], []),
        (["--where", "user=null"], [4]),
        (["--where", "user.id=42", "--kind", "pay"], [0]),
        (["--where", "nobody=null"], []),
        (["--kind", "pay", "--kind", "mail"], [0, 1, 2]),
        (["--where", "n=1", "--where", "n=3"], [1, 3]),
        (["--where", "user.id=42", "--where", "n=1", "--where", "n=0", "--kind", "pay"], [0]),
        (["--where", "items.0.sku=x"], [4]),
        (["--where", "items.1.sku=x"], []),
        (["--where", 'items.1."a.b".0=7'], [4]),
        (["--where", "items.2=1"], []),
        (["--where", "n.0=1"], []),
    ],
)
def test_the_letters_that_are_meant_go_and_no_others(
    server: Server,
    redis_client: redis.Redis,
    five: list[bytes],
    asked: list[object],
    meant: list[int],
) -> None:
    """All conditions must hold, of equal ones either. A dry run names the letters, and moves none.

    That nothing fits is exit code 1.
    """
    planned = desk(server, *asked, "--dry-run")
    last = 0 if asked == ["--newest"] else 1  # the receipt
    assert planned.code == (0 if meant else 1)
    assert planned.out.count("would replay ") == len(meant) + last
    assert redis_client.lrange(DLQ, 0, -1) == five[::-1] and not redis_client.exists("q:tasks")
    assert desk(server, *asked).code == (0 if meant else 1)
    assert [message["n"] for message in waiting(redis_client)] == meant
    left = [raw for n, raw in enumerate(five) if n not in meant]
    assert redis_client.lrange(DLQ, 0, -1) == left[::-1]


def test_an_id_or_its_beginning_names_a_letter(
    server: Server, redis_client: redis.Redis, five: list[bytes]
) -> None:
    """An id that is not there is said, and the others still go; exit code 1."""
    ids = [replay.Letter(raw).id for raw in five]
    assert desk(server, ids[3][:6]).code == 0
    assert desk(server, "0123456789", ids[1], ids[4]).code == 1
    assert sorted(message["n"] for message in waiting(redis_client)) == [1, 3, 4]


def test_the_beginning_of_two_ids_moves_nothing(server: Server, redis_client: redis.Redis) -> None:
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(17)))  # 17 letters, 16 digits
    first = Counter(replay.Letter(raw).id[0] for raw in redis_client.lrange(DLQ, 0, -1))
    said = desk(server, first.most_common(1)[0][0])
    assert said.code == 2 and "fits" in said.err
    assert redis_client.llen(DLQ) == 17


def test_equal_letters_share_an_id_and_that_is_said(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.lpush(DLQ, *[envelope()] * 3)
    said = desk(server, replay.Letter(envelope()).id, "--limit", 1)
    assert said.code == 0 and "3 equal letters" in said.err
    assert (redis_client.llen(DLQ), redis_client.llen("q:tasks")) == (2, 1)
    assert desk(server, "--all").code == 0
    assert (redis_client.llen(DLQ), redis_client.llen("q:tasks")) == (0, 3)


def test_one_bad_entry_stops_nothing_and_the_receipt_says_why(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.lpush(DLQ, envelope({"n": 0}), "junk", envelope({"n": 1}), '{"payload": []}')
    said = desk(server, "--all")
    assert said.code == 1
    assert said.out.startswith("replayed 2; ") and said.out.count("1 left in place (") == 2
    assert redis_client.lrange(DLQ, 0, -1) == [b'{"payload": []}', b"junk"]


# ── The walk ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("newest", [False, True])
def test_a_walk_sees_each_letter_once_while_others_take_and_bring(
    queue: Queue, redis_client: redis.Redis, newest: bool
) -> None:
    """A letter that stays is seen exactly once, in order; one that died meanwhile is not meant.

    Between any two steps others take letters out anywhere, and new ones die; the walker itself
    takes some.
    """
    for seed in range(12):
        rng = random.Random(seed)
        redis_client.delete(DLQ)
        redis_client.set(queue.names.fence, 1000)
        there = [envelope({"n": n}, token=n) for n in range(700)]
        redis_client.lpush(DLQ, *there)
        taken, seen = set[bytes](), list[bytes]()
        for letter in (replay.newest_first if newest else replay.oldest_first)(queue):
            seen.append(letter.raw)
            if rng.random() < 0.3:
                letter.gone = redis_client.lrem(DLQ, 1, letter.raw) == 1
            for raw in rng.sample(there, rng.choice((2, 60)) if rng.random() < 0.05 else 0):
                taken.update([raw] * (raw != letter.raw and redis_client.lrem(DLQ, 1, raw)))
            if rng.random() < 0.1:
                token = queue.now_ms() * 1000 + 1000
                redis_client.lpush(DLQ, envelope({"again": len(seen)}, token=token))
        stayed = [raw for raw in (there[::-1] if newest else there) if raw not in taken]
        assert [raw for raw in seen if raw not in taken] == stayed, f"seed {seed}"
        assert max(Counter(seen).values()) == 1, f"seed {seed}"


def test_a_walk_begins_again_when_others_took_all_it_had_seen(
    queue: Queue, redis_client: redis.Redis
) -> None:
    there = [envelope({"n": n}) for n in range(300)]
    redis_client.lpush(DLQ, *there)
    walk = replay.oldest_first(queue)
    seen = [next(walk).raw for _ in range(140)]  # the end of the third page
    redis_client.ltrim(DLQ, 0, -151)
    assert [letter.raw for letter in walk] == there[150:]
    assert seen == there[:140]


def test_a_walk_ends_though_others_replay_and_letters_die_for_ever(
    queue: Queue, redis_client: redis.Redis
) -> None:
    """For each letter that the walk sees, others take the oldest hundred, and as many die."""
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(300)))
    for seen, _ in enumerate(replay.oldest_first(queue)):
        redis_client.rpop(DLQ, 100)
        redis_client.lpush(DLQ, *(envelope({"seen": seen, "n": n}) for n in range(100)))
        assert seen < 300 * 300


def test_large_letters_are_read_in_small_pages(queue: Queue, redis_client: redis.Redis) -> None:
    """What one command asks for is bounded in bytes, as well as one can know before."""
    redis_client.lpush(DLQ, *(envelope({"n": n, "x": "x" * 100_000}) for n in range(60)))
    asked = []
    command = queue.command
    queue.command = lambda *args: asked.append(args) or command(*args)  # type: ignore[method-assign]
    assert len(list(replay.oldest_first(queue))) == 60
    pages = [args for args in asked if args[0] == "LRANGE"]
    assert len(pages) > 10


def test_what_dies_again_during_the_run_is_not_taken_again(
    run: Run,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    redis_client: redis.Redis,
) -> None:
    """Exactly as many are moved as there were, though all of them fail at once and come back."""
    handler("def process(msg): raise ValueError")
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(30)))
    worker("--max-attempts", 1, "--concurrency", 2)
    process = ended(run("replay.py", "--all", "--rate", 100))
    assert process.out == "replayed 30\n"
    until(lambda: redis_client.llen(DLQ) == 30)
    replays = [json.loads(raw)["replays"] for raw in redis_client.lrange(DLQ, 0, -1)]
    assert replays == [1] * 30


def test_a_replayed_message_has_a_fresh_budget_and_its_whole_history(
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    server: Server,
    redis_client: redis.Redis,
) -> None:
    """Die, replay, die again, three times: the first date, all failures and the replays are there.

    The last time the handler kills its own process: that budget is fresh after a replay, too.
    """
    handler("import os\ndef process(msg): os.kill(os.getpid(), 9) if 'die' in msg else 1 / 0")
    redis_client.lpush("q:tasks", '{"kind": "bad"}')
    seen = set()
    for n in range(4):
        ended(worker("--burst", "--max-attempts", 2, QR_BASE=0.01))
        [raw] = redis_client.lrange(DLQ, 0, -1)
        letter = json.loads(raw)
        assert (letter["attempts"], letter.get("replays", 0)) == (2, n)
        assert letter.get("earlier_attempts", 0) == 2 * n and len(letter["history"]) == 2 * n + 2
        seen.add(letter["first_seen_at"])
        assert desk(server, *(["--set", "die=true"] if n == 2 else [])).code == 0
    assert len(seen) == 1 and letter["reason"] == "worker_died"


# ── Killed, and together ──────────────────────────────────────────────────────────────────────


def fork_desk(server: Server, *argv: str) -> int:
    """The desk in a child process, quiet; returns its pid."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.environ["REDIS_URL"] = server.url
        code = 70
        try:
            code = replay.main(list(argv))
        finally:
            os._exit(code)
    return pid


def kill_after(pid: int, seconds: float) -> bool:
    """Kills the child, however far it is; tells whether it was still running."""
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_replay_killed_500_times_loses_nothing_and_doubles_nothing(
    server: Server, redis_client: redis.Redis
) -> None:
    """kill -9 at 500 random moments: each message is in exactly one of the two lists, always."""
    rng, kills, everything = random.Random(5), 0, list(range(1000))
    while kills < 500:
        if redis_client.llen(DLQ) < 200:
            redis_client.flushall()
            redis_client.lpush(DLQ, *(envelope({"n": n, "odd": n % 2}) for n in everything))
        which = rng.choice((["--all"], ["--newest", "--all"], ["--where", "odd=1"]))
        kills += kill_after(fork_desk(server, *which), rng.uniform(0, 0.02))
        found = redis_client.lrange(DLQ, 0, -1) + redis_client.lrange("q:tasks", 0, -1)
        numbers = sorted(int(re.search(rb'"n": (\d+)', text)[1]) for text in found)
        assert numbers == everything, f"after {kills} kills"


def test_two_operators_at_once_move_each_letter_exactly_once(
    run: Run, redis_client: redis.Redis, conservation: Conservation
) -> None:
    letters = [envelope({"n": n}) for n in range(3000)]
    conservation.pushed.update(identity(json.dumps({"n": n}).encode()) for n in range(3000))
    redis_client.lpush(DLQ, *letters)
    desks = [run("replay.py", "--all", *order) for order in ([], [], ["--newest"])]
    said = [ended(process).out for process in desks]
    moved = [int(line.split()[1].rstrip(";\n").replace(",", "")) for line in said]
    assert sum(moved) == 3000, said
    assert redis_client.llen(DLQ) == 0 and redis_client.llen("q:tasks") == 3000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_replay_between_two_letters_with_a_receipt(
    run: Run, redis_client: redis.Redis, number: signal.Signals
) -> None:
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(1000)))
    process = run("replay.py", "--all", "--rate", 50)
    until(lambda: redis_client.llen("q:tasks") > 1)
    process.send(number)
    ended(process, code=1)
    moved = redis_client.llen("q:tasks")
    assert process.out == f"stopped by a signal: replayed {moved}\n"
    assert moved + redis_client.llen(DLQ) == 1000 and moved < 1000


# ── --set ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("payload", "edits", "wanted"),
    [
        ('{"a":1}', ["a=2"], '{"a":2}'),
        ('{ "a" :\t1 , "b": 1.10}', ["a=2"], '{ "a" :\t2 , "b": 1.10}'),
        ('{"a": "\\u00e9\\/", "b": 130775545883395173}', ["b=0"], '{"a": "\\u00e9\\/", "b": 0}'),
        ('{"a": 1, "b": 2, "a": 3}', ["a=x"], '{"a": 1, "b": 2, "a": "x"}'),
        ('{"u": {"id" : 41 ,"n":1e2}}', ["u.id=42"], '{"u": {"id" : 42 ,"n":1e2}}'),
        ('{"u": {"v": {"w": [1, 2]}}}', ["u.v.w=[ 1,2.0 ]"], '{"u": {"v": {"w": [ 1,2.0 ]}}}'),
        ('{"a": 1}', ["b=two words"], '{"a": 1, "b": "two words"}'),
        ('{"u": { }}', ["u.id=1"], '{"u": {"id": 1 }}'),
        ("{}", ['a="1"'], '{"a": "1"}'),
        ('{"a": 1, "b": 2}', ["a=NaN", "b=null"], '{"a": "NaN", "b": null}'),
        ('{"a": {"b": 1}}', ["a=1"], '{"a": 1}'),
        ('{"a": [ 1.0 ,{"s":"x" }, []]}', ["a.1.s=y"], '{"a": [ 1.0 ,{"s":"y" }, []]}'),
        ('{"a": [ 1.0 ,2]}', ["a.0=7", "a.1=[]"], '{"a": [ 7 ,[]]}'),
        ('{"a": [[[ 5,6 ]]]}', ["a.0.0.1={}"], '{"a": [[[ 5,{} ]]]}'),
        ('{"a.b": 1, "a": {"b": 2}}', ['"a.b"=3'], '{"a.b": 3, "a": {"b": 2}}'),
        ('{"a": {"x=\\"y": 2}}', ['a."x=\\"y"=3'], '{"a": {"x=\\"y": 3}}'),
        ('{"0": 1}', ["0=2", "1=3"], '{"0": 2, "1": 3}'),
    ],
)
def test_set_changes_that_value_and_no_other_byte(
    server: Server, redis_client: redis.Redis, payload: str, edits: list[str], wanted: str
) -> None:
    """The difference is shown first, and a dry run shows it alone."""
    redis_client.lpush(DLQ, envelope(payload))
    flags = [flag for edit in edits for flag in ("--set", edit)]
    shown = desk(server, *flags, "--dry-run").out
    assert [line[0] for line in shown.splitlines()] == ["-", "+"] * len(edits) + ["w"]
    assert redis_client.lrange(DLQ, 0, -1) == [envelope(payload)]
    assert desk(server, *flags).code == 0
    assert Message.parse(redis_client.lindex("q:tasks", 0)).own.decode() == wanted


@pytest.mark.parametrize(
    "edit", ["a.2=1", "a.-1=1", "a.x=1", "a.0.x=1", "b.0=1", "n.0=1", "a.00=1"]
)
def test_set_makes_no_element_and_no_object(
    server: Server, redis_client: redis.Redis, edit: str
) -> None:
    redis_client.lpush(DLQ, envelope('{"a": [1, 2], "n": 3}'))
    said = desk(server, "--set", edit)
    assert said.code == 1 and "its payload has no" in said.err and redis_client.llen(DLQ) == 1


def test_what_set_cannot_change_stays_where_it_is(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.lpush(DLQ, envelope('"no json"'), envelope({"u": 1}), envelope({"u": {"id": 1}}))
    said = desk(server, "--all", "--set", "u.id=2")
    assert said.code == 1 and said.out.endswith("replayed 1; " + said.out.split("; ", 1)[1])
    assert redis_client.llen(DLQ) == 2 and waiting(redis_client)[0]["u"] == {"id": 2}


# ── Faults and settings ───────────────────────────────────────────────────────────────────────


def test_a_redis_that_does_not_answer_is_one_sentence_without_the_password(run: Run) -> None:
    process = ended(run("replay.py", REDIS_URL="redis://me:pass%40word@127.0.0.1:1/0"), code=2)
    assert process.err.count("\n") == 1 and "127.0.0.1:1/0 does not answer" in process.err
    assert "pass" not in process.out + process.err


def test_a_refused_login_is_one_sentence_without_the_password(
    run: Run, server: Server, redis_client: redis.Redis
) -> None:
    url = server.url.replace("unix://", "unix://me:pass%40word@")
    process = ended(run("replay.py", REDIS_URL=url), code=2)
    assert process.err.count("\n") == 1 and "login" in process.err
    assert "pass%40" not in process.err and "pass@" not in process.err


@pytest.mark.parametrize("key", [DLQ, "q:tasks"])
def test_a_key_of_the_wrong_type_is_named_and_nothing_is_lost(
    server: Server, redis_client: redis.Redis, key: str
) -> None:
    redis_client.lpush(DLQ, envelope())
    if key == DLQ:
        redis_client.delete(key)
    redis_client.set(key, "mine")
    said = desk(server)
    assert said.code == 2 and f"key {key} is a string" in said.err
    assert redis_client.get(key) == b"mine"
    assert key == DLQ or redis_client.lrange(DLQ, 0, -1) == [envelope()]


@pytest.mark.parametrize(
    "argv",
    [
        *(["--limit", bad] for bad in ("", "abc", "-1", "0", "nan", "inf", "1e999", "1.5")),
        *(["--rate", bad] for bad in ("", "abc", "-1", "0", "nan", "inf", "1e999")),
        *(["--older", bad] for bad in ("", "abc", "-1h", "10", "nan", "inf", "1e9d")),
        *(["--stale", bad, "--health"] for bad in ("", "abc", "-1", "0", "nan", "inf", "1e999")),
        *(["--where", bad] for bad in ("", "a", "=1", "a..b=1", ".=", '"a=1', '"\\q"=1', '""=1')),
        *(["--set", bad] for bad in ("", "a", "=1", "attempts=1", "_retry.replays=0")),
        *(["--error", bad] for bad in ("", "/(/")),
        ["--kind", ""],
        ["--queue", ""],
        ["--queue", "a\nb"],
        ["--redis", "mysql://me:secret@host"],
        ["xyz"],
        ["--lim", "1"],
        ["--list", "--status"],
        ["--list", "--rate", "1"],
        ["--status", "--all"],
        ["--newest", "--oldest"],
        ["--json"],
        ["--limit", "1", "--limit", "2"],
        ["--queue", "a", "--queue", "b"],
        ["--like", "xyz"],
        ["--like", "ab", "--status"],
        ["--check", "abc"],
    ],
    ids=" ".join,
)
def test_a_setting_that_makes_no_sense_is_named_and_nothing_moves(
    server: Server, redis_client: redis.Redis, argv: list[str]
) -> None:
    redis_client.lpush(DLQ, envelope())
    said = desk(server, *argv)
    assert said.code == (3 if "--check" in argv else 2)
    named = argv[0] if argv[0].startswith("--") else "ID"
    assert named in said.err or named[2:] in said.err or "id" in said.err
    assert "secret" not in said.err
    assert redis_client.llen(DLQ) == 1
