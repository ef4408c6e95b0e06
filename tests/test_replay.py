"""Replay puts dead letters back: one by default, each exactly once, whatever happens meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import redis
from conftest import ledger
from processes import Process

from worker import Message, Queue, iso

Run = Callable[..., Process]
DLQ = "q:tasks:dlq"


def envelope(payload: Any = None, **facts: Any) -> bytes:
    """A dead letter as the worker writes them; `payload` as text is spliced in verbatim."""
    text = payload if isinstance(payload, str) else json.dumps(payload or {"kind": "bad"})
    known = {
        "error": "ValueError: bad message (taskproc.py:3 in process)",
        "attempts": 5,
        "first_seen_at": "2026-11-30T12:00:00.123+00:00",
        "reason": "exhausted",
        "failed_at": "2026-11-30T12:00:09.456+00:00",
        "worker": "host:1:ab12/2",
        "token": 1,
    }
    return f'{{"payload": {text}, {json.dumps(known | facts)[1:]}'.encode()


def finished(process: Process, code: int = 0) -> Process:
    assert process.wait() == code, process
    assert "Traceback" not in process.err, process
    return process


# ── Without arguments ─────────────────────────────────────────────────────────────────────────


def test_one_message_goes_back_the_oldest_first(
    run: Run, queue: Queue, redis_client: redis.Redis
) -> None:
    """One entry per command, the rightmost first; flat, attempts 0, the first date kept."""
    redis_client.lpush(DLQ, envelope({"n": 1}), envelope({"n": 2}))
    said = finished(run("replay.py")).out
    assert said.count("\n") == 1 and "1 left" in said
    [text] = redis_client.lrange("q:tasks", 0, -1)
    message = json.loads(text)
    assert (message["n"], message["attempts"]) == (1, 0)
    assert b'"attempts": 0' in text
    assert message["first_seen_at"] == "2026-11-30T12:00:00.123+00:00"
    assert redis_client.lrange(DLQ, 0, -1) == [envelope({"n": 2})]
    finished(run("replay.py"))
    assert [json.loads(text)["n"] for text in redis_client.lrange("q:tasks", 0, -1)] == [2, 1]
    assert ledger(queue, redis_client)["dlq"] == []


def test_an_empty_dlq_is_said_and_is_no_failure(run: Run, redis_client: redis.Redis) -> None:
    assert "is empty" in finished(run("replay.py")).out
    assert redis_client.dbsize() == 0


def test_what_cannot_be_read_stays_and_the_next_oldest_goes(
    run: Run, redis_client: redis.Redis
) -> None:
    """The unreadable entry is named and untouched; it does not block the others."""
    redis_client.lpush(DLQ, b"\x1b[31mjunk", b'{"error": "no payload"}', envelope({"n": 1}))
    process = finished(run("replay.py"))
    assert process.err.count("stays where it is") == 2 and "\x1b" not in process.err
    assert redis_client.lrange(DLQ, 0, -1) == [b'{"error": "no payload"}', b"\x1b[31mjunk"]
    assert redis_client.llen("q:tasks") == 1
    process = finished(run("replay.py"), code=1)
    assert redis_client.llen(DLQ) == 2 and redis_client.llen("q:tasks") == 1


def test_entries_made_by_hand_are_accepted(run: Run, redis_client: redis.Redis) -> None:
    """The payload may be an object or its JSON text; nothing else has to be there."""
    redis_client.lpush(DLQ, '{"payload": {"id": 1}}', json.dumps({"payload": '{"id": 2}'}))
    finished(run("replay.py"))
    finished(run("replay.py"))
    messages = [json.loads(text) for text in redis_client.lrange("q:tasks", 0, -1)]
    assert [(m["id"], m["attempts"]) for m in messages] == [(2, 0), (1, 0)]


def test_bytes_that_never_were_json_come_back_as_they_were(
    run: Run, redis_client: redis.Redis
) -> None:
    raw = b"\xff\xfe no json \x00"
    text = json.dumps(raw.decode(errors="surrogateescape"))
    redis_client.lpush(DLQ, envelope(text, reason="undecodable", attempts=0))
    finished(run("replay.py"))
    assert redis_client.lrange("q:tasks", 0, -1) == [raw]


def test_history_and_the_number_of_replays_stay_with_the_message(
    run: Run, redis_client: redis.Redis
) -> None:
    history = [{"at": iso(0), "error": "KeyError: 'x'", "wait": None}]
    redis_client.lpush(DLQ, envelope(history=history, replays=1, earlier_attempts=5))
    finished(run("replay.py"))
    message = Message.parse(redis_client.lindex("q:tasks", 0))
    assert message.kept == {"history": history, "replays": 2, "earlier_attempts": 10}
