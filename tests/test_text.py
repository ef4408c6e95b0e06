"""The producer's bytes are sacred: hostile texts, through our hands and through real workers.

What we keep is spliced onto the end of the text and cut out again; everything between is the
producer's, to the byte. Checked on texts chosen to hurt and end to end: retry set, dead letters and
what replay puts back. (Any other text: test_laws.py.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from endings import envelope_of, retried, run_of, settled, stored
from processes import Process, until

from worker import (
    BURY_UNREAD,
    LARGE,
    RETRY,
    Message,
    Queue,
    Undecodable,
    is_strict,
    load,
    members,
    quoted,
    revive,
    without_ours,
)

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
        '{"replays": -1}', '{"replays": "1"}', '{"released": 1.0}', '{"earlier_attempts": true}',
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
    '{ "attempts": 1 }': "{ }",
    '{"attempts": 1, "a": 1}': '{"a": 1}',
    '{ "attempts": 1 , "a": 1 }': '{ "a": 1 }',
    '{\n  "attempts": 1,\n  "a": 1\n}\n': '{\n  "a": 1\n}\n',
    '{"a": 1, "attempts": 1}': '{"a": 1}',
    '{"a": 1,\n"attempts": 1}\n': '{"a": 1}\n',
    '{\n  "a": 1,\n  "attempts": 1\n}\n': '{\n  "a": 1}\n',
    '{"a": 1,\t"attempts": 1}': '{"a": 1}',
    '{"a": 1,  "attempts": 1}': '{"a": 1}',
    '{"a": 1 ,  "attempts": 1}': '{"a": 1 }',
    '{"a": 1,"attempts": 1}': '{"a": 1}',
    '{"a": 1 , "attempts": 1}': '{"a": 1 }',
    '{"a": 1, "attempts": 1 , "b": 2}': '{"a": 1, "b": 2}',
    '{"a": 1, "attempts": 1, "b": 2}': '{"a": 1, "b": 2}',
    '{"a":1,"attempts":1,"b":2}': '{"a":1,"b":2}',
    '{"a": {"attempts": 7}, "attempts": 1}': '{"a": {"attempts": 7}}',
    '{"attempts": 1, "a": {"attempts": 7}}': '{"a": {"attempts": 7}}',
    '{"attempts": 1, "a": [{"attempts": 7}]}': '{"a": [{"attempts": 7}]}',
    '{"attempts": 1, "a": "\\"attempts\\": 7"}': '{"a": "\\"attempts\\": 7"}',
    '{"attempts": "x", "attempts": 1}': '{"attempts": "x"}',
    '{"attempts": 1, "first_seen_at": "x"}': '{"first_seen_at": "x"}',
    r'{"\u0061ttempts": 1, "a": 1}': '{"a": 1}',
    f'{{"first_seen_at": "{DATE}", "attempts": 1, "_retry": {{}}, "a": 1}}': '{"a": 1}',
    f'{{"a": 1, "attempts": 1, "first_seen_at": "{DATE}", "_retry": {{"replays": 2}}}}': '{"a": 1}',
    f'{{"_retry": {{}}, "a": 1, "attempts": 1, "first_seen_at": "{DATE}"}}': '{"a": 1}',
    f'{{"a": 1, "attempts": 1, "b": 2, "first_seen_at": "{DATE}"}}': '{"a": 1, "b": 2}',
    f'{{"a": 1, "attempts": 1, "first_seen_at": 0, "first_seen_at": "{DATE}"}}': (
        '{"a": 1, "first_seen_at": 0}'
    ),
    f'{{"attempts": "x", "first_seen_at": "{DATE}", "attempts": 1}}': '{"attempts": "x"}',
}

FACTS: list[tuple[int, str | None, dict[str, Any]]] = [
    (0, None, {}),
    (3, DATE, {}),
    (3, DATE, {"history": [{"at": DATE, "error": "é}\n", "wait": 0.5, "of": 1.0}], "stage": [{}]}),
    (2**53 - 1, DATE, {"stage": {'"attempts": ': '"attempts": 7}', "a": []}, "released": 2}),
    (3, DATE, {"stage": {"attempts": 7}}),
]


def strict(text: bytes) -> Any:
    """Parses as the standard says, which knows no NaN and no Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---- Splicing and cutting ----------------------------------------------------------------------


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_what_is_not_ours_is_never_touched(raw: bytes) -> None:
    message = Message.parse(raw)
    assert message.own == message.raw == raw
    assert (message.attempts, message.first_seen_at, message.kept) == (0, None, {})
    assert not message.strewn


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("facts", FACTS)
def test_what_is_spliced_on_comes_off_again(raw: bytes, facts: tuple[Any, ...]) -> None:
    text = Message.parse(raw).noted(*facts).of(raw)
    again = Message.parse(text)
    assert (again.own, again.raw) == (raw, text)
    assert (again.attempts, again.first_seen_at, again.kept) == facts
    assert again.noted(*facts).of(text) == text
    assert again.noted(7, None, {}).of(text) == Message.parse(raw).noted(7, None, {}).of(raw)


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("facts", FACTS)
def test_what_we_have_written_is_found_without_a_walk(raw: bytes, facts: tuple[Any, ...]) -> None:
    """The short way finds what the long one finds, and where: both cut the same text out."""
    text = Message.parse(raw).noted(*facts).of(raw)
    found = Message.parse(text)
    assert not found.strewn
    assert text[: found.head] + text[found.tail :] == raw
    assert without_ours(text.decode()) == raw.decode()


@pytest.mark.parametrize("text", [text for text in OBJECTS.values() if len(text) < 1000] + [
    b'{"a": {"attempts": 3}}', b'{"a": [{"attempts": 3}]}', b'{"a": "x", "b": {"attempts": 3}}',
    b'{"attempts": 3, "a": {}}', b'{"a": 1, "attempts": 3, "b": {"attempts": 3}}',
    b'{"attempts": 3, "b": {"attempts": 3}}', b'{"attempts": 3, "b": [{"x": 1, "attempts": 3}]}',
    b'{"a": 1,"attempts": 3}', rb'{"a": "\\", "attempts": 3}', rb'{"a": "\", \"attempts\": 3"}',
    rb'{"attempts": 3, "a, \"attempts": 3}', rb'{"attempts": 3, "a\"attempts": 3}',
])  # fmt: skip
def test_the_short_way_finds_nothing_but_the_last_members_of_the_object(text: bytes) -> None:
    """Whatever it takes for ours at the end of the text is that: JSON, and at the top level."""
    message, body = Message.parse(text), json.loads(text)
    assert message.ours == {name: body[name] for name in message.ours} or b"NaN" in text
    if not message.strewn:
        own = json.loads(message.own)
        assert own.keys() | message.ours.keys() == body.keys()
        assert all(repr(own[name]) == repr(body[name]) for name in own.keys() - message.ours.keys())


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_in_every_parser_our_members_win(raw: bytes) -> None:
    """Ours come last, and of two equal names a parser takes the last."""
    text = Message.parse(raw).noted(3, DATE, {"replays": 1}).of(raw)
    ours = {"attempts": 3, "first_seen_at": DATE, "_retry": {"replays": 1}}
    seen = json.loads(text)
    assert {name: seen[name] for name in ours} == ours
    assert b'"attempts": 3' in text  # people grep for it


@pytest.mark.parametrize(("text", "left"), CUT.items())
def test_what_is_ours_is_cut_out_and_nothing_else(text: str, left: str) -> None:
    message = Message.parse(text.encode())
    assert message.own == left.encode()
    assert message.attempts == 1
    new = message.noted(2, DATE, message.kept).of(text.encode())
    assert Message.parse(new).own == left.encode()
    assert Message.parse(new).attempts == 2


def test_of_two_equal_names_of_ours_the_last_one_counts() -> None:
    for text in (b'{"attempts": 7, "attempts": 1}', rb'{"attempts": 7, "\u0061ttempts": 1}'):
        message = Message.parse(text)
        assert message.attempts == 1
        assert json.loads(message.noted(2, None, {}).of(text)) == {"attempts": 2}
    assert Message.parse(b'{"attempts": 1, "attempts": "x"}').attempts == 0


@pytest.mark.parametrize("filling", [10, LARGE])
def test_our_names_among_the_producers_are_cut_out_unless_all_had_to_be_sent_for_it(
    filling: int,
) -> None:
    """Then they stay, and ours behind them win."""
    filled = b'"b": "%b"}' % (b"x" * filling)
    text = b'{"a": 1.10, "attempts": 2, ' + filled
    message = Message.parse(text)
    assert (message.attempts, message.strewn) == (2, filling < LARGE)
    step = message.noted(3, DATE, {})
    assert len(step.before + step.middle + step.after) < 1_000
    new = step.of(text)
    assert json.loads(new)["attempts"] == Message.parse(new).attempts == 3
    own = text if filling == LARGE else b'{"a": 1.10, ' + filled
    assert message.own == Message.parse(new).own == own


def test_a_large_text_never_travels_back() -> None:
    """Not for a retry, and not for an envelope, whether it is JSON or not, strict or not."""
    filled = b'"b": "%b"}' % (b"x" * 8 * LARGE)
    for raw in (
        b"{" + filled, b'{"attempts": 2, ' + filled, b'{"a": NaN, ' + filled, b"no JSON" + filled,
        b"\xff" * 8 * LARGE,
    ):  # fmt: skip
        for max_attempts in (1, 5):
            assert settled(run_of(raw), max_attempts).step.size < 2_000


@pytest.mark.parametrize("attempts", [0, 1, 4, 2**31, 2**53 - 1])
def test_the_attempts_that_a_producer_wrote_are_honoured(attempts: int) -> None:
    assert Message.parse(b'{"a": 1, "attempts": %d}' % attempts).attempts == attempts


@pytest.mark.parametrize("date", [DATE, "2026-11-30T12:00:00Z", "2026-11-30T12:00:00.123456-07:00"])
def test_the_first_date_that_a_producer_wrote_is_kept_as_it_is(date: str) -> None:
    message = Message.parse(f'{{"first_seen_at": "{date}"}}'.encode())
    assert (message.first_seen_at, message.own) == (date, b"{}")


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_an_object_is_its_members_and_what_stands_around_them(raw: bytes) -> None:
    text = raw.decode()
    head, found, tail = members(text)
    assert head + ",".join(span for *_, span in found) + tail == text
    pairs = json.loads(text, object_pairs_hook=list)
    assert [name for name, *_ in found] == [name for name, _ in pairs]
    for name, value, value_text, span in found:
        assert repr(json.loads(value_text)) == repr(value)
        assert span.endswith(value_text)
        assert json.loads(span[: len(span) - len(value_text)].rstrip().removesuffix(":")) == name


@pytest.mark.parametrize("raw", [
    b'{"a": 1, "attempts": 3}}', b'{"a": 1, "attempts": 3', b'"attempts": 3', b"", b", ", b"{",
    b'{"attempts": ', b'{"a": 1, "attempts": ' + b"[" * 100_000,
], ids=range(8))  # fmt: skip
def test_what_ends_like_ours_and_is_no_object_is_undecodable(raw: bytes) -> None:
    with pytest.raises(Undecodable):
        Message.parse(raw)


@pytest.mark.parametrize("raw", UNDECODABLE.values(), ids=UNDECODABLE)
def test_what_is_no_object_is_undecodable_and_nothing_else(raw: bytes) -> None:
    for read in (load, Message.parse):
        with pytest.raises(Undecodable):
            read(raw)


# ---- Strict JSON, and strings of bytes ---------------------------------------------------------

STRICT = {
    b'{"a": "NaN"}': True, b'{"Infinity": 1}': True, b'{"a": 1e400}': True, b"{}": True,
    b'{"a": NaN}': False, b'{"a": -Infinity}': False, rb'{"a": "\ud800"}': True,
    b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}": True,
    b'{"a": [' + b"[]," * 5_000 + b"0]}": True,
    b'{"a": [' + b"[]," * 5_000 + b"NaN]}": False,
    b'{"a": "' + b"[" * 5_000 + b'"}': True,
}  # fmt: skip


@pytest.mark.parametrize(("raw", "is_so"), STRICT.items())
def test_strict_json_is_told_from_what_python_alone_reads(raw: bytes, is_so: bool) -> None:
    load(raw)
    assert is_strict(raw) == is_so


def test_what_nests_as_deep_as_python_reads_is_not_put_into_an_envelope_of() -> None:
    """The envelope is one level deeper, and so is what other readers may have around it."""
    deepest = max(n for n in range(400, 1_000) if loads(b'{"a": ' + b"[" * n + b"]" * n + b"}"))
    raw = b'{"a": ' + b"[" * deepest + b"]" * deepest + b"}"
    assert not is_strict(raw)
    facts = strict(envelope_of(raw))
    assert facts["payload"].encode() == raw


def loads(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except RecursionError:
        return False
    return True


@pytest.mark.parametrize("raw", [*UNDECODABLE.values(), *OBJECTS.values()])
def test_any_bytes_are_a_string_from_which_the_same_bytes_come_back(raw: bytes) -> None:
    text = quoted(raw)
    assert text.isascii()
    assert strict(text).encode("utf-8", "surrogateescape") == raw


# ---- Envelope and back -------------------------------------------------------------------------


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_an_object_goes_into_the_envelope_as_it_is_and_comes_back(raw: bytes) -> None:
    text = envelope_of(raw)
    facts = strict(text)
    assert isinstance(facts["payload"], dict) == is_strict(raw)
    if isinstance(facts["payload"], str):  # an exotic one, in its string form
        assert facts["payload"].encode() == raw
    else:
        assert text.startswith(b'{"payload": ' + raw + b', "error": "E: e", "attempts": 1, "first')
    back = Message.parse(revive(text))
    assert (back.own, back.attempts) == (raw, 0)


@pytest.mark.parametrize("raw", UNDECODABLE.values(), ids=UNDECODABLE)
def test_what_is_no_object_goes_in_as_a_string_and_comes_back(raw: bytes) -> None:
    text = envelope_of(raw)
    facts = strict(text)
    assert facts["payload"].encode("utf-8", "surrogateescape") == raw
    assert revive(text) == raw


@pytest.mark.parametrize("raw", OBJECTS.values(), ids=OBJECTS)
def test_an_object_that_nobody_could_read_comes_back_from_its_string(raw: bytes) -> None:
    """Buried unread because it killed who read it: the payload is a string of an object's text."""
    text = b'{"payload": %b, "error": "E: e", "attempts": 5}' % quoted(raw)
    back = Message.parse(revive(text))
    assert (back.own, back.attempts) == (raw, 0)
    assert back.kept == {"replays": 1, "earlier_attempts": 5}


def test_reviving_resets_the_attempts_and_keeps_the_story() -> None:
    history = [{"at": DATE, "error": "E: é", "wait": None}]
    facts = {"payload": {"a": 1}, "attempts": 5, "first_seen_at": DATE, "history": history}
    facts |= {"replays": 2, "earlier_attempts": 10, "stage": "half", "released": 3}
    message = Message.parse(revive(json.dumps(facts).encode()))
    assert (message.own, message.attempts, message.first_seen_at) == (b'{"a": 1}', 0, DATE)
    assert message.kept == {
        "history": history, "replays": 3, "earlier_attempts": 15, "stage": "half", "released": 3,
    }  # fmt: skip


def test_a_date_made_by_hand_without_an_offset_is_utc() -> None:
    text = revive(b'{"payload": {}, "first_seen_at": "2026-11-30T12:00:00"}')
    assert Message.parse(text).first_seen_at == "2026-11-30T12:00:00Z"


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
    assert (message.own, message.attempts) == (b'{"a": 1.10}', 0)
    assert Message.parse(retried(text)).own == message.own


# ---- In Redis ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_attempts", [1, 2**53])
def test_redis_stores_what_we_think_it_does(queue: Queue, max_attempts: int) -> None:
    """Every text above, in its first run and in the second: what Redis joined is what we would."""
    names, texts = queue.names, sorted({*OBJECTS.values(), *UNDECODABLE.values()})
    texts += [text.encode() for text in CUT]
    texts += [retried(raw) for raw in texts if settled(run_of(raw), 2**53).step.script is RETRY]
    for raw in texts:
        queue.command("LPUSH", names.waiting, raw)
        [[_, _, token, text, _]] = queue.do(queue.claim("worker", 30))
        settlement = settled(run_of(text)._replace(token=int(token)), max_attempts)
        assert queue.do(settlement.step) == [b"ok"]
        if settlement.step.script is RETRY:
            [member] = queue.command("ZRANGE", names.retry, 0, -1)
            assert member == token + b":" + stored(settlement)
            queue.command("DEL", names.retry)
            continue
        dead, expected = queue.command("LINDEX", names.dlq, 0), stored(settlement)
        if settlement.step.script is BURY_UNREAD:  # it spells a string as no other writer does
            assert len(raw) > LARGE
            dead, expected = strict(dead), strict(expected)
            assert dead.pop("payload").encode("utf-8", "surrogateescape") == raw
            del expected["payload"]
        assert dead == expected


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
    assert sorted(Message.parse(text).own for text in retrying) == objects

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
        return Message.parse(text).own
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
