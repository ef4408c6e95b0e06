"""A worker that runs every message of a Redis list through `process(msg)` and loses none.

The life of a message; the place is the state:

              LPUSH                claim                     done
 producer ───────────▶ waiting ───────────▶ running ─────────────────────▶ (gone, counted)
                          ▲                   │ │ │
                          │  due              │ │ └─ spent, permanent or undecodable ─▶ dead
                          └──── retrying ◀────┘ │                                        │
                          ▲        failed       │ released (shutdown): not an attempt    │
                          ├─────────────────────┘                                        │
                          └──────────────────────── replay (by hand) ◀───────────────────┘

  waiting    q:tasks           list    message text; producers push left, workers take right
             q:tasks:next      list    the same, doorbell rung: owned by nobody, taken first
  running    q:tasks:running   hash    fencing token → owner, start (ms), message text
             q:tasks:leases    zset    fencing token → lease deadline (ms)
  retrying   q:tasks:retry     zset    token:message text → due time (ms)
  dead       q:tasks:dlq       list    envelope; newest left, oldest right
  done       q:tasks:stats     hash    counters
             q:tasks:fence     string  the last fencing token
             q:tasks:workers   zset    loop of a worker → last progress (ms); health only

The promise: from the moment Redis has accepted the LPUSH, a message is in exactly one of
waiting, running, retrying and dead, whoever is killed and when. It runs at least once; it is not
promised that it runs only once, nor in which order failed messages run again.

The worker is a foreman that forks hands. A hand is this loop:

  1. settle the last message and claim the next one, in one round trip;
  2. nothing there: sleep in Redis (BLMOVE) until a message comes or a retry is due;
  3. run `process(msg)`;
  4. returned: done. Raised: retry after backoff, or bury in the dead letter queue.

The foreman renews its hands' leases, ends a hand that is past its time limit, charges the message
of a hand that died, and takes over runs whose lease has expired, whoever they belonged to.

SIGTERM, SIGINT: finish the running messages, then exit 0. A second one: now. Exit codes: 0 stopped
or drained, 1 a bug, 2 a setting or Redis needs a person, 3 the handler cannot be loaded.
"""

from __future__ import annotations

if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import argparse
import asyncio
import hashlib
import importlib
import inspect
import io
import json
import mmap
import os
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

try:
    import redis
except ModuleNotFoundError:
    sys.stderr.write(f"worker: {sys.executable} has no package redis: pip install redis\n")
    sys.exit(2)
from redis.backoff import NoBackoff
from redis.retry import Retry

from backoff import Policy, ceiling, draw

# ── Names ─────────────────────────────────────────────────────────────────────────────────────
# Every key derives from the queue's name, here and nowhere else. A name in braces, `{q:tasks}`,
# puts them all in one slot of a Redis Cluster.

TYPES = {
    "waiting": "list", "next": "list", "running": "hash", "leases": "zset", "retry": "zset",
    "dlq": "list", "stats": "hash", "fence": "string", "workers": "zset",
}  # fmt: skip


class Names:
    """The keys of one queue, by role: `names.waiting` is "q:tasks", `names.dlq` "q:tasks:dlq"."""

    def __init__(self, queue: str = "q:tasks") -> None:
        self.waiting = queue
        self.next = queue + ":next"
        self.running = queue + ":running"
        self.leases = queue + ":leases"
        self.retry = queue + ":retry"
        self.dlq = queue + ":dlq"
        self.stats = queue + ":stats"
        self.fence = queue + ":fence"
        self.workers = queue + ":workers"
        self.probe = queue + ":probe"


# ── Message text ──────────────────────────────────────────────────────────────────────────────
# The producer's bytes are sacred: parsing is for reading, the text is what travels. Ours is three
# members, spliced onto the end of the object and cut out again, never re-encoded with the rest.

HISTORY = 50  # failed runs remembered with a message, the newest
ERROR = 500  # characters of an error kept
COUNT = 2**53 - 1  # the most that a count may be: what every JSON reader can hold
KEPT = ("stage", "history", "replays", "earlier_attempts")  # what `_retry` may hold
DECODER = json.JSONDecoder()
BLANK = re.compile(r"[ \t\n\r]*")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6})?(Z|[+-]\d\d:\d\d)")


class Undecodable(ValueError):
    """The message is not the UTF-8 text of a JSON object."""


def load(raw: bytes) -> dict[str, Any]:
    """Parses a message. Raises Undecodable, and nothing else, whatever the bytes are."""
    try:
        body = DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:  # RecursionError: 100,000 brackets
        raise Undecodable(f"{type(error).__name__}: {error}") from None
    if not isinstance(body, dict):
        raise Undecodable(f"a JSON object is needed, this is {type(body).__name__}")
    return body


def members(text: str) -> tuple[str, list[tuple[str, Any, str, str]], str]:
    """Splits a JSON object's text at its top level: (head, [(name, value, its text, span)], tail).

    `text == head + ",".join(spans) + tail`; the value text keeps its white space. The text must be
    one that `load` accepts.
    """

    def skip(at: int) -> int:
        return BLANK.match(text, at).end()  # type: ignore[union-attr]

    start = text.index("{") + 1
    head, found = text[:start], []
    at = skip(start)
    while text[at] != "}":
        name, at = DECODER.raw_decode(text, skip(at))
        colon = skip(at)
        value, at = DECODER.raw_decode(text, skip(colon + 1))
        at = skip(at)
        found.append((name, value, text[colon + 1 : at], text[start:at]))
        if text[at] == ",":
            at = start = at + 1
    return head, found, text[at if found else start :]


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= COUNT


def date_ms(value: object) -> float | None:
    """A date as we write it (ISO 8601) in ms since 1970; None if it is none, or absurd."""
    try:
        if isinstance(value, str) and DATE.fullmatch(value):
            date = datetime.fromisoformat(value.replace("Z", "+00:00"))
            return date.timestamp() * 1000 if 1970 <= date.year < 9999 else None
    except ValueError:  # the thirteenth month
        pass
    return None


def is_date(value: object) -> bool:
    return date_ms(value) is not None


def is_kept(value: object) -> bool:
    """Tells whether a `_retry` member is one that we wrote: {history, stage, replays, …}."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(value, dict)
        and value.keys() <= set(KEPT)
        and isinstance(history := value.get("history", []), list)
        and all(isinstance(entry, dict) for entry in history)
        and is_count(value.get("replays", 0))
        and is_count(value.get("earlier_attempts", 0))
    )


RESERVED = {"attempts": is_count, "first_seen_at": is_date, "_retry": is_kept}


@dataclass(frozen=True)
class Message:
    """A message taken apart: the producer's own `text`, and what we keep beside it.

    `attempts` counts failed runs, `first_seen_at` is ISO 8601, `kept` holds `history` (a list of
    {at, error, wait}), `stage`, `replays` and `earlier_attempts` (failed runs before the last
    replay), each only if there is any. `kind` is the producer's, for people to read.
    """

    text: str
    attempts: int = 0
    first_seen_at: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    kind: object = None

    @classmethod
    def parse(cls, raw: bytes) -> Message:
        """Cuts our members out of the text. Raises Undecodable.

        A reserved name whose value is not of our type is the producer's: it stays in the text.
        """
        ours: dict[str, Any] = {}
        body, text = load(raw), raw.decode()
        if not RESERVED.keys().isdisjoint(body):
            head, found, tail = members(text)
            spans = []
            for name, value, _, span in found:
                if name in RESERVED and RESERVED[name](value):
                    ours[name] = value
                else:
                    spans.append(span)
            rest = ",".join(spans)
            if len(spans) < len(found) and (not spans or spans[0] is not found[0][3]):
                first = found[0][3]  # cut from the front: the white space there stays
                rest = first[: len(first) - len(first.lstrip())] + rest.lstrip()
            text = head + rest + tail
        kept, seen = dict(ours.get("_retry", {})), ours.get("first_seen_at")
        return cls(text, ours.get("attempts", 0), seen, kept, body.get("kind"))

    def encode(self) -> bytes:
        """Splices our members onto the end of the text."""
        ours: dict[str, Any] = {"attempts": self.attempts}
        if self.first_seen_at is not None:
            ours["first_seen_at"] = self.first_seen_at
        if self.kept:
            ours["_retry"] = self.kept
        end = self.text.rindex("}")
        comma = "" if self.text[:end].rstrip().endswith("{") else ", "
        return f"{self.text[:end]}{comma}{json.dumps(ours)[1:-1]}{self.text[end:]}".encode()


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def payload(text: str) -> str:
    """The JSON of an envelope's `payload`: a message's own text, or a JSON string of that text.

    The string form holds what is no strict JSON (NaN), and what nests so deeply that a reader of
    the envelope might give up.
    """
    try:
        json.loads("[" * 32 + text + "]" * 32, parse_constant=refuse)
    except (ValueError, RecursionError):
        return json.dumps(text)
    return text


def revive(envelope: bytes) -> bytes:
    """The message that replay puts back for an envelope: attempts 0, everything else kept.

    Accepts entries made by hand: `payload` may be an object or its JSON text, and the other
    members may be missing. An undecodable payload comes back as the exact bytes it was. Raises
    ValueError, with what is wrong, for an entry that is no envelope.
    """
    facts = load(envelope)
    if "payload" not in facts:
        raise ValueError('it has no member "payload"')
    if isinstance(facts["payload"], dict):
        _, found, _ = members(envelope.decode())
        text = [text for name, _, text, _ in found if name == "payload"][-1]
        raw = text.removeprefix(" ").encode()
    elif isinstance(facts["payload"], str):
        raw = facts["payload"].encode(errors="surrogateescape")
    else:
        raise ValueError('its "payload" is neither an object nor a string')
    try:
        message = Message.parse(raw)
    except Undecodable:
        return raw
    kept = {name: facts[name] for name in KEPT if name in facts}
    kept = message.kept | (kept if is_kept(kept) else {})
    attempts = facts.get("attempts") if is_count(facts.get("attempts")) else 0
    earlier, replays = kept.get("earlier_attempts", 0) + attempts, kept.get("replays", 0) + 1
    kept |= {"replays": min(replays, COUNT), "earlier_attempts": min(earlier, COUNT)}
    seen = facts.get("first_seen_at")
    return Message(message.text, 0, seen if is_date(seen) else message.first_seen_at, kept).encode()


def iso(ms: float) -> str:
    """Milliseconds since 1970 as ISO 8601 with offset: 2026-11-30T12:00:00.123+00:00."""
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")


def printable(text: str, limit: int = ERROR) -> str:
    """One line that no terminal or log reader can misread: control characters are escaped."""
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


# ── Transitions ───────────────────────────────────────────────────────────────────────────────
# One transition is one script is one method of Queue. Rules: check, then add, then remove (Redis
# does not roll back: a refused write must leave a duplicate, never a hole); the token is the
# identity, never the text; the server's clock is the only clock; Lua never reads or builds JSON;
# a counter never decides a fate (pcall).
#
# Every script begins with a removal that removes nothing. Redis asks for free memory only before
# the first write of a script, and a removal needs none: so a full Redis can still drain.


class Script:
    """A Lua script, its short name, and the roles of its KEYS in order."""

    def __init__(self, name: str, keys: str, source: str) -> None:
        self.name, self.roles, self.source = name, keys.split(), source.encode()
        self.sha = hashlib.sha1(self.source).hexdigest().encode()


# claim: a due retry or the oldest waiting message → running, under the next token and a lease.
#   KEYS  running leases retry waiting next fence
#   ARGV  owner, lease (ms), "retry" or "fresh": what goes first if both are there,
#         token that must be settled before this claim, or ""
#   →     run, token, now (ms), text
#         idle, ms until the next retry is due or -1, messages running or retrying
#         unsettled
# A token is the server's time in microseconds, or one more than the last if that is greater: it
# rises even if the fence key is lost or garbage, or Redis comes back with older data.
CLAIM = Script("claim", "running leases retry waiting next fence", """
local running, leases, retry, waiting, nextq, fence = unpack(KEYS)
if ARGV[4] ~= '' and redis.call('HEXISTS', running, ARGV[4]) == 1 then return {'unsettled'} end
redis.call('ZREM', leases, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local from = redis.call('LLEN', nextq) > 0 and nextq or waiting
local fresh, due = redis.call('LLEN', from) > 0, redis.call('ZCOUNT', retry, '-inf', now) > 0
local turn = due and (ARGV[3] == 'retry' or not fresh)
local member = turn and redis.call('ZRANGE', retry, 0, 0)[1]
if not (member or fresh) then
  local first = redis.call('ZRANGE', retry, 0, 0, 'WITHSCORES')
  local wait = first[1] and math.min(tonumber(first[2]) - now, 1e15) or -1
  return {'idle', wait, redis.call('HLEN', running) + redis.call('ZCARD', retry)}
end
local text = member and string.gsub(member, '^%d+:', '', 1) or redis.call('LINDEX', from, -1)
local last = tonumber(redis.call('GET', fence)) or 0
if not (last < 9e15) then last = 0 end
local token = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
redis.call('ZADD', leases, now + ARGV[2], token)
redis.call('HSET', running, token, ARGV[1] .. ' ' .. now .. ' ' .. text)
if member then redis.call('ZREM', retry, member) else redis.call('RPOP', from) end
redis.call('SET', fence, token)
return {'run', token, now, text}
""")  # fmt: skip

# done: running → gone; follow-up messages → waiting.
#   KEYS  running leases waiting stats
#   ARGV  token, follow-up texts …
#   →     ok | stale (the token is not running any more: settled or taken over)
DONE = Script("done", "running leases waiting stats", """
local running, leases, waiting, stats = unpack(KEYS)
if redis.call('HEXISTS', running, ARGV[1]) == 0 then return 'stale' end
redis.call('ZREM', leases, '')
for i = 2, #ARGV do redis.call('LPUSH', waiting, ARGV[i]) end
redis.call('HDEL', running, ARGV[1])
redis.call('ZREM', leases, ARGV[1])
redis.pcall('HINCRBY', stats, 'done', 1)
return 'ok'
""")  # fmt: skip

# retry: running → retrying.
#   KEYS  running leases retry stats
#   ARGV  token, wait (ms), new text
#   →     ok | stale
# The member carries the token in front: a sorted set keeps one of fifty equal texts.
RETRY = Script("retry", "running leases retry stats", """
local running, leases, retry, stats = unpack(KEYS)
if redis.call('HEXISTS', running, ARGV[1]) == 0 then return 'stale' end
redis.call('ZREM', leases, '')
local time = redis.call('TIME')
local due = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
redis.call('ZADD', retry, due, ARGV[1] .. ':' .. ARGV[3])
redis.call('HDEL', running, ARGV[1])
redis.call('ZREM', leases, ARGV[1])
redis.pcall('HINCRBY', stats, 'retried', 1)
return 'ok'
""")  # fmt: skip

# bury: running → dead.
#   KEYS  running leases dlq stats
#   ARGV  token, envelope
#   →     ok | stale
BURY = Script("bury", "running leases dlq stats", """
local running, leases, dlq, stats = unpack(KEYS)
if redis.call('HEXISTS', running, ARGV[1]) == 0 then return 'stale' end
redis.call('ZREM', leases, '')
redis.call('LPUSH', dlq, ARGV[2])
redis.call('HDEL', running, ARGV[1])
redis.call('ZREM', leases, ARGV[1])
redis.pcall('HINCRBY', stats, 'dead', 1)
return 'ok'
""")  # fmt: skip

# release: running → front of waiting, the text as it is: not an attempt.
#   KEYS  running leases waiting stats
#   ARGV  token
#   →     ok | stale
RELEASE = Script("release", "running leases waiting stats", """
local running, leases, waiting, stats = unpack(KEYS)
local entry = redis.call('HGET', running, ARGV[1])
if not entry then return 'stale' end
redis.call('ZREM', leases, '')
redis.call('RPUSH', waiting, string.match(entry, '^%S* %S* (.*)$') or entry)
redis.call('HDEL', running, ARGV[1])
redis.call('ZREM', leases, ARGV[1])
redis.pcall('HINCRBY', stats, 'released', 1)
return 'ok'
""")  # fmt: skip

# renew: new deadlines for those tokens that are still running.
#   KEYS  running leases
#   ARGV  lease (ms), tokens … (at most 100)
#   →     the tokens refused
RENEW = Script("renew", "running leases", """
local running, leases = unpack(KEYS)
redis.call('ZREM', leases, '')
local time = redis.call('TIME')
local deadline = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
local refused = {}
for i = 2, #ARGV do
  if redis.call('HEXISTS', running, ARGV[i]) == 1 then
    redis.call('ZADD', leases, deadline, ARGV[i])
  else
    refused[#refused + 1] = ARGV[i]
  end
end
return refused
""")  # fmt: skip

# reclaim: a run whose lease has ended by now → the same run under the next token, owned by the
# caller, who then retries or buries it like any run of its own. The old token is refused from
# here on; should the caller die too, the new lease ends and the run is reclaimed again.
#   KEYS  running leases fence stats
#   ARGV  owner, lease (ms)
#   →     run, token, now (ms), text, first start (ms), former owner
#         none | drift (none, but running and leases differ in size: see Queue.adopt)
RECLAIM = Script("reclaim", "running leases fence stats", """
local running, leases, fence, stats = unpack(KEYS)
redis.call('ZREM', leases, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 100)) do
  local entry = redis.call('HGET', running, old)
  if entry then
    local owner, start, text = string.match(entry, '^(%S*) (%d+) (.*)$')
    owner, start, text = owner or '', math.min(tonumber(start) or now, now), text or entry
    local last = tonumber(redis.call('GET', fence)) or 0
    if not (last < 9e15) then last = 0 end
    local token = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
    redis.call('ZADD', leases, now + ARGV[2], token)
    redis.call('HSET', running, token, ARGV[1] .. ' ' .. start .. ' ' .. text)
    redis.call('SET', fence, token)
    redis.call('HDEL', running, old)
    redis.call('ZREM', leases, old)
    redis.pcall('HINCRBY', stats, 'reclaimed', 1)
    return {'run', token, now, text, start, owner}
  end
  redis.call('ZREM', leases, old)
end
return redis.call('HLEN', running) == redis.call('ZCARD', leases) and {'none'} or {'drift'}
""")  # fmt: skip

# checkpoint: a running message's text is replaced and its lease renewed.
#   KEYS  running leases
#   ARGV  token, lease (ms), new text
#   →     ok | stale
CHECKPOINT = Script("checkpoint", "running leases", """
local running, leases = unpack(KEYS)
local entry = redis.call('HGET', running, ARGV[1])
if not entry then return 'stale' end
redis.call('ZREM', leases, '')
local time = redis.call('TIME')
redis.call('ZADD', leases, time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('HSET', running, ARGV[1], string.match(entry, '^%S* %S* ') .. ARGV[3])
return 'ok'
""")  # fmt: skip

# replay: dead → waiting, for exactly this envelope.
#   KEYS  dlq waiting stats
#   ARGV  envelope, new text, the end to look from: 1 newest, -1 oldest,
#         place when last seen: 1 the oldest, 2 the next …, 0 unknown; others can only lower it
#   →     ok | gone (the envelope is not there any more)
REPLAY = Script("replay", "dlq waiting stats", """
local dlq, waiting, stats = unpack(KEYS)
if redis.call('LINDEX', dlq, 0 - ARGV[4]) ~= ARGV[1] then
  local most = ARGV[3] == '-1' and ARGV[4] or 0
  local found = redis.call('LPOS', dlq, ARGV[1], 'RANK', ARGV[3], 'MAXLEN', most)
  if not found then return 'gone' end
end
redis.pcall('HDEL', stats, '')
redis.call('LPUSH', waiting, ARGV[2])
redis.call('LREM', dlq, ARGV[3], ARGV[1])
redis.pcall('HINCRBY', stats, 'replayed', 1)
return 'ok'
""")  # fmt: skip

# beat: not a transition. Notes when each loop of a worker last made progress, and drops the notes
# of workers that have been silent for a day.
#   KEYS  workers dlq
#   ARGV  age (ms), loop, age, loop …
#   →     dead letters
BEAT = Script("beat", "workers dlq", """
local workers, dlq = unpack(KEYS)
redis.call('ZREM', workers, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - 86400000)
for i = 1, #ARGV, 2 do redis.call('ZADD', workers, now - ARGV[i], ARGV[i + 1]) end
redis.call('ZREMRANGEBYRANK', workers, 0, -10001)
return redis.call('LLEN', dlq)
""")  # fmt: skip

# probe: not a transition. Tries every command that the scripts use on a key of its own, so that a
# missing permission is known, by name, before a message is touched.
#   KEYS  probe
#   →     ok | refused, command, error
PROBE = Script("probe", "probe", """
local key = KEYS[1]
for _, command in ipairs({
  {'DEL', key}, {'LPUSH', key, 'x'}, {'RPUSH', key, 'x'}, {'LLEN', key}, {'LINDEX', key, -1},
  {'LPOS', key, 'x'}, {'RPOP', key}, {'LREM', key, 1, 'x'}, {'HSET', key, 'x', 0},
  {'HGET', key, 'x'}, {'HEXISTS', key, 'x'}, {'HLEN', key}, {'HINCRBY', key, 'x', 1},
  {'HDEL', key, 'x'}, {'ZADD', key, 0, 'x'}, {'ZRANGE', key, 0, 0},
  {'ZRANGEBYSCORE', key, 0, 0}, {'ZCOUNT', key, 0, 0}, {'ZCARD', key},
  {'ZREMRANGEBYSCORE', key, 1, 1}, {'ZREMRANGEBYRANK', key, 1, 1}, {'ZREM', key, 'x'},
  {'SET', key, 0}, {'GET', key}, {'TIME'}, {'DEL', key}}) do
  local reply = redis.pcall(unpack(command))
  if type(reply) == 'table' and reply.err then
    redis.pcall('DEL', key)
    return {'refused', command[1], reply.err}
  end
end
return {'ok'}
""")  # fmt: skip

# ── The queue ─────────────────────────────────────────────────────────────────────────────────
# One connection, no pool, no resending by the client: redis-py's own retries pop twice what they
# meant to pop once. What may be repeated is decided here, because the token makes it safe.

BLOCK = 5.0  # seconds an idle hand sleeps in Redis at most
SHORTEST = 0.01  # and at least: Redis 6.2 takes one millisecond for none, and none for eternity
PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    OSError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,  # MASTERDOWN is one, too
    redis.exceptions.TryAgainError,
)
PASSING_CODES = re.compile(  # where redis-py has no class, or the error comes out of a script
    r"\b(LOADING|READONLY|MASTERDOWN|NOREPLICAS|MISCONF|OOM|BUSY|UNBLOCKED|CLUSTERDOWN|TRYAGAIN"
    r"|max number of clients|Redis is busy)\b"
)
Fault = (redis.RedisError, OSError)


def passing(error: Exception) -> bool:
    """Tells whether a Redis fault ends by itself; if not, a person has to repair something."""
    if isinstance(error, redis.AuthenticationError):  # redis-py counts it as a connection error
        return False
    return isinstance(error, PASSING) or PASSING_CODES.search(str(error)) is not None


def fault_text(error: Exception) -> str:
    return printable(str(error)).rstrip(".") or type(error).__name__


class Step(NamedTuple):
    """A transition ready to be sent: a script and its ARGV."""

    script: Script
    args: tuple[bytes | str | int, ...]


class Run(NamedTuple):
    """A message being run. `start_ms` is the server's clock when we got it, `since` ours."""

    token: int
    start_ms: int
    raw: bytes
    since: float
    first_ms: int  # the first start known: earlier than start_ms after a reclaim
    owner: str = ""  # who held it before a reclaim

    def now_ms(self) -> float:
        """The server's clock now, carried on by our monotonic one: no wall clock of ours."""
        return self.start_ms + (time.monotonic() - self.since) * 1000


class Claim(NamedTuple):
    """What a claim brought: a run, or how long to wait (ms, -1: no retry is due) and for what."""

    run: Run | None = None
    wait_ms: int = -1
    left: int = 1  # messages running or retrying

    @classmethod
    def of(cls, reply: list[Any]) -> Claim:
        """Reads the reply of a claim or of a reclaim."""
        if reply[0] != b"run":
            return cls(None, *(int(number) for number in reply[1:]))
        _, token, now, raw, *former = reply
        first, owner = (int(former[0]), former[1].decode()) if former else (int(now), "")
        return cls(Run(int(token), int(now), raw, time.monotonic(), first, owner))


class Queue:
    """A queue in Redis: builds the steps, sends them, waits at the doorbell.

    A method named after a transition returns a `Step`; `do` sends steps, several in one round
    trip. Times are seconds here and milliseconds inside Redis. Every method that talks to Redis
    raises what redis-py raises; see `passing`.

        queue = Queue("redis://127.0.0.1:6379/0")
        [reply] = queue.do(queue.claim("me", lease=30))
    """

    def __init__(self, url: str, name: str = "q:tasks", timeout: float = BLOCK + 3) -> None:
        """Does not connect yet. `timeout` must exceed every wait. ValueError if `url` is none."""
        pool = redis.ConnectionPool.from_url(url, protocol=2)
        pool.connection_kwargs |= {  # whatever the URL says
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": timeout,
            "socket_connect_timeout": min(timeout, 5.0),
            "retry": Retry(NoBackoff(), 0),
        }
        if "path" not in pool.connection_kwargs:  # not a unix socket
            pool.connection_kwargs["socket_keepalive"] = True
        self.names = Names(name)
        connection: Any = pool.make_connection()
        connection.driver_info = None  # no CLIENT SETINFO: one right less to be given
        self.connection = connection
        self.prefixes: dict[Script, bytes] = {}

    # What is sent ────────────────────────────────────────────────────────────────────────────

    def claim(self, owner: str, lease: float, prefer: str = "retry", after: int | str = "") -> Step:
        return Step(CLAIM, (owner, ms(lease), prefer, after))

    def done(self, token: int, *messages: bytes) -> Step:
        return Step(DONE, (token, *messages))

    def retry(self, token: int, wait: float, text: bytes) -> Step:
        return Step(RETRY, (token, ms(wait), text))

    def bury(self, token: int, envelope: bytes) -> Step:
        return Step(BURY, (token, envelope))

    def release(self, token: int) -> Step:
        return Step(RELEASE, (token,))

    def renew(self, lease: float, *tokens: int | bytes) -> Step:
        return Step(RENEW, (ms(lease), *tokens))

    def reclaim(self, owner: str, lease: float) -> Step:
        return Step(RECLAIM, (owner, ms(lease)))

    def checkpoint(self, token: int, lease: float, text: bytes) -> Step:
        return Step(CHECKPOINT, (token, ms(lease), text))

    def replay(self, envelope: bytes, text: bytes, end: int = -1, place: int = 0) -> Step:
        return Step(REPLAY, (envelope, text, end, place))

    def beat(self, progress: dict[str, float]) -> Step:
        """`progress`: loop name → seconds since it last made progress."""
        return Step(BEAT, tuple(x for name, age in progress.items() for x in (ms(age), name)))

    # How ─────────────────────────────────────────────────────────────────────────────────────

    def do(self, *steps: Step) -> list[Any]:
        """Sends the steps in one round trip and returns their replies, in order.

        A step that Redis answers with an error has the exception as its reply if it is not the
        only one; alone, it is raised. If Redis has forgotten a script, that step and those behind
        it are sent again, whole (a claim behind a settlement has then been refused: `after`).
        """
        send = self.connection.send_packed_command
        try:
            send([b"".join([self.pack(step) for step in steps])])
            replies = [self.reply() for _ in steps]
            for i, reply in enumerate(replies):
                if isinstance(reply, redis.exceptions.NoScriptError):
                    again = [self.pack(step, whole=True) for step in steps[i:]]
                    send([b"".join(again)])
                    replies[i:] = [self.reply() for _ in again]
                    break
        except BaseException:  # a signal's, too: a reply left unread would be taken for the next
            self.close()
            raise
        if len(replies) == 1 and isinstance(replies[0], Exception):
            raise replies[0]
        return replies

    def reply(self) -> Any:
        try:
            return self.connection.read_response()
        except redis.ResponseError as error:
            return error

    def pack(self, step: Step, whole: bool = False) -> bytes:
        """Encodes an EVALSHA, or an EVAL if `whole`. Twice as fast as the client's own packer."""
        script = step.script
        prefix = self.prefixes.get(script)
        if whole or prefix is None:
            keys = [getattr(self.names, role) for role in script.roles]
            call = ("EVAL", script.source) if whole else ("EVALSHA", script.sha)
            prefix = b"".join(map(bulk, (*call, len(keys), *keys)))
            if not whole:
                self.prefixes[script] = prefix
        count = 3 + len(script.roles) + len(step.args)
        return b"*%d\r\n%b%b" % (count, prefix, b"".join([bulk(arg) for arg in step.args]))

    def command(self, *args: bytes | str | int | float) -> Any:
        """Sends one plain command and returns its reply."""
        try:
            self.connection.send_command(*args)
            return self.connection.read_response()
        except redis.ResponseError:
            raise
        except BaseException:
            self.close()
            raise

    def ring(self, seconds: float) -> bool:
        """Sleeps in Redis until a message comes, `seconds` at most; True if one came.

        The server moves the message to `next` and wakes this client alone. If the client dies now,
        nothing is lost: the next claim, by anyone, takes it from there.
        """
        names, seconds = self.names, max(SHORTEST, min(seconds, BLOCK))
        reply = self.command("BLMOVE", names.waiting, names.next, "RIGHT", "LEFT", seconds)
        return reply is not None

    def pages(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """What is running, as (token, "owner start text"), in pages of about a hundred."""
        cursor = b"0"
        while True:
            cursor, flat = self.command("HSCAN", self.names.running, cursor, "COUNT", 100)
            yield list(zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                return

    def owned(self, owner: str) -> list[Run]:
        """The runs of this owner: how a claim whose reply was lost is found again."""
        now, since, found = self.now_ms(), time.monotonic(), []
        for page in self.pages():
            for token, entry in page:
                who, _, rest = entry.partition(b" ")
                if who == owner.encode():
                    start, _, text = rest.partition(b" ")
                    found.append(Run(int(token), now, text, since, int(start)))
        return found

    def adopt(self, lease: float) -> int:
        """Gives a lease to what is running without one (deleted, evicted); returns how many."""
        adopted = 0
        for page in self.pages():
            tokens = [token for token, _ in page]
            deadlines = self.command("ZMSCORE", self.names.leases, *tokens) if tokens else []
            pairs = zip(tokens, deadlines, strict=True)
            bare = [token for token, deadline in pairs if deadline is None]
            for i in range(0, len(bare), 100):
                self.do(self.renew(lease, *bare[i : i + 100]))
            adopted += len(bare)
        return adopted

    def now_ms(self) -> int:
        seconds, micros = self.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def wrong_types(self) -> list[str]:
        """A sentence for each of our keys that holds something else than it must."""
        wrong = []
        for role, wanted in TYPES.items():
            key = getattr(self.names, role)
            found = self.command("TYPE", key).decode()
            if found not in (wanted, "none"):
                wrong.append(f"key {key} is a {found}, the queue needs a {wanted}: rename it")
        return wrong

    def place(self) -> str:
        """Where the server is, for people: no user, no password."""
        at = self.connection
        where = getattr(at, "path", None) or f"{getattr(at, 'host', '')}:{getattr(at, 'port', '')}"
        return f"{where}/{getattr(at, 'db', 0) or 0}" if hasattr(at, "host") else str(where)

    def close(self) -> None:
        self.connection.disconnect()


def ms(seconds: float) -> int:
    return round(seconds * 1000)


def bulk(arg: bytes | str | int) -> bytes:
    data = arg if isinstance(arg, bytes) else str(arg).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)

# ── What a failure leads to ───────────────────────────────────────────────────────────────────


class Failure(NamedTuple):
    """A failed run. `reason` is what the envelope says if the message is dead now."""

    error: str
    reason: str = "exhausted"
    fatal: bool = False  # no run can help: dead at once, attempts as they are
    not_before: float = 0.0  # seconds


class Settlement(NamedTuple):
    """How a run ends: the step for Redis, and then a line for people."""

    token: int
    step: Step
    line: str = ""

    def tell(self, settings: Settings, tombs: int) -> None:
        """Says what happened, after it has; a dead letter's token goes down the pipe `tombs`."""
        if self.step.script is RETRY:
            announce(self.line, settings.qr_dir)
        elif self.line:
            log(self.line)
        if self.step.script is BURY:
            with suppress(OSError):  # full: thousands are waiting there already
                os.write(tombs, self.token.to_bytes(8, "little"))


def settle_failure(
    queue: Queue, policy: Policy, run: Run, failure: Failure, worker: str
) -> Settlement:
    """Decides between retry and bury, and writes the new message text or the envelope."""
    try:
        message = Message.parse(run.raw)
    except Undecodable as error:
        message = Message(run.raw.decode(errors="surrogateescape"))
        failure = Failure(printable(f"Undecodable: {error}"), "undecodable", fatal=True)
    attempts = message.attempts + (not failure.fatal)
    seen = message.first_seen_at or iso(run.first_ms)
    dead = failure.fatal or attempts >= policy.max_attempts
    wait = None if dead else round(policy.wait(attempts - 1, failure.not_before), 3)
    failed_at = iso(run.now_ms())
    entry = {"at": failed_at, "error": failure.error, "wait": wait}
    kept = message.kept | {"history": [*message.kept.get("history", []), entry][-HISTORY:]}
    facts = f"attempts={attempts} kind={word(message.kind)}"
    about = f"token={run.token} error={json.dumps(failure.error, ensure_ascii=False)}"
    if wait is not None:
        step = queue.retry(run.token, wait, Message(message.text, attempts, seen, kept).encode())
        return Settlement(run.token, step, f"{facts} wait={wait:.3f} {about}")
    head = {
        "error": failure.error,
        "attempts": attempts,
        "first_seen_at": seen,
        "reason": failure.reason,
        "failed_at": failed_at,
        "worker": worker,
        "token": run.token,
    }
    tail = {name: kept[name] for name in KEPT if name in kept}
    exact = failure.reason == "undecodable"  # no object: a string of the exact bytes
    inner = json.dumps(message.text) if exact else payload(message.text)
    envelope = f'{{"payload": {inner}, {json.dumps(head | tail)[1:]}'
    step = queue.bury(run.token, envelope.encode())
    return Settlement(run.token, step, f"dead {facts} reason={failure.reason} {about}")


def describe(error: BaseException) -> str:
    """`Type: text (file:line in function)` in one line, whatever the exception does when asked."""
    name = where = text = ""
    try:
        name = type(error).__name__
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename not in NOT_SHOWN:  # the deepest line of somebody else
                file = os.path.basename(code.co_filename)
                where = f" ({file}:{trace.tb_lineno} in {code.co_name})"
            trace = trace.tb_next
        where = printable(where, ERROR // 2)
        text = f": {error}"[: ERROR + 1].rstrip(": ")
    except BaseException as why:  # the handler's own class: anything may come out of it
        text = f": <cannot be told: {type(why).__name__}>"
    return printable(f"{name or 'Exception'}{text}", ERROR - len(where)) + where


NOT_SHOWN = (describe.__code__.co_filename, "<frozen importlib._bootstrap>", importlib.__file__)


def word(value: object) -> str:
    """A value as one word of a log line: bare if it is simple, else quoted."""
    if value is None:
        return "-"
    text = printable(str(value), 40)
    return text if re.fullmatch(r"[\w.:/-]+", text) else json.dumps(text, ensure_ascii=False)


# ── Lines for people ──────────────────────────────────────────────────────────────────────────
# State first, then the line: a full disk, a closed pipe, a reader that has stopped cost a line,
# never a retry. So nothing here raises or blocks.

REQUEUE_OUT_BYTES = 10_000_000  # requeue.out grows to this and no further


def emit(fd: int, line: str) -> None:
    with suppress(OSError, ValueError):
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, line.encode(errors="backslashreplace") + b"\n")


def log(line: str) -> None:
    emit(2, f"worker: {line}")


def announce(line: str, folder: Path) -> None:
    """Prints the line of a re-queue and appends it to requeue.out, if `folder` exists.

    If stdout is that very file, it is written once.
    """
    emit(1, line)
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        fd = os.open(folder / "requeue.out", flags, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size < REQUEUE_OUT_BYTES and not is_stdout(fd):
                emit(fd, line)
        finally:
            os.close(fd)


def fill_standard_files() -> None:
    """Opens /dev/null where 0, 1 or 2 is closed: else our next file gets the number, and lines."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)


def is_stdout(fd: int) -> bool:
    try:
        return os.path.sameopenfile(fd, 1)
    except OSError:  # stdout is closed
        return False


# ── What a hand and its foreman tell each other ───────────────────────────────────────────────

TOKEN, SINCE, PROGRESS, ORDER, VERDICT, LOADED, NOTE = range(7)  # words of a slot
FINISH, NOW = 1, 2  # an ORDER: finish what you run; interrupt it and release its message
DRAINED = -1  # a VERDICT: nothing is left to do (--burst); others are exit codes


class Slot:
    """One hand's piece of the shared memory: seven integers of 8 bytes, and a note.

    TOKEN is what it runs, SINCE when the handler began (0: not in the handler), PROGRESS the last
    sign of life, both in ns of the monotonic clock, which all processes of a machine share. The
    note says why Redis does not answer, or why the hand left.
    """

    SIZE = 1024

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self.bytes = memoryview(memory)[index * self.SIZE : (index + 1) * self.SIZE]
        self.words = self.bytes[:56].cast("q")

    def clear(self) -> None:
        self.bytes[:] = bytes(self.SIZE)
        self.words[PROGRESS] = time.monotonic_ns()

    @property
    def note(self) -> str:
        return bytes(self.bytes[56 : 56 + self.words[NOTE]]).decode(errors="replace")

    @note.setter
    def note(self, text: str) -> None:
        data = text.encode()[: self.SIZE - 56]
        self.words[NOTE] = 0
        self.bytes[56 : 56 + len(data)] = data
        self.words[NOTE] = len(data)


# ── The hand ──────────────────────────────────────────────────────────────────────────────────

IDLE, HELD, HANDLER = "idle", "held", "handler"  # where a signal may raise in a hand
RECONNECT_BASE, RECONNECT_CAP = 0.05, 2.0  # seconds, full jitter
TICK = 0.0 if sys.platform == "linux" else 1.0  # how often a hand looks for its foreman itself
T = TypeVar("T")


class TimeLimitExceeded(TimeoutError):
    """The handler ran past --time-limit; raised inside it."""


class LeaseLost(Exception):
    """The run has been taken over: what it does to the queue has no effect any more."""


class Stop(BaseException):
    """The hand has been told to stop; raised in waits, and in the handler when grace is over."""


class Repair(Exception):
    """Redis answers, but a person has to repair something."""


class Running:
    """What a handler may do with its run, if it asks: `def process(msg, run)`.

    `token` is the fencing token: it only rises, so a store that remembers the highest it has seen
    can refuse a late writer. `attempts` is the number of failed runs before this one, `stage` what
    the last checkpoint said.
    """

    def __init__(self, hand: Hand, run: Run) -> None:
        self.hand, self.run = hand, run
        self.follow_ups: list[bytes] = []

    @property
    def token(self) -> int:
        return self.run.token

    @property
    def attempts(self) -> int:
        return Message.parse(self.run.raw).attempts

    @property
    def stage(self) -> Any:
        return Message.parse(self.run.raw).kept.get("stage")

    def push(self, message: dict[str, Any]) -> None:
        """Queues a follow-up message, in the same atomic step that makes this run done."""
        if not isinstance(message, dict):
            raise TypeError(f"a message is a dict, this is {type(message).__name__}")
        self.check()
        self.follow_ups.append(json.dumps(message).encode())

    def checkpoint(self, stage: Any) -> None:
        """Writes down how far the run got (any JSON value); a later run finds it in `stage`.

        Raises LeaseLost if the run has been taken over or has ended, ValueError or TypeError if
        `stage` is not JSON.
        """
        hand, run = self.hand, self.run
        json.dumps(stage, allow_nan=False)
        self.check()
        message = Message.parse(run.raw)
        kept, seen = message.kept | {"stage": stage}, message.first_seen_at or iso(run.first_ms)
        text = Message(message.text, message.attempts, seen, kept).encode()
        step = hand.queue.checkpoint(run.token, hand.settings.lease, text)
        if hand.insist(partial(hand.queue.do, step)) == [b"stale"]:
            raise LeaseLost(f"run {run.token} has been taken over")
        self.run = run._replace(raw=text)

    def check(self) -> None:
        """A thread or a child process that outlives its run must not speak for the next one."""
        if self.hand.running is not self or self.hand.pid != os.getpid():
            raise LeaseLost(f"run {self.token} has ended, or this is another process")


class Hand:
    """The process that runs the handler: claim, process, settle, over and over."""

    def __init__(self, settings: Settings, slot: Slot, foreman: int, tombs: int) -> None:
        self.settings, self.slot, self.foreman, self.tombs = settings, slot, foreman, tombs
        self.pid = os.getpid()
        self.name = f"{settings.name}/{self.pid}"
        self.queue = Queue(settings.redis, settings.queue)
        self.leaving = self.timed_out = False
        self.guard: str | None = None
        self.deadline = 0.0
        self.prefer = "fresh"
        self.running: Running | None = None
        self.sentinel, write = os.pipe()  # no other file has its inode
        os.close(write)
        self.inode = os.fstat(self.sentinel).st_ino
        self.signals = {
            signal.SIGTERM: self.on_stop,
            signal.SIGINT: self.on_stop,
            signal.SIGALRM: self.on_alarm,
        }

    def main(self) -> NoReturn:
        """Runs until told to stop, and leaves by `os._exit`: no exit hook of anyone runs."""
        status = 0
        try:
            die_with(self.foreman)
            self.mend_signals()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.register_at_fork(
                before=self.hold_signals,
                after_in_parent=self.free_signals,
                after_in_child=self.disown,
            )
            self.load_handler()
            last = None
            while (run := self.next_run(last)) is not None:
                last = self.attempt(run)
        except Stop:
            pass
        except Repair as error:
            self.verdict(2, str(error))
        except BaseException:  # a bug of ours; status 1 tells the foreman
            sys.excepthook(*sys.exc_info())
            status = 1
        with suppress(BaseException):
            sys.stdout.flush()  # it may be closed, full, or None
        os._exit(status)

    def verdict(self, code: int, note: str = "") -> None:
        self.slot.note = note
        self.slot.words[VERDICT] = code

    # Claim and settle ────────────────────────────────────────────────────────────────────────

    def next_run(self, last: Settlement | None) -> Run | None:
        """Settles the last run and returns the next; None if this hand is to leave."""
        while True:
            claim, last = self.exchange(last), None
            if self.leaving:
                if claim.run:
                    release = self.queue.release(claim.run.token)
                    self.insist(partial(self.queue.do, release), held=True)
                return None
            if claim.run:
                return claim.run
            if self.settings.burst and claim.left == 0:
                self.verdict(DRAINED)
                return None
            self.idle(claim)

    def exchange(self, last: Settlement | None) -> Claim:
        """Settles the last run, if any, and claims the next, if not leaving: one round trip."""
        if os.getppid() != self.foreman:  # orphaned, and the kernel did not see to it
            os._exit(1)
        steps = [last.step] if last else []
        if not self.leaving:
            self.prefer = "fresh" if self.prefer == "retry" else "retry"
            lease, after = self.settings.lease, last.token if last else ""
            steps.append(self.queue.claim(self.name, lease, self.prefer, after))
        try:
            replies = self.queue.do(*steps) if steps else []
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        except Fault as error:
            return self.recover(last, error)
        if last:
            self.settled(last, replies.pop(0))
        self.slot.words[PROGRESS] = time.monotonic_ns()
        return Claim.of(replies[0]) if replies else Claim()

    def settled(self, last: Settlement, word: bytes, repeated: bool = False) -> None:
        """Says what became of a run. After a lost reply, `stale` is what success looks like."""
        self.slot.words[TOKEN] = 0
        if word == b"ok" or repeated:
            last.tell(self.settings, self.tombs)
        else:
            log(f"run {last.token} had been taken over after its lease: its result is refused")
            with suppress(*Fault):
                self.queue.command("HINCRBY", self.queue.names.stats, "refused", 1)

    def recover(self, last: Settlement | None, error: Exception) -> Claim:
        """The same as exchange, one thing at a time, after a fault that hides what happened.

        The settlement is repeated until Redis answers: the handler's result is kept, and the
        handler is not run again for it. A claim whose reply was lost is found under our name.
        """
        if last:
            [word] = self.insist(partial(self.queue.do, last.step), error, held=True)
            self.settled(last, word, repeated=True)
        return self.insist(self.find_or_claim, error)

    def find_or_claim(self) -> Claim:
        queue, lease = self.queue, self.settings.lease
        for run in queue.owned(self.name):
            if queue.do(queue.renew(lease, run.token)) == [[]]:
                return Claim(run)
        if self.leaving:
            return Claim()
        [reply] = queue.do(queue.claim(self.name, lease))
        return Claim.of(reply)

    def insist(
        self, action: Callable[[], T], error: Exception | None = None, held: bool = False
    ) -> T:
        """Repeats an action until Redis answers, with full jitter between the tries.

        `error` is the fault that led here, if any. `held`: something is being held, so only the
        end of grace interrupts. Raises Repair for a fault that does not pass, Stop when told to.
        """
        tries = 0
        while True:
            if error is not None:
                if not passing(error):
                    raise Repair(explain(self.queue, error))
                self.queue.close()
                if tries:  # the first is a hiccup
                    self.slot.note = fault_text(error)
                    self.nap(draw(tries, RECONNECT_BASE, RECONNECT_CAP), HELD if held else IDLE)
                tries += 1
            try:
                result = action()
            except Fault as fault:
                if self.guard == HANDLER and self.timed_out:  # the limit, taken for a socket's
                    raise self.past_limit() from None
                error = fault
            else:
                self.slot.note = ""
                return result

    def idle(self, claim: Claim) -> None:
        """Waits for the doorbell, or until a retry is due."""
        wait = BLOCK if claim.wait_ms < 0 else claim.wait_ms / 1000
        if self.settings.burst:  # what others run may end without a ring
            wait = min(wait, 0.2)
        try:
            self.guard = IDLE
            if self.leaving:
                raise Stop
            self.queue.ring(wait)
        except Fault as error:
            self.queue.close()
            if not passing(error):
                raise Repair(explain(self.queue, error)) from None
            time.sleep(draw(0, min(wait, 1.0)))  # a full Redis refuses BLMOVE, but not a claim
        finally:
            self.guard = None

    def nap(self, seconds: float, guard: str) -> None:
        before, self.guard = self.guard, self.guard or guard
        try:
            if self.leaving and self.guard == IDLE:
                raise Stop
            time.sleep(seconds)
        finally:
            self.guard = before

    # Run ─────────────────────────────────────────────────────────────────────────────────────

    def attempt(self, run: Run) -> Settlement:
        """Runs the handler once and decides how the run ends."""
        running = self.running = Running(self, run)
        words = self.slot.words
        words[SINCE], words[TOKEN] = time.monotonic_ns(), run.token
        try:
            failure = self.call(load(run.raw), running)
        except Undecodable:
            failure = Failure("", fatal=True)  # settle_failure finds out the same and says it
        if os.getpid() != self.pid:  # the handler forked, and this is the child coming back
            os._exit(0)
        words[SINCE], self.running = 0, None
        self.mend_signals()
        self.mend_descriptors()
        if failure is None:
            return Settlement(run.token, self.queue.done(run.token, *running.follow_ups))
        if words[ORDER] == NOW:
            step = self.queue.release(run.token)
            return Settlement(run.token, step, f"released token={run.token}: stopped in mid-run")
        return settle_failure(self.queue, self.settings.policy, running.run, failure, self.name)

    def call(self, message: dict[str, Any], running: Running) -> Failure | None:
        """Calls the handler under the time limit; a Failure if it raised, whatever it raised."""
        limit, self.timed_out = self.settings.time_limit, False
        try:
            try:
                self.guard, self.deadline = HANDLER, time.monotonic() + limit
                signal.setitimer(signal.ITIMER_REAL, min(limit, TICK or limit), TICK)
                extra = {"run": running} if self.takes_run else {}
                result = self.process(message, **extra)
                if result is not None and inspect.isawaitable(result):
                    asyncio.run(finish(result))
            finally:
                self.guard = None
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            if self.timed_out:
                return Failure(describe(error), "timed_out")
            verdict = self.settings.policy.verdict(error)
            if verdict.action == "give up":
                return Failure(describe(error), "permanent", fatal=True)
            return Failure(describe(error), not_before=verdict.not_before)
        return None

    def load_handler(self) -> None:
        """Imports the handler, here in the hand, so that a new hand has the new code."""
        name, folder, module, function = self.settings.handler()
        try:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)
            sys.path.insert(0, str(folder))
            self.guard = IDLE  # an import may take long, and nothing runs yet
            found: Any = importlib.import_module(module)
            self.guard = None
            for part in function.split("."):
                found = getattr(found, part)
            signature = inspect.signature(found)
            self.takes_run = "run" in signature.parameters
            try:
                signature.bind({}, **({"run": None} if self.takes_run else {}))
            except TypeError:  # each message would die of it
                needed = "process(msg) or process(msg, run) is needed"
                raise TypeError(f"it takes {signature}; {needed}") from None
            if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
                raise TypeError("it has a yield: calling it would run nothing")
        except Stop:
            raise
        except BaseException as error:
            why = f"{describe(error)}; looked in {folder}"
            self.verdict(3, f"cannot load the handler {name}: {why}")
            raise Stop from None
        self.process: Callable[..., Any] = found
        self.slot.words[LOADED] = 1

    # Signals ─────────────────────────────────────────────────────────────────────────────────

    def on_stop(self, number: int, frame: FrameType | None) -> None:
        self.leaving = True
        if self.guard == IDLE:
            raise Stop

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        """The time limit, the end of grace, or (where the kernel does not do it) a dead foreman."""
        if os.getppid() != self.foreman:
            os._exit(1)
        if self.slot.words[ORDER] == NOW:
            self.leaving = True
            if self.guard is not None:
                raise Stop
        elif self.guard == HANDLER and not self.timed_out and time.monotonic() >= self.deadline:
            self.timed_out = True
            raise self.past_limit()

    def past_limit(self) -> TimeLimitExceeded:
        return TimeLimitExceeded(f"ran longer than {self.settings.time_limit:g} s")

    def mend_signals(self) -> None:
        """Sets our signal handlers, if a handler has changed them, and hears what was missed."""
        for number, ours in self.signals.items():
            if signal.getsignal(number) is not ours:
                signal.signal(number, ours)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        self.leaving = self.leaving or self.slot.words[ORDER] != 0

    def mend_descriptors(self) -> None:
        """After a handler that closed all files: settle on a new connection, then be replaced."""
        try:
            intact = os.fstat(self.sentinel).st_ino == self.inode
        except OSError:
            intact = False
        if not intact:
            fill_standard_files()
            self.queue.close()
            self.leaving = True

    # A child that the handler forks gets none of our signal handlers. A signal that arrives before
    # they are gone waits, and then meets the default: else `Pool.terminate` could hang for ever.

    def hold_signals(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)

    def free_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def disown(self) -> None:
        for number in self.signals:
            signal.signal(number, signal.SIG_DFL)
        self.free_signals()


async def finish(result: Awaitable[Any]) -> None:
    await result


def die_with(foreman: int) -> None:
    """Makes the kernel kill this process when its foreman dies, even inside C code (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != foreman:
        os._exit(1)


# ── The foreman ───────────────────────────────────────────────────────────────────────────────
# The parent does almost nothing, so it almost never fails. It runs no handler and imports nothing
# that a handler needs.

LOOK = 0.5  # seconds between two looks at the hands
PULSE = 10.0  # seconds between two beats at most; a third of the lease, if that is less
ANSWER = 2.0  # seconds that the foreman waits for an answer of Redis
REJOIN = ANSWER + RECONNECT_CAP  # what another foreman may need to be back after an outage
EARLY = 30.0  # seconds; a hand that dies before is replaced more and more slowly
MOST_FALLS = 5  # hands that may die while they load the handler, in a row
HURRY = 1.0  # seconds that an interrupted handler has before SIGKILL
ONE_REQUEST = 0.5  # seconds in which several signals are one request (`timeout` sends two)


@dataclass
class Seat:
    """A place for one hand, and what is known of the hand that has it."""

    slot: Slot
    number: int
    pid: int = 0
    name: str = ""
    timed_out: bool = False  # we killed it for that
    born: float = 0.0
    falls: int = 0  # early deaths in a row of hands that were not running a message
    next_fork: float = 0.0
    finished: bool = False


class Orphan(NamedTuple):
    """What a dead hand left in Redis: its runs, one of them (`token`, or 0) to be charged."""

    owner: str
    token: int
    failure: Failure


class Foreman:
    """The parent: forks hands, renews their leases, buries the dead, takes over expired runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.queue = Queue(settings.redis, settings.queue, timeout=ANSWER)
        memory = mmap.mmap(-1, Slot.SIZE * settings.concurrency)
        self.seats = [Seat(Slot(memory, i), i + 1) for i in range(settings.concurrency)]
        self.orphans: list[Orphan] = []
        self.watchman = Watchman(settings)
        self.code = 0
        self.stopped_at = self.hurried_at = 0.0
        self.next_beat = self.reclaim_from = 0.0
        self.last_beat = time.monotonic()
        self.fault, self.faults = "", 0  # why Redis does not answer us, and how often in a row
        self.outage = 0.0  # since when people have been told

    def run(self) -> int:
        """Works until told to stop, or until --burst has drained the queue; the exit code."""
        self.set_signals()
        while not self.greet():
            self.sleep()
            if self.stopped_at:
                return self.code
        while True:
            self.reap()
            self.fork_missing()
            if self.is_over():
                break
            self.watch()
            self.beat()
            self.tend()
            self.report_outage()
            self.sleep()
        self.sign_off()
        return self.code

    def is_over(self) -> bool:
        over = self.stopped_at or all(seat.finished for seat in self.seats)
        return bool(over) and not any(seat.pid for seat in self.seats) and not self.watchman.busy()

    # Signals ─────────────────────────────────────────────────────────────────────────────────

    def set_signals(self) -> None:
        self.wake, self.waker = os.pipe()
        self.tomb, self.tombs = os.pipe()
        for fd in (self.wake, self.waker, self.tomb, self.tombs):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, frame: None)

    def sleep(self) -> None:
        """Sleeps until the next look or beat is due; a signal or a dead letter ends it."""
        due = self.next_beat - time.monotonic()
        seconds = max(0.0, min(LOOK, due))
        if self.watchman.eager() and not self.faults:
            seconds = 0.0
        ready = select.select([self.wake, self.tomb], [], [], seconds)[0]
        if self.tomb in ready:
            self.watchman.note(os.read(self.tomb, 8000))
            self.next_beat = min(self.next_beat, self.last_beat + LOOK)
        if self.wake in ready and set(os.read(self.wake, 4096)) - {signal.SIGCHLD}:
            if not self.stopped_at:
                self.stop()
            elif time.monotonic() > self.stopped_at + ONE_REQUEST:
                self.hurry()

    def stop(self, code: int = 0) -> None:
        """Asks every hand to finish what it runs, and gives it the grace for that."""
        self.code = self.code or code
        if not self.stopped_at:
            self.stopped_at = time.monotonic()
            self.order(FINISH, signal.SIGTERM)

    def hurry(self) -> None:
        """Ends the grace: interrupts the handlers, whose messages are then released."""
        if not self.hurried_at:
            self.hurried_at = time.monotonic()
            self.order(NOW, signal.SIGALRM)
            self.watchman.hurry()

    def order(self, order: int, number: int) -> None:
        for seat in self.seats:
            seat.slot.words[ORDER] = order
            if seat.pid:
                os.kill(seat.pid, number)

    # Hands ───────────────────────────────────────────────────────────────────────────────────

    def fork_missing(self) -> None:
        now, foreman = time.monotonic(), os.getpid()
        for seat in self.seats:
            if seat.pid or seat.finished or self.stopped_at or now < seat.next_fork:
                continue
            seat.slot.clear()
            try:
                seat.pid = os.fork()
            except OSError as error:  # no memory, or too many processes: later perhaps
                log(f"cannot fork a hand: {error}; trying again")
                seat.next_fork = now + 5
                continue
            if seat.pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (self.wake, self.waker, self.tomb):
                    os.close(fd)
                self.queue.close()
                Hand(self.settings, seat.slot, foreman, self.tombs).main()
            seat.name, seat.born, seat.timed_out = f"{self.settings.name}/{seat.pid}", now, False

    def watch(self) -> None:
        """Kills the hands that are past their limit, and all of them when the grace is over."""
        now, grace = time.monotonic(), self.settings.grace
        if self.stopped_at and now >= self.stopped_at + grace:
            self.hurry()
        for seat in self.seats:
            since = seat.slot.words[SINCE] / 1e9
            late = since > 0 and now > since + self.settings.time_limit + grace
            seat.timed_out = seat.timed_out or late
            if seat.pid and (late or (self.hurried_at and now > self.hurried_at + HURRY)):
                os.kill(seat.pid, signal.SIGKILL)

    def reap(self) -> None:
        for seat in self.seats:
            if seat.pid:
                pid, status = os.waitpid(seat.pid, os.WNOHANG)
                if pid:
                    seat.pid = 0
                    self.bury_hand(seat, os.waitstatus_to_exitcode(status))

    def bury_hand(self, seat: Seat, code: int) -> None:
        """Finds out why a hand ended, and what has to become of what it ran."""
        words, note = seat.slot.words, seat.slot.note
        token, verdict = words[TOKEN], words[VERDICT]
        now = time.monotonic()
        peaceful = code == 0 and not token and bool(words[LOADED] or self.stopped_at)
        seat.falls = 0 if peaceful or token or now > seat.born + EARLY else seat.falls + 1
        seat.next_fork = now + (ceiling(seat.falls - 1, 0.1, 5.0) if seat.falls else 0.0)
        if seat.falls >= MOST_FALLS and not words[LOADED] and not verdict:
            verdict, note = 3, f"hands die while they load the handler {self.settings.handler()[0]}"
        if verdict == DRAINED:
            seat.finished = True
        elif verdict:
            if not self.stopped_at:
                log(note)
            self.stop(verdict)
        if peaceful and not note:  # a note: it left while Redis was away
            return
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        failure = Failure(f"WorkerDied: its process {how}", "worker_died")
        if seat.timed_out:
            limit = f"{self.settings.time_limit:g} s and {self.settings.grace:g} s of grace"
            failure = Failure(f"TimeLimitExceeded: ran longer than {limit}; killed", "timed_out")
        asked = self.stopped_at and code in (-signal.SIGTERM, -signal.SIGINT)  # the handler's reset
        if verdict or self.hurried_at or asked:  # not the message's fault: released
            token = 0
        else:
            log(f"hand {seat.name} {how}")
        self.orphans.append(Orphan(seat.name, token, failure))
        self.next_beat = 0.0

    # Redis ───────────────────────────────────────────────────────────────────────────────────

    def greet(self) -> bool:
        """Checks what Redis is and whether we may work there; False if it has to be asked again."""
        try:
            refusal, lines, uptime = inspect_server(self.queue)
        except Fault as error:
            self.failed(error)
            self.report_outage()
            return False
        if refusal:
            log(f"{refusal}; nothing claimed")
            self.stop(2)
            return False
        for line in lines:
            log(line)
        log(f"handler {self.settings.handler()[0]}")
        self.answered()
        self.report_outage()
        self.reclaim_from = time.monotonic() + max(self.settings.lease, REJOIN) - uptime
        return True

    def beat(self) -> None:
        """Renews, settles what dead hands left, takes over what has expired, notes progress."""
        now = time.monotonic()
        if now < self.next_beat:
            return
        queue, lease = self.queue, self.settings.lease
        try:
            tokens = [token for seat in self.seats if (token := seat.slot.words[TOKEN])]
            steps = [queue.renew(lease, *tokens[i : i + 100]) for i in range(0, len(tokens), 100)]
            *replies, dead = queue.do(*steps, queue.beat(self.progress()))
            for reply in (*replies, dead):
                if isinstance(reply, Exception):
                    raise reply
            if self.fault or now > self.last_beat + lease / 2:  # others, too, were away: they first
                self.reclaim_from = now + max(lease, REJOIN)
            while self.orphans:
                self.settle(self.orphans[0])
                self.orphans.pop(0)
            finished = now < self.reclaim_from or self.reclaim()
            self.forget_the_dead()
            self.watchman.warn(queue, dead)
        except Fault as error:
            self.failed(error)
        else:
            self.answered()
            self.last_beat = now
            self.next_beat = now + (min(lease / 3, PULSE) if finished else 0.0)

    def tend(self) -> None:
        if not self.faults:
            try:
                self.watchman.tend(self.queue)
            except Fault as error:
                self.failed(error)

    def answered(self) -> None:
        self.fault, self.faults, self.next_beat = "", 0, 0.0

    def failed(self, error: Exception) -> None:
        """Takes note of a fault of Redis; the next try is soon, with full jitter.

        The first in a row is a hiccup, tried again at once: an idle connection was closed, say.
        """
        self.queue.close()
        wait = draw(self.faults, RECONNECT_BASE, RECONNECT_CAP) if self.faults else 0.0
        self.next_beat = time.monotonic() + wait
        if passing(error):
            self.fault = fault_text(error) if self.faults else ""
            self.faults += 1
        else:
            if not self.stopped_at:
                log(explain(self.queue, error))
            self.stop(2)

    def settle(self, orphan: Orphan) -> None:
        """Charges the message that a dead hand ran, and releases what it had only claimed."""
        for run in self.queue.owned(orphan.owner):
            if run.token == orphan.token:
                self.charge(run, orphan.failure, orphan.owner)
            else:
                self.queue.do(self.queue.release(run.token))

    def charge(self, run: Run, failure: Failure, worker: str) -> None:
        last = settle_failure(self.queue, self.settings.policy, run, failure, worker)
        if self.queue.do(last.step) == [b"ok"]:
            last.tell(self.settings, self.tombs)

    def reclaim(self) -> bool:
        """Takes over expired runs for a fraction of a second; False if there may be more."""
        until = time.monotonic() + LOOK / 2
        while time.monotonic() < until:
            [reply] = self.queue.do(self.queue.reclaim(self.settings.name, self.settings.lease))
            run = Claim.of(reply).run
            if run is None:
                if reply[0] == b"drift" and (count := self.queue.adopt(self.settings.lease)):
                    log(f"{count} running messages had no lease: they got one")
                return True
            failure = Failure("WorkerDied: its lease ended without a renewal", "worker_died")
            self.charge(run, failure, run.owner)
        return False

    def progress(self) -> dict[str, float]:
        """Seconds since each loop of this worker last moved; a handler in its limit is moving."""
        now, loops = time.monotonic(), {f"{self.settings.name}/foreman": 0.0}
        for seat in self.seats:
            words = seat.slot.words
            age = 0.0 if words[SINCE] else now - words[PROGRESS] / 1e9
            loops[f"{self.settings.name}/hand{seat.number}"] = age
        return loops

    def forget_the_dead(self) -> None:
        """Removes the notes of workers of this machine that have died without a goodbye."""
        mine, here, dead = self.settings.name, host_name(), []
        for member in self.queue.command("ZRANGE", self.queue.names.workers, 0, 99):
            host, _, rest = member.decode("latin-1").partition(":")
            pid = rest.partition(":")[0]
            if host == here and re.fullmatch("[0-9]{1,9}", pid):
                reused = int(pid) == os.getpid() and not member.startswith(mine.encode())
                if reused or not is_running(int(pid)):
                    dead.append(member)
        if dead:
            self.queue.command("ZREM", self.queue.names.workers, *dead)

    def report_outage(self) -> None:
        """One line when Redis stops answering this worker, one when it answers again."""
        notes = [seat.slot.note for seat in self.seats if seat.pid and not seat.slot.words[VERDICT]]
        fault = next(filter(None, [self.fault, *notes]), "")
        if fault and not self.outage:
            self.outage = time.monotonic()
            what = f"Redis at {self.queue.place()} does not answer ({fault})"
            log(f"{what}; trying until it does, nothing is lost")
        elif not fault and self.outage:
            log(f"Redis answers again, after {time.monotonic() - self.outage:.1f} s")
            self.outage = 0.0

    def sign_off(self) -> None:
        """Settles what the last hands left, as far as Redis lets us, and removes our notes."""
        fault = ""
        for _ in range(0 if self.fault else 2):  # the first may be that of an old connection
            try:
                while self.orphans:
                    self.settle(self.orphans[0])
                    self.orphans.pop(0)
                self.watchman.warn(self.queue, self.queue.command("LLEN", self.queue.names.dlq))
                self.queue.command("ZREM", self.queue.names.workers, *self.progress())
                return
            except Fault as error:
                self.queue.close()
                fault = fault_text(error)
        if fault:
            log(f"leaving without Redis ({fault}): leases will end by themselves")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# ── Never forgotten ───────────────────────────────────────────────────────────────────────────

HOOK_LIMIT = 30.0  # seconds for one run of the --on-dead-letter command
HOOK_BACKLOG = 1000  # dead letters that may wait for it, and how deep they are looked for
HOOK_BYTES = 50_000_000  # what is read of them at most while looking for one


class Watchman:
    """Warns of dead letters, and runs the --on-dead-letter command: one at a time, in the foreman.

    The hands tell him the tokens of what they bury. Whatever the command does, the message is in
    the dead letter queue already, and stays there.
    """

    def __init__(self, settings: Settings) -> None:
        self.command, self.threshold = settings.on_dead_letter, settings.dlq_alert
        self.alert_at = self.threshold
        self.tokens: list[int] = []
        self.running: subprocess.Popen[bytes] | None = None
        self.kill_at = 0.0

    def note(self, tokens: bytes) -> None:
        """Takes the tokens of dead letters, 8 bytes each."""
        if self.command:
            each = range(0, len(tokens), 8)
            self.tokens += [int.from_bytes(tokens[i : i + 8], "little") for i in each]
            if (late := len(self.tokens) - HOOK_BACKLOG) > 0:
                log(f"--on-dead-letter falls behind: not run for {late} dead letters")
                del self.tokens[:late]

    def warn(self, queue: Queue, depth: int) -> None:
        """Says how many dead letters there are: at the threshold and whenever they double."""
        if depth < self.threshold:
            self.alert_at = self.threshold
        if depth < self.alert_at:
            return
        while self.alert_at <= depth:
            self.alert_at *= 2
        age, oldest = "", queue.command("LINDEX", queue.names.dlq, -1)
        with suppress(Undecodable):  # an entry made by hand
            failed = date_ms(load(oldest or b"").get("failed_at"))
            if failed is not None:
                age = f", the oldest for {span(max(0.0, queue.now_ms() - failed) / 1000)}"
        name = queue.names.waiting
        where = "" if name == "q:tasks" else f"--queue {shlex.quote(name)} "
        look = f"see python replay.py {where}--list"
        log(f"warning: dead letters in {queue.names.dlq}: {depth}{age}; {look}")

    def tend(self, queue: Queue) -> None:
        """Looks after the command: ends it when it takes too long, starts it for the next one."""
        if self.running and self.running.poll() is None and time.monotonic() < self.kill_at:
            return
        if self.running:
            if self.running.returncode is None:
                log(f"--on-dead-letter ran longer than {HOOK_LIMIT:g} s: killed")
                self.kill()
            elif self.running.returncode:
                log(f"--on-dead-letter exited with {self.running.returncode}")
            self.running = None
        if self.tokens:  # one look at a time: the foreman has leases to renew
            envelope = self.find(queue, self.tokens[0])
            self.tokens.pop(0)
            if envelope:
                self.start(envelope)

    def find(self, queue: Queue, token: int) -> bytes | None:
        """Finds the envelope of a token among the newest; None if it is not there any more."""
        start = read = 0
        while start < HOOK_BACKLOG and read < HOOK_BYTES:
            page = queue.command("LRANGE", queue.names.dlq, start, start + 9)
            for envelope in page:
                if b'"token": %d,' % token in envelope:
                    return bytes(envelope)
            start, read = start + 10, read + sum(map(len, page))
            if not page:
                break
        return None

    def start(self, envelope: bytes) -> None:
        try:
            with tempfile.TemporaryFile() as file:  # a pipe could make us wait for the reader
                file.write(envelope + b"\n")
                file.seek(0)
                self.running = subprocess.Popen(
                    str(self.command), shell=True, stdin=file, start_new_session=True
                )
            self.kill_at = time.monotonic() + HOOK_LIMIT
        except OSError as error:
            log(f"--on-dead-letter cannot be run: {describe(error)}")

    def kill(self) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()

    def hurry(self) -> None:
        self.tokens.clear()
        self.kill()

    def eager(self) -> bool:
        return bool(self.tokens) and not self.running

    def busy(self) -> bool:
        return bool(self.running or self.tokens)


def span(seconds: float) -> str:
    """A duration for people: 45 s, 12 min, 3.5 h, 2.0 d."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds // 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


# ── The command ───────────────────────────────────────────────────────────────────────────────


def inspect_server(queue: Queue) -> tuple[str, list[str], float]:
    """Looks at the server before anything is claimed: (refusal or "", lines to say, uptime in s).

    Proves every permission that the worker needs on a key of its own, so that a user who may not
    run one command is told which, and no message is left halfway.
    """
    info = {}
    try:
        for section in ("server", "memory", "persistence"):
            lines = queue.command("INFO", section).decode().splitlines()
            info.update(dict(line.split(":", 1) for line in lines if ":" in line))
    except redis.exceptions.NoPermissionError:
        pass  # some hosts forbid INFO: then we do without
    version = info.get("redis_version", "6.2")
    if [int(part) for part in version.split(".")[:2]] < [6, 2]:
        return f"Redis {version} is too old: 6.2 or newer is needed", [], 0.0
    if wrong := queue.wrong_types():
        return "; ".join(wrong), [], 0.0
    [[word, *refused]] = queue.do(Step(PROBE, ()))
    if word != b"ok":
        command, text = (part.decode(errors="replace") for part in refused)
        if passing(error := redis.ResponseError(text)):
            raise error
        return f"the Redis user may not run {command} in a script: {printable(text)}", [], 0.0
    probe = queue.names.probe
    with suppress(redis.exceptions.OutOfMemoryError):  # may run, and a full Redis has to be drained
        queue.command("BLMOVE", probe, probe, "RIGHT", "LEFT", SHORTEST)
    queue.command("HSCAN", probe, 0)
    queue.command("ZMSCORE", probe, "x")
    product = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version", info.get("redis_version", "of unknown version"))
    lines = [f"{product} {version} at {queue.place()}, queue {queue.names.waiting}"]
    policy = info.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys"):
        lines.append(f"warning: maxmemory-policy {policy} may evict the queue: set noeviction")
    if info.get("aof_enabled") == "0":
        lines.append("warning: appendonly is off: what Redis has not saved is lost if it restarts")
    return "", lines, float(info.get("uptime_in_seconds", "1e9"))


def explain(queue: Queue, error: Exception) -> str:
    """A fault that does not pass, as a sentence that says what a person can do."""
    code = getattr(error, "status_code", None)
    text = printable(f"{code} {error}" if code else str(error))
    try:
        if "WRONGTYPE" in text and (wrong := queue.wrong_types()):
            return "; ".join(wrong)
    except Fault:
        pass
    if isinstance(error, redis.AuthenticationError):
        return f"Redis refuses the login: {text}: check user and password in REDIS_URL"
    if isinstance(error, redis.exceptions.NoPermissionError):
        user = getattr(queue.connection, "username", None) or "default"
        text += f" (user {user}, keys {queue.names.waiting}*)"
    return f"Redis refuses: {text}: repair that, then start again"


def seconds(text: str, least: float = 0.0) -> float:
    number = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e-?[0-9]+)?", text)
    value = float(text) if number else -1.0
    if not least <= value <= 1e9 or value == 0:
        bound = f"from {least:g} up" if least else "above 0"
        raise ValueError(f"a number of seconds {bound} is needed, such as 30 or 2.5")
    return value


def count(text: str, most: int = 1_000_000) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or not 1 <= int(text) <= most:
        raise ValueError(f"a whole number from 1 to {most} is needed")
    return int(text)


def key_name(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("the name of a key is needed, such as q:tasks")
    return text


def redis_url(text: str) -> str:
    try:
        Queue(text)
    except Exception:  # its text may hold the password
        raise ValueError(
            "a Redis URL is needed: redis://[user:password@]host:port/db, with special characters "
            "of the password percent-encoded"
        ) from None
    return text


def function_name(text: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", text):
        raise ValueError("module:function is needed, such as myapp.tasks:process")
    return text


def class_names(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) for name in names):
        raise ValueError("class names are needed, such as KeyError,myapp.NoSuchUser")
    return frozenset(names)


def command_line(text: str) -> str:
    if not text.strip():
        raise ValueError("a shell command is needed")
    return text


def option(default: str | None, parse: Callable[[str], Any], metavar: str, help: str) -> Any:
    """A field of Settings that `--its-name` sets, or else the variable QR_ITS_NAME."""
    return field(metadata={"default": default, "parse": parse, "metavar": metavar, "help": help})


@dataclass(frozen=True)
class Settings:
    """What the command line and the environment say. Times in seconds."""

    redis: str = option(
        "redis://127.0.0.1:6379/0", redis_url, "URL",
        "the server; better given as REDIS_URL: others can read a command line")
    queue: str = option("q:tasks", key_name, "KEY", "the list that producers push to")
    process: str | None = option(
        None, function_name, "MODULE:FUNCTION",
        "the handler; if not given: process(msg) of taskproc.py, the one in /opt/app if that "
        "exists, else the one beside this file")
    concurrency: int = option(
        "1", partial(count, most=1000), "N", "messages run at a time, each in its own process")
    lease: float = option(
        "30", partial(seconds, least=1), "SECONDS",
        "after this long without a renewal, others take over a run")
    time_limit: float = option(
        "600", seconds, "SECONDS",
        "a handler that runs longer is interrupted, and killed a grace later")
    grace: float = option(
        "25", seconds, "SECONDS", "what running handlers get to finish in at a stop")
    max_attempts: int = option("5", count, "N", "failed runs after which a message is dead")
    base: float = option(
        "1", seconds, "SECONDS", "the most that the first retry waits; doubles each time")
    cap: float = option("30", seconds, "SECONDS", "the most that any retry waits by the schedule")
    retry_after_cap: float = option(
        "900", seconds, "SECONDS", "the most of a Retry-After that is obeyed")
    permanent: frozenset[str] | None = option(
        None, class_names, "NAME[,NAME]", "exceptions that no retry can cure")
    dlq_alert: int = option(
        "1", count, "N", "dead letters at which the log warns, and again whenever they double")
    on_dead_letter: str | None = option(
        None, command_line, "COMMAND",
        "a shell command, run for each dead letter with the envelope on its stdin")
    burst: bool = False
    qr_dir: Path = Path()  # absolute, like app_dir: a handler may change the working directory
    app_dir: Path = Path()
    name: str = ""  # this worker: host:pid:nonce

    @property
    def policy(self) -> Policy:
        permanent = self.permanent or frozenset()
        return Policy(self.max_attempts, self.base, self.cap, self.retry_after_cap, permanent)

    def handler(self) -> tuple[str, Path, str, str]:
        """Where the handler is: (for people, folder for the import path, module, function)."""
        if self.process:
            module, _, function = self.process.partition(":")
            return self.process, Path.cwd(), module, function
        here = Path(__file__).resolve().parent
        folder = self.app_dir if (self.app_dir / "taskproc.py").exists() else here
        return f"{folder / 'taskproc.py'}:process", folder, "taskproc", "process"


EPILOG = """\
examples:
  python worker.py                             work on q:tasks until stopped
  python worker.py --burst                     drain it, retries included, then exit
  python worker.py --concurrency 4 --lease 60  four at a time
  python worker.py --process myapp.jobs:handle --permanent NoSuchUser

variables: QR_A_B does what --a-b does, unless that is given too; REDIS_URL is for --redis.
QR_DIR (/root/qr): where requeue.out gets a line per retry, if that folder exists.
QR_APP_DIR (/opt/app): where taskproc.py is looked for first.

signals: SIGTERM, SIGINT, SIGHUP: finish the running messages, then exit; a second one: now.
exit codes: 0 stopped or drained; 1 a bug; 2 a setting or Redis needs a person; 3 the handler
cannot be loaded."""


FOLDERS = (("qr_dir", "QR_DIR", "/root/qr"), ("app_dir", "QR_APP_DIR", "/opt/app"))


def read_settings(argv: list[str] | None = None) -> Settings:
    """Parses arguments and environment; exits with code 2 and a message that names the culprit."""
    parser = argparse.ArgumentParser(
        prog="worker.py",
        usage="worker.py [option ...]",
        description="Runs every message of a Redis list through process(msg), tries failures again "
        "after exponential backoff with full jitter, and parks what cannot succeed in the dead "
        "letter queue.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options = {f.name: f.metadata for f in fields(Settings) if f.metadata}
    for name, data in options.items():
        default = f" (default {data['default']})" if data["default"] else ""
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, metavar=data["metavar"], help=data["help"] + default)
    parser.add_argument("--burst", action="store_true", help="exit when nothing is left to run")
    values = vars(parser.parse_args(argv))
    for name, data in options.items():
        variable = "REDIS_URL" if name == "redis" else "QR_" + name.upper()
        source, text = "--" + name.replace("_", "-"), values[name]
        if text is None and variable in os.environ:
            source, text = variable, os.environ[variable]
        try:
            text = data["default"] if text is None else text
            values[name] = None if text is None else data["parse"](text)
        except ValueError as error:
            shown = "" if name == "redis" else f" {printable(repr(text), 60)}"
            parser.error(f"{source}{shown}: {error}")
    for name, variable, usual in FOLDERS:
        if not (folder := os.environ.get(variable, usual)):
            parser.error(f"{variable} is empty: the path of a folder is needed, or unset it")
        values[name] = Path(folder).absolute()
    return Settings(**values, name=f"{host_name()}:{os.getpid()}:{secrets.token_hex(2)}")


def host_name() -> str:
    """This machine, as the names of its workers begin."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    fill_standard_files()
    return Foreman(read_settings(argv)).run()


if __name__ == "__main__":
    os._exit(main())  # Python's own way out is slow, and a signal that comes then kills it
