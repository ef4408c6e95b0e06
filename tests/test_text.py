"""The producer's bytes are sacred: hostile texts, through our hands and through real workers.

What we keep is spliced onto the end of the text and cut out again; everything between is the
producer's, to the byte. Checked on texts chosen to hurt, on some thousand generated ones, and end
to end: retry set, dead letters and what replay puts back.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from processes import Process, until

from backoff import Policy
from worker import BURY, Failure, Message, Queue, Run, Undecodable, revive, settle_failure

DATE = "2026-11-30T12:00:00.123+00:00"

# Objects in which nothing is ours: they must come back as they are.
OBJECTS = {
    "empty": b"{}",
    "empty with spaces": b" { \n} ",
    "one member": b'{"kind": "ok"}',
    "odd spacing": b'\t{ "a" :1 ,\r\n"b": [ 1,2 ] }\n\n',
    "no spacing": b'{"a":1,"b":{"c":[]}}',
    "space before the end": b'{"a": 1 }',
    "trailing newline": b'{"a": 1}\n',
    "big integers": b'{"a": 130775545883395173, "b": 9223372036854775808, "c": -9876543210987654}',
    "4000 digits": b'{"a": ' + b"7" * 4000 + b"}",
    "floats": b'{"a": 0.1, "b": 1.10, "c": 1e22, "d": 1E+2, "e": -0, "f": -0.0, "g": 1e-7}',
    "beyond a double": b'{"x": 1e400, "y": -1e400}',
    "not a number": b'{"x": NaN, "y": [Infinity, -Infinity]}',
    "empty array": b'{"a": [], "b": {}, "c": [[]]}',
    "duplicate keys": b'{"a": 1, "a": 2, "b": 0, "a": 3}',
    "escapes": rb'{"a": "\/\u00e9\u0000\b\\\"", "\u0061": 1}',
    "raw and escaped": '{"a": "é\\u00e9", "é": 1, "漢": "😀\\ud83d\\ude00"}'.encode(),
    "lone surrogates": rb'{"a": "\ud800", "\udfff": "\udc80\ud800"}',
    "line separators": '{"a": "\u2028\u2029\u0085\x7f\ufeff"}'.encode(),
    "terminal escapes": rb'{"kind": "\u001b[31m\r\n\u0007"}',
    "brackets in strings": rb'{"a": "}{][,:\"", "}": "{", ",": ":"}',
    "an empty name": b'{"": "", " ": 0}',
    "envelope's own names": b'{"payload": {"a": 1}, "error": "", "reason": 1, "history": []}',
    "reserved names inside": b'{"a": {"attempts": 3, "_retry": {}, "first_seen_at": null}}',
    "near reserved names": b'{"Attempts": 3, "attempts ": 3, "_retry_": {}, "attempt": 1}',
    "kind is no text": b'{"kind": [{"a": "b c"}, 1e400, null]}',
    "text that looks like a run": b'{"a": "me 17 12:{}"}',
    "900 levels": b'{"a":' * 450 + b"[" * 450 + b"]" * 450 + b"}" * 450,
    "400 kB": b'{"a": "' + b"x" * 400_000 + b'", "b": 1.10}',
}

# Reserved names with values that are not of our type: the producer's, so they stay.
WRONG = {
    "attempts": ('"3"', '""', "-1", "1e309", "1.0", "true", "null", "NaN", "[]", "{}", "9" * 20),
    "first_seen_at": (
        '""', "0", "null", "[]", '"yesterday"', '"2026-11-30"', '"2026-13-30T12:00:00+00:00"',
        '"0001-01-01T00:00:00+23:59"', '"1969-12-31T23:59:59Z"', '"9999-12-31T23:59:59-23:59"',
        '"2026-11-30T12:00:00"', '"2026-11-30T12:00:00.1234+00:00"', f'"{DATE}\\n"', f'" {DATE}"',
    ),
    "_retry": (
        '""', "0", "null", "[]", '{"x": 1}', '{"history": {}}', '{"history": [1]}',
        '{"replays": -1}', '{"replays": "1"}', '{"stage": NaN}', '{"stage": 1e400}',
    ),
}  # fmt: skip
OBJECTS |= {
    f"{name} is {value}": f'{{"{name}": {value}, "a": 1}}'.encode()
    for name, values in WRONG.items()
    for value in values
}

# No JSON objects: exact bytes in, exact bytes out.
UNDECODABLE = {
    "nothing": b"",
    "a space": b" ",
    "no UTF-8": b"\xff\xfe",
    "no UTF-8 in a string": b'{"a": "\xff"}',
    "an encoded surrogate": b'{"a": "\xed\xa0\x80"}',
    "null": b"null",
    "an array": b"[]",
    "a string": b'"x"',
    "a string of an escaped byte": rb'"\udcff"',
    "an emoji and a byte": "😀".encode() + b"\xff",
    "a number": b"17",
    "a brace": b"{",
    "half an object": b'{"a": 1, "b"',
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "two objects": b'{"a": 1}{"b": 2}',
    "a trailing comma": b'{"a": 1,}',
    "single quotes": b"{'a': 1}",
    "a raw tab in a string": b'{"a": "\t"}',
    "a trailing zero byte": b'{"a": 1}\0',
    "every byte": bytes(range(256)),
    "100,000 brackets": b"[" * 100_000 + b"]" * 100_000,
    "100,000 objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "5 MB of a": b"a" * 5_000_000,
}

# What is cut out of a message, and what is left.
CUT = {
    '{"attempts": 1}': "{}",
    '{ "attempts" : 1 }': "{ }",
    '{"attempts": 1, "a": 1}': '{"a": 1}',
    '{ "attempts": 1 , "a": 1 }': '{ "a": 1 }',
    '{\n  "attempts": 1,\n  "a": 1\n}\n': '{\n  "a": 1\n}\n',
    '{"a": 1, "attempts": 1}': '{"a": 1}',
    '{"a": 1, "attempts": 1, "b": 2}': '{"a": 1, "b": 2}',
    '{"a":1,"attempts":1,"b":2}': '{"a":1,"b":2}',
    '{"attempts": 0, "attempts": 1}': "{}",
    '{"attempts": "x", "attempts": 1}': '{"attempts": "x"}',
    '{"attempts": 1, "attempts": "x"}': '{"attempts": "x"}',
    r'{"\u0061ttempts": 1, "a": 1}': '{"a": 1}',
    f'{{"first_seen_at": "{DATE}", "attempts": 1, "_retry": {{}}, "a": 1}}': '{"a": 1}',
}


def strict(text: bytes) -> Any:
    """Parses as the standard says, which knows no NaN and no Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


NOWHERE = Queue("redis://127.0.0.1:1/0")  # builds steps; nothing is sent


def envelope(raw: bytes) -> bytes:
    """The envelope that the worker writes when this message has failed for the last time."""
    run = Run(1, 1_796_000_000_000, raw, time.monotonic(), 1_796_000_000_000)
    last = settle_failure(NOWHERE, Policy(max_attempts=1), run, Failure("E: e"), "worker")
    written = last.step.args[1]
    assert last.step.script is BURY and isinstance(written, bytes)
    return written


# ---- Splicing and cutting ----------------------------------------------------------------------


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_what_is_not_ours_is_never_touched(raw: bytes) -> None:
    message = Message.parse(raw)
    assert message.text == raw.decode()
    assert (message.attempts, message.first_seen_at, message.kept) == (0, None, {})


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("kept", [{}, {"history": [{"at": DATE, "error": "é}"}], "stage": [{}]}])
def test_what_is_spliced_on_comes_off_again(raw: bytes, kept: dict[str, Any]) -> None:
    message = Message(raw.decode(), 3, DATE, kept)
    text = message.encode()
    again = Message.parse(text)
    assert (again.text, again.attempts, again.first_seen_at) == (raw.decode(), 3, DATE)
    assert again.kept == kept
    assert again.encode() == text


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_in_every_parser_our_members_win(raw: bytes) -> None:
    """Ours come last, and of two equal names a parser takes the last."""
    text = Message(raw.decode(), 3, DATE, {"replays": 1}).encode()
    ours = {"attempts": 3, "first_seen_at": DATE, "_retry": {"replays": 1}}
    seen = json.loads(text)
    assert {name: seen[name] for name in ours} == ours
    assert b'"attempts": 3' in text  # people grep for it


@pytest.mark.parametrize(("text", "left"), CUT.items())
def test_what_is_ours_is_cut_out_and_nothing_else(text: str, left: str) -> None:
    message = Message.parse(text.encode())
    assert message.text == left
    assert message.attempts == 1
    assert Message.parse(message.encode()).text == left


@pytest.mark.parametrize("attempts", [0, 1, 4, 2**31, 2**53 - 1])
def test_the_attempts_that_a_producer_wrote_are_honoured(attempts: int) -> None:
    assert Message.parse(b'{"a": 1, "attempts": %d}' % attempts).attempts == attempts


@pytest.mark.parametrize("date", [DATE, "2026-11-30T12:00:00Z", "2026-11-30T12:00:00.123456-07:00"])
def test_the_first_date_that_a_producer_wrote_is_kept_as_it_is(date: str) -> None:
    message = Message.parse(f'{{"first_seen_at": "{date}"}}'.encode())
    assert (message.first_seen_at, message.text) == (date, "{}")


# ---- Envelope and back -------------------------------------------------------------------------


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_an_object_goes_into_the_envelope_as_it_is_and_comes_back(raw: bytes) -> None:
    text = envelope(raw)
    facts = strict(text)
    if isinstance(facts["payload"], str):  # an exotic one, in its string form
        assert facts["payload"].encode() == raw
    else:
        assert raw in text
    back = Message.parse(revive(text))
    assert (back.text, back.attempts) == (raw.decode(), 0)


@pytest.mark.parametrize("raw", UNDECODABLE.values(), ids=UNDECODABLE)
def test_what_is_no_object_goes_in_as_a_string_and_comes_back(raw: bytes) -> None:
    with pytest.raises(Undecodable):
        Message.parse(raw)
    text = envelope(raw)
    facts = strict(text)
    assert facts["payload"].encode("utf-8", "surrogateescape") == raw
    assert revive(text) == raw


def test_reviving_resets_the_attempts_and_keeps_the_story() -> None:
    history = [{"at": DATE, "error": "E: é", "wait": None}]
    facts = {"payload": {"a": 1}, "attempts": 5, "first_seen_at": DATE, "history": history}
    facts |= {"replays": 2, "earlier_attempts": 10, "stage": "half"}
    message = Message.parse(revive(json.dumps(facts).encode()))
    assert (message.text, message.attempts, message.first_seen_at) == ('{"a": 1}', 0, DATE)
    assert message.kept == {
        "history": history, "replays": 3, "earlier_attempts": 15, "stage": "half",
    }  # fmt: skip


@pytest.mark.parametrize(
    "entry",
    ["", "x", "[]", "null", "{}", '{"payload": 1}', '{"payload": null}', '{"payload": []}'],
)
def test_what_is_no_envelope_cannot_be_revived(entry: str) -> None:
    with pytest.raises(ValueError):
        revive(entry.encode())


@pytest.mark.parametrize(
    "members",
    ['"attempts": "5"', '"history": 1', '"replays": -1', '"first_seen_at": 0', '"history": [1]',
     '"attempts": 1e400', '"earlier_attempts": 9007199254740992, "replays": 9007199254740991'],
)  # fmt: skip
def test_an_envelope_made_by_hand_may_hold_nonsense(members: str) -> None:
    text = revive(f'{{"payload": {{"a": 1.10}}, {members}}}'.encode())
    message = Message.parse(text)
    assert (message.text, message.attempts) == ('{"a": 1.10}', 0)
    assert Message.parse(message.encode()).text == message.text


# ---- Generated texts ---------------------------------------------------------------------------

NAMES = ('"attempts"', '"first_seen_at"', '"_retry"', r'"\u0061ttempts"', '"a"', '"kind"', '""')
LEAVES = (
    "0", "-0", "1.10", "1e22", "9223372036854775808", "1e400", "NaN", "-Infinity", "true", "null",
    '""', '"}"', '"{,"', r'"\""', r'"\\"', r'"\ud800"', r'"\/"', '"é"', '"\u2028"', "3", "-1",
    f'"{DATE}"', '{"replays": 2}', '{"history": [{}], "stage": 1.10}', '{"stage": NaN}',
)  # fmt: skip


def blank(dice: random.Random) -> str:
    return dice.choice(("", "", " ", "\n", "\t \r\n"))


def an_object(dice: random.Random, depth: int = 0) -> str:
    """An object of up to five members, spaced at random, names of ours among them."""
    members = [
        f"{blank(dice)}{dice.choice(NAMES)}{blank(dice)}:{blank(dice)}{a_value(dice, depth)}"
        + blank(dice)
        for _ in range(dice.randrange(6))
    ]
    return "{" + (",".join(members) or blank(dice)) + "}"


def a_value(dice: random.Random, depth: int) -> str:
    if depth > 3 or dice.random() < 0.75:
        return dice.choice(LEAVES)
    if dice.random() < 0.5:
        return an_object(dice, depth + 1)
    items = [blank(dice) + a_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return "[" + ",".join(items) + blank(dice) + "]"


def test_any_object_survives_our_bookkeeping() -> None:
    """Encode, parse, encode is stable; what is left after cutting has nothing of ours in it."""
    dice = random.Random(20261130)
    for _ in range(5_000):
        raw = (blank(dice) + an_object(dice) + blank(dice)).encode()
        message = Message.parse(raw)
        text = message.encode()
        again, left = Message.parse(text), Message.parse(message.text.encode())
        assert (again.text, again.encode()) == (message.text, text), raw
        assert left.text == message.text, raw
        assert (left.attempts, left.first_seen_at, left.kept) == (0, None, {}), raw
        dead = envelope(raw)
        strict(dead)
        assert Message.parse(revive(dead)).text == message.text, raw


# ---- Through real workers ----------------------------------------------------------------------


def test_hostile_messages_come_back_from_retry_death_and_replay(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    run: Callable[..., Process],
) -> None:
    """Every text above: into the retry set, to its death, and back through replay, byte by byte."""
    handler("def process(msg):\n    msg.clear()\n    raise ValueError(msg)\n")
    names = queue.names
    objects, others = sorted(OBJECTS.values()), sorted(UNDECODABLE.values())
    redis_client.lpush(names.waiting, *objects, *others)

    first = worker("--base", 10**9, "--cap", 10**9)
    until(lambda: redis_client.zcard(names.retry) == len(objects), saw=lambda: first.err[-2000:])
    until(lambda: redis_client.llen(names.dlq) == len(others), saw=lambda: first.err[-2000:])
    assert first.stop() == 0
    retrying = [text.partition(b":")[2] for text in redis_client.zrange(names.retry, 0, -1)]
    assert all(Message.parse(text).attempts == 1 for text in retrying)
    assert sorted(Message.parse(text).text.encode() for text in retrying) == objects

    for member in redis_client.zrange(names.retry, 0, -1):
        redis_client.zadd(names.retry, {member: 0})
    assert worker("--burst", "--max-attempts", 2).wait() == 0
    dead = redis_client.lrange(names.dlq, 0, -1)
    assert len(dead) == len(objects) + len(others)
    for text in dead:
        facts = strict(text)
        assert list(facts)[:5] == ["payload", "error", "attempts", "first_seen_at", "reason"]
        assert text.startswith(b'{"payload": ')
        if facts["reason"] == "undecodable":
            assert (facts["attempts"], len(facts["history"])) == (0, 1)
        else:
            assert (facts["attempts"], facts["reason"]) == (2, "exhausted")

    replay = run("replay.py", "--all")
    assert replay.wait() == 0, replay
    assert redis_client.llen(names.dlq) == 0
    back = redis_client.lrange(names.waiting, 0, -1)
    assert sorted(map(producers, back)) == sorted(objects + others)


def producers(text: bytes) -> bytes:
    """The producer's bytes in a message."""
    try:
        return Message.parse(text).text.encode()
    except Undecodable:
        return text


def test_undecodable_messages_stop_nobody(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    """Each is one dead letter at once; the good one behind them runs, and in the same process."""
    handler("import os\n\ndef process(msg):\n    print(os.getpid())\n")
    names = queue.names
    redis_client.lpush(names.waiting, b"{}", *UNDECODABLE.values(), b"{}")
    started = worker("--burst")
    assert started.wait() == 0
    assert redis_client.llen(names.dlq) == len(UNDECODABLE)
    before, after = started.out.split()
    assert before == after
    assert redis_client.hmget(names.stats, "done", "retried") == [b"2", None]


def test_an_infinity_that_fails_once_holds_up_no_retry_behind_it(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    handler("def process(msg):\n    if not msg.get('attempts'):\n        raise ValueError\n")
    names = queue.names
    redis_client.lpush(names.waiting, b'{"x": 1e400}', *[b'{"n": %d}' % n for n in range(50)])
    assert worker("--burst", "--base", 0.01).wait() == 0
    assert redis_client.hmget(names.stats, "done", "retried", "dead") == [b"51", b"51", None]


def test_a_handler_sees_nine_hundred_levels_and_its_own_numbers(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    """The parsed object is what json.loads gives, bookkeeping included once there is some."""
    handler("""
def process(msg):
    if "deep" in msg:
        depth, inner = 0, msg["deep"]
        while inner:
            depth, inner = depth + 1, inner[0]
        print(depth)
    elif not msg.get("attempts"):
        raise ValueError("once")
    else:
        print(msg["a"], msg["b"], msg["attempts"], "first_seen_at" in msg)
""")
    deep = b'{"deep": %b}' % (b"[" * 900 + b"]" * 900)
    big = b'{"a": 130775545883395173, "b": 1.10}'
    redis_client.lpush(queue.names.waiting, deep, big)
    started = worker("--burst", "--base", 0.01)
    assert started.wait() == 0
    assert started.out.splitlines()[::2] == ["899", "130775545883395173 1.1 1 True"]
