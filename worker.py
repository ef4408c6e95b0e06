"""A worker that runs every message of a Redis list through `process(msg)` and loses none.

The life of a message; the place is the state:

              LPUSH                claim                     done
 producer ───────────▶ waiting ───────────▶ running ─────────────────────▶ (gone, counted)
                          ▲                   │  │
                          │  due              │  └─ spent, permanent or undecodable ─▶ dead
                          └──── retrying ◀────┘                                         │
                          ▲        retry: failed; fall: nobody will settle it           │
                          └──────────────────────── replay (by hand) ◀──────────────────┘

  waiting    q:tasks           list    message text; producers push left, workers take right
             q:tasks:next      list    the same, doorbell rung: owned by nobody, taken first
  running    q:tasks:running   hash    fencing token → message text
             q:tasks:leases    zset    "token owner" → lease deadline (ms)
  retrying   q:tasks:retry     zset    token:message text → due time (ms)
             q:tasks:notes     hash    token → a line for each run that nobody settled
  dead       q:tasks:dlq       list    envelope; newest left, oldest right
  done       q:tasks:stats     hash    counters
             q:tasks:fence     string  the last fencing token
             q:tasks:workers   zset    loop of a worker → last progress (ms); health only
             q:tasks:arrivals  zset    a date (ms) → how many messages had come in by then
             q:tasks:pause     string  while it is there, nothing is claimed

The promise: from the moment Redis has accepted the LPUSH, a message is in exactly one of
waiting, running, retrying and dead, whoever is killed and when. It runs at least once; it is not
promised that it runs only once, nor in which order failed messages run again.

Where each rule lives:

  nothing is lost                  every script of the QUEUE: check, then add, then remove
  a late worker is refused         "stale" in DONE and HELD; RENEW's refusals
  whose turn it is                 CLAIM: the lowest bit of the token decides, retry or fresh
  the producer's bytes are sacred  Message.parse, Splice; in Redis: splice() in HELD
  the wait before a retry          conclude → Policy.wait → backoff.draw
  dead after five                  conclude: attempts >= policy.max_attempts
  the dead letter is written       envelope, BURY; where nobody can read it: BURY_UNREAD
  a run that nobody settled        FALL leaves a note; Hand.attempt reads it before the message
  whose fault a fault is           whose; Hand.insist and Foreman.failed act on it
  a lease is renewed               Foreman.renew; a run taken over is interrupted: Foreman.lost
  the time limit                   Hand.on_alarm (soft), Foreman.watch (hard)
  SIGTERM                          Foreman.stop, Foreman.hurry; Hand.on_stop

The exercise's steps: 1, the while loop: Hand.work. 2, back with its count: conclude
(`attempts + 1`), RETRY, announce. 3, 4, 5: backoff.py. 6, after five failures: conclude
(`max_attempts`), BURY. 7, the envelope: envelope. 8: replay.py, revive, REPLAY.

Signals: SIGTERM, SIGINT, SIGQUIT, SIGHUP: finish the running messages, then exit 0; a second one:
now. SIGUSR1, SIGUSR2, SIGALRM: ignored. Exit codes: 0 stopped or drained, 1 a bug, 2 a setting or
Redis needs a person, 3 the handler cannot be loaded.
"""

from __future__ import annotations

if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import argparse
import gc
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
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from backoff import Policy, ceiling, describe, draw, printable, trace

try:
    import redis

    CLIENT = tuple(int(part) for part in re.findall(r"\d+", redis.__version__)[:3])
    if CLIENT < (4, 3, 4):
        raise ImportError(f"redis-py 4.3.4 or newer is needed, this is {redis.__version__}")
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    sys.stderr.write(
        f"worker: {sys.executable}: {error}. Get it: pip install -U redis, in a virtual "
        "environment where the system's Python refuses that (python3 -m venv .venv)\n"
    )
    sys.exit(2)

try:  # without the wrappers that make enums of what they return: 20 µs a message
    from _signal import getsignal, pthread_sigmask  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    from signal import getsignal, pthread_sigmask

if TYPE_CHECKING:
    import asyncio

VERSION = "2.0"

# ══ TEXT ══════════════════════════════════════════════════════════════════════════════════════
# The producer's bytes are sacred: parsing is for reading, the text is what travels. Ours is three
# members, spliced onto the end of the object and cut out again, never re-encoded with the rest.

HISTORY = 50  # failed runs remembered with a message, the newest
COUNT = 2**53 - 1  # the most that a count may be: what every JSON reader can hold
COUNTS = ("released", "replays", "earlier_attempts")
KEPT = ("stage", "history", *COUNTS)  # what `_retry` may hold
DECODER = json.JSONDecoder()
QUOTE = json.JSONEncoder(ensure_ascii=False).encode
BLANK, BARE = re.compile(r"[ \t\n\r]*"), re.compile(r"[\w.:/-]+")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6})?(Z|[+-]\d\d:\d\d)")


class Undecodable(ValueError):
    """The message is not the UTF-8 text of a JSON object."""


def load(raw: bytes) -> dict[str, Any]:
    """Parses a message. Raises Undecodable (or MemoryError), whatever the bytes are."""
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
    return (
        isinstance(value, dict)
        and value.keys() <= set(KEPT)
        and isinstance(history := value.get("history", []), list)
        and all(isinstance(entry, dict) for entry in history)
        and all(is_count(value.get(name, 0)) for name in COUNTS)
    )


RESERVED = {"attempts": is_count, "first_seen_at": is_date, "_retry": is_kept}
END = 2**53  # as the `head` of a splice: all of every text
LARGE = 100_000  # bytes; what is smaller is never refused for its size


class Splice(NamedTuple):
    """A new text made of an old one: before + its head + middle + its tail + after, in bytes.

    Redis has the old text already; so a settlement sends this, and the script joins it. `head` and
    `tail` are how many bytes stay at both ends. What is between them is ours, whatever it is by
    then: so a splice may be repeated, and need not know of the last checkpoint.
    """

    before: bytes = b""
    head: int = 0
    middle: bytes = b""
    tail: int = 0
    after: bytes = b""

    def of(self, old: bytes) -> bytes:
        """The new text, joined here: what Redis makes of it, byte for byte."""
        tail = old[-self.tail :] if self.tail else b""
        return b"".join([self.before, old[: self.head], self.middle, tail, self.after])


@dataclass(frozen=True)
class Message:
    """A message taken apart: the producer's own text is raw[:head] + raw[tail:], ours between.

    `attempts` counts failed runs, `first_seen_at` is ISO 8601, `kept` holds `history` (a list of
    {at, error, wait, of}), `stage`, `released` (runs that a stop broke off), `replays` and
    `earlier_attempts` (failed runs before the last replay), each only if there is any. `kind` is
    the producer's, for people to read. `strewn`: our names stood among the producer's, so `raw`
    is the text without them, and not what Redis has.
    """

    raw: bytes
    head: int
    tail: int
    kind: object
    ours: dict[str, Any]
    strewn: bool = False

    @classmethod
    def parse(cls, raw: bytes, body: dict[str, Any] | None = None) -> Message:
        """Finds our members in the text; `body` is what `load` made of it. Raises Undecodable.

        A reserved name whose value is not of our type is the producer's: it stays in the text. So
        does a valid one in a large text that would have to be sent whole without it: ours, behind
        it, wins in every parser.
        """
        body = load(raw) if body is None else body
        end, kind = raw.rindex(b"}"), body.get("kind")
        ours = {name: body[name] for name, is_ours in RESERVED.items() if is_ours(body.get(name))}
        if not ours:
            return cls(raw, end, end, kind, ours)
        mine = json.dumps(ours)[1:-1].encode()
        start = end - len(mine)
        if raw.endswith(mine, 0, end):  # written by us: at the end of the object, in one piece
            if raw[start - 2 : start] == b", ":
                return cls(raw, start - 2, end, kind, ours)
            if is_first(raw, start):
                return cls(raw, start, end, kind, ours)
        if len(raw) > LARGE:
            return cls(raw, end, end, kind, ours)
        own = without_ours(raw.decode()).encode()
        end = own.rindex(b"}")
        return cls(own, end, end, kind, ours, strewn=True)

    @property
    def attempts(self) -> int:
        return int(self.ours.get("attempts", 0))

    @property
    def first_seen_at(self) -> str | None:
        return self.ours.get("first_seen_at")

    @property
    def kept(self) -> dict[str, Any]:
        return dict(self.ours.get("_retry", {}))

    @property
    def own(self) -> bytes:
        """The producer's own text."""
        return self.raw[: self.head] + self.raw[self.tail :]

    def noted(self, attempts: int, first_seen_at: str | None, kept: dict[str, Any]) -> Splice:
        """The text with these facts at the end of the object."""
        facts: dict[str, Any] = {"attempts": attempts}
        if first_seen_at is not None:
            facts["first_seen_at"] = first_seen_at
        if kept:
            facts["_retry"] = kept
        comma = "" if is_first(self.raw, self.head) else ", "
        return self.spliced(b"", f"{comma}{json.dumps(facts)[1:-1]}".encode(), b"")

    def spliced(self, before: bytes, middle: bytes, after: bytes) -> Splice:
        """The producer's text with something around and in it, by range where Redis has it."""
        if self.strewn:
            return Splice(before + self.raw[: self.head] + middle + self.raw[self.tail :] + after)
        return Splice(before, self.head, middle, len(self.raw) - self.tail, after)


def is_first(raw: bytes, at: int) -> bool:
    """Tells whether a member that begins here is the first of its object."""
    while raw[at - 1] in b" \t\r\n":
        at -= 1
    return raw[at - 1] in b"{"


def without_ours(text: str) -> str:
    """The text of an object without the members that are ours, wherever they stand in it."""
    head, found, tail = members(text)
    spans = [
        span for name, value, _, span in found if name not in RESERVED or not RESERVED[name](value)
    ]
    rest = ",".join(spans)
    first = found[0][3]
    if not (spans and spans[0] is first):  # cut from the front: the white space there stays
        rest = first[: len(first) - len(first.lstrip())] + rest.lstrip()
    return head + rest + tail


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def is_strict(raw: bytes) -> bool:
    """Tells whether a text that `load` accepts is strict JSON that no reader chokes on.

    NaN is none, and what nests very deeply may be too much for the reader of an envelope. Most
    texts are seen to be neither without being parsed once more.
    """
    if raw.count(b"[") + raw.count(b"{") < 500 and not (b"NaN" in raw or b"Infinity" in raw):
        return True
    try:
        json.loads(b"[" * 32 + raw + b"]" * 32, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def quoted(raw: bytes) -> bytes:
    """The bytes as a JSON string, from which `surrogateescape` makes the same bytes again."""
    return json.dumps(raw.decode(errors="surrogateescape")).encode()


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
    attempts = facts["attempts"] if is_count(facts.get("attempts")) else 0
    kept["replays"] = min(kept.get("replays", 0) + 1, COUNT)
    kept["earlier_attempts"] = min(kept.get("earlier_attempts", 0) + attempts, COUNT)
    seen = facts.get("first_seen_at")
    if isinstance(seen, str) and is_date(f"{seen}Z"):  # made by hand, without an offset: UTC
        seen = f"{seen}Z"
    return message.noted(0, seen if is_date(seen) else message.first_seen_at, kept).of(message.raw)


def iso(ms: float) -> str:
    """Milliseconds since 1970 as ISO 8601 with offset: 2026-11-30T12:00:00.123+00:00."""
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")


def brief(value: object) -> str | None:
    """A value for a line: short and printable, and nothing that nests."""
    if value is None:
        return None
    return "{…}" if isinstance(value, (dict, list)) else printable(str(value), 40)


def word(value: object) -> str:
    """A value as one word of a log line: bare if it is simple, else quoted."""
    if value is None:
        return "-"
    text = printable(str(value), 40)
    return text if BARE.fullmatch(text) else QUOTE(text)


# ══ QUEUE ═════════════════════════════════════════════════════════════════════════════════════
# One transition is one script is one method of Queue. Rules: check, then add, then remove (Redis
# does not roll back: a refused write must leave a duplicate, never a hole); the token is the
# identity, never the text; the server's clock is the only clock; Lua never reads or builds JSON;
# what the producer wrote never travels back; a counter never decides a fate (pcall).
#
# Redis asks for free memory only before the first write of a script, and a removal needs none. So
# a script that adds begins with a removal that removes nothing: a full Redis can still drain.

KEYS = {  # role: what follows the queue's name, and the type
    "waiting": ("", "list"), "next": (":next", "list"), "running": (":running", "hash"),
    "leases": (":leases", "zset"), "retry": (":retry", "zset"), "notes": (":notes", "hash"),
    "dlq": (":dlq", "list"), "stats": (":stats", "hash"), "fence": (":fence", "string"),
    "workers": (":workers", "zset"), "arrivals": (":arrivals", "zset"),
    "pause": (":pause", "string"), "probe": (":probe", "none"),
}  # fmt: skip


class Names:
    """The keys of one queue, by role: `names.waiting` is "q:tasks", `names.dlq` "q:tasks:dlq".

    Every key derives from the queue's name, here and nowhere else. A name in braces, `{q:tasks}`,
    puts them all in one slot of a Redis Cluster.
    """

    def __init__(self, queue: str = "q:tasks") -> None:
        vars(self).update({role: queue + suffix for role, (suffix, _) in KEYS.items()})

    if TYPE_CHECKING:

        def __getattr__(self, role: str) -> str: ...


class Script:
    """A Lua script, its short name, and the roles of its KEYS in order; it knows them by these."""

    def __init__(self, name: str, keys: str, source: str) -> None:
        self.name, self.roles = name, keys.split()
        self.seal(f"local {', '.join(self.roles)} = unpack(KEYS){source}".encode())

    def seal(self, source: bytes) -> None:
        self.source, self.sha = source, hashlib.sha1(source).hexdigest().encode()


@lru_cache
def both(first: Script, second: Script) -> Script:
    """One script that does two: one call where there were two. ARGV: how many are the first's, …"""
    script = Script(f"{first.name}+{second.name}", " ".join([*first.roles, *second.roles]), "")
    script.seal(b"""
local function one(KEYS, ARGV) %b end
local function two(KEYS, ARGV) %b end
local count, args, rest = tonumber(ARGV[1]), {}, {}
for i = 2, count + 1 do args[i - 1] = ARGV[i] end
for i = count + 2, #ARGV do rest[i - count - 1] = ARGV[i] end
return {one({unpack(KEYS, 1, %d)}, args), two({unpack(KEYS, %d)}, rest)}
""" % (first.source, second.source, len(first.roles), len(first.roles) + 1))
    return script


# What scripts have in common. CLOCK: the server's clock, in ms.
CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)"""

# HELD: the check, and the removal, of what the holder of a run does to it (ARGV: token, owner, …).
# `splice(i)` is the new text: before, head (bytes), middle, tail (bytes), after, at ARGV[i].
HELD = """
local text = redis.call('HGET', running, ARGV[1])
if not text then return 'stale' end
redis.call('ZREM', leases, '')
local function splice(i)
  local head = string.sub(text, 1, ARGV[i + 1])
  local tail = ARGV[i + 3] ~= '0' and string.sub(text, -ARGV[i + 3]) or ''
  return ARGV[i] .. head .. ARGV[i + 2] .. tail .. ARGV[i + 4]
end
local function settle(counter)
  redis.call('HDEL', running, ARGV[1])
  redis.call('ZREM', leases, ARGV[1] .. ' ' .. ARGV[2])
  redis.call('HDEL', notes, ARGV[1])
  redis.pcall('HINCRBY', stats, counter, 1)
  return 'ok'
end"""

# claim: the oldest waiting message, or a due retry by way of the front of the line → running,
# under the next token and a lease. Tokens are even and odd in turn; at an even one a due retry
# goes first, so fresh messages and retries both get every second claim while there are both.
#   KEYS  running leases retry notes waiting next fence pause
#   ARGV  owner, lease (ms)
#   →     paused (until the key is gone)
#         run, now (ms), token, text, notes ("": none; if there are any, the text is left out: who
#             reads it must have told its foreman first)
#         idle, ms until the next retry is due or -1, messages running or retrying
# A token is the server's time in microseconds, or follows the last one if that is greater: it
# rises even if the fence key is lost or garbage, or Redis comes back with older data.
CLAIM = Script("claim", "running leases retry notes waiting next fence pause", CLOCK + """
if redis.call('EXISTS', pause) == 1 then return {'paused'} end
redis.call('ZREM', leases, '')
local last = tonumber(redis.call('GET', fence)) or 0
last = last < 9e15 and math.floor(math.max(last, 0)) or 0
local number = math.max(last + 1, time[1] * 1000000 + time[2])
local token = string.format('%.0f', number + (number - last + 1) % 2)
local first_due = {'ZRANGEBYSCORE', retry, '-inf', now, 'LIMIT', 0, 1}
local due, from, note = token % 2 == 0 and redis.call(unpack(first_due))[1], waiting, ''
local text = not due and redis.call('LINDEX', next, -1)
if text then from = next elseif not due then text = redis.call('LINDEX', waiting, -1) end
due = due or not text and redis.call(unpack(first_due))[1]
if due then
  local old, rest = string.match(due, '^(%d+):(.*)$')
  note, text = redis.call('HGET', notes, old or '') or '', rest or due
  if note ~= '' then redis.call('HSET', notes, token, note) end
  redis.call('RPUSH', waiting, text)
  redis.call('ZREM', retry, due)
  if note ~= '' then redis.call('HDEL', notes, old or '') end
elseif not text then
  local first = redis.call('ZRANGE', retry, 0, 0, 'WITHSCORES')[2]
  local wait = first and math.min(first - now, 1e15) or -1
  return {'idle', wait, redis.call('HLEN', running) + redis.call('ZCARD', retry)}
end
redis.call('SET', fence, token)
redis.call('ZADD', leases, now + ARGV[2], token .. ' ' .. ARGV[1])
redis.call('HSET', running, token, text)
redis.call('LTRIM', from, 0, -2)
return {'run', now, token, note == '' and text or '', note}
""")  # fmt: skip

# done: running → gone; follow-up messages → waiting.
#   KEYS  running leases notes waiting stats
#   ARGV  token, owner, follow-up texts …
#   →     ok | stale (the token is not running any more: settled or taken over)
DONE = Script("done", "running leases notes waiting stats", """
if #ARGV > 2 then
  if redis.call('HEXISTS', running, ARGV[1]) == 0 then return 'stale' end
  redis.call('ZREM', leases, '')
  for i = 3, #ARGV do redis.call('LPUSH', waiting, ARGV[i]) end
end
if redis.call('HDEL', running, ARGV[1]) == 0 then return 'stale' end
redis.call('ZREM', leases, ARGV[1] .. ' ' .. ARGV[2])
redis.call('HDEL', notes, ARGV[1])
redis.pcall('HINCRBY', stats, 'done', 1)
return 'ok'
""")  # fmt: skip

# retry: running → retrying, the text spliced.
#   KEYS  running leases notes retry stats
#   ARGV  token, owner, wait (ms), splice …
#   →     ok | stale
# The member carries the token in front: a sorted set keeps one of fifty equal texts.
RETRY = Script("retry", "running leases notes retry stats", CLOCK + HELD + """
redis.call('ZADD', retry, now + ARGV[3], ARGV[1] .. ':' .. splice(4))
return settle('retried')
""")  # fmt: skip

# bury: running → dead, the envelope spliced from the text.
#   KEYS  running leases notes dlq stats
#   ARGV  token, owner, splice …
#   →     ok | stale
BURY = Script("bury", "running leases notes dlq stats", HELD + """
redis.call('LPUSH', dlq, splice(3))
return settle('dead')
""")  # fmt: skip

# bury_unread: running → dead, the last resort: no hand needs to read the text, or to send it. The
# payload is the JSON string from which Python's surrogateescape makes the exact bytes again.
#   KEYS  running leases notes dlq stats
#   ARGV  token, owner, before, after
#   →     ok | stale
BURY_UNREAD = Script("bury_unread", "running leases notes dlq stats", HELD + r"""
local escapes = {['"'] = '\\"', ['\\'] = '\\\\'}
for byte = 0, 31 do escapes[string.char(byte)] = string.format('\\u%04x', byte) end
for byte = 128, 255 do escapes[string.char(byte)] = string.format('\\udc%02x', byte) end
local payload = string.gsub(text, '[%z\1-\31"\\\128-\255]', escapes)
redis.call('LPUSH', dlq, ARGV[3] .. '"' .. payload .. '"' .. ARGV[4])
return settle('dead')
""")  # fmt: skip

# fall: running → retrying, due now or at the front of the line, with a note for who claims it next.
#   KEYS  running leases notes retry stats
#   ARGV  note: its reason and what happened; wait (ms) or "front"; leases ("token owner") …
#         no leases: those whose deadline has passed, at most 100 and not much more than 1 MB
#   →     the leases of the runs that fell
FALL = Script("fall", "running leases notes retry stats", CLOCK + """
redis.call('ZREM', leases, '')
local due = ARGV[2] == 'front' and 0 or now + ARGV[2]
local these, fallen, bytes = {unpack(ARGV, 3)}, {}, 0
if not ARGV[3] then these = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 100) end
for _, lease in ipairs(these) do
  if bytes > 1e6 then break end
  local token, owner = string.match(lease, '^(.*) (.*)$')
  local text = redis.call('HGET', running, token or '')
  if token and text then
    local before = redis.call('HGET', notes, token) or ''
    redis.call('HSET', notes, token, before .. now .. ' ' .. owner .. ' ' .. ARGV[1] .. '\\n')
    redis.call('ZADD', retry, due, token .. ':' .. text)
    redis.call('HDEL', running, token)
    fallen[#fallen + 1], bytes = lease, bytes + #text
  end
  redis.call('ZREM', leases, lease)
end
local counter = string.match(ARGV[1], '^released') or 'fallen'
if fallen[1] then redis.pcall('HINCRBY', stats, counter, #fallen) end
return fallen
""")  # fmt: skip

# renew: new deadlines for those runs that still are some.
#   KEYS  running leases
#   ARGV  lease (ms), leases ("token owner") … (at most 100)
#   →     the leases refused
# The owner "-" is nobody, for what somebody found without a lease: its real owner takes it back.
RENEW = Script("renew", "running leases", CLOCK + """
redis.call('ZREM', leases, '')
local refused = {}
for i = 2, #ARGV do
  local token = string.match(ARGV[i], '^(.*) ')
  if token and redis.call('HEXISTS', running, token) == 1 then
    redis.call('ZREM', leases, token .. ' -')
    redis.call('ZADD', leases, now + ARGV[1], ARGV[i])
  else
    refused[#refused + 1] = ARGV[i]
  end
end
return refused
""")  # fmt: skip

# checkpoint: a running message's text is spliced and its lease renewed.
#   KEYS  running leases
#   ARGV  token, owner, lease (ms), splice …
#   →     ok | stale
CHECKPOINT = Script("checkpoint", "running leases", CLOCK + HELD + """
redis.call('ZADD', leases, now + ARGV[3], ARGV[1] .. ' ' .. ARGV[2])
redis.call('HSET', running, ARGV[1], splice(4))
return 'ok'
""")  # fmt: skip

# replay: dead → waiting, for exactly this envelope.
#   KEYS  dlq waiting stats
#   ARGV  envelope, new text, the end to look from: 1 newest, -1 oldest,
#         place when last seen: 1 the oldest, 2 the next …, 0 unknown; others can only lower it
#   →     ok | gone (the envelope is not there any more)
REPLAY = Script("replay", "dlq waiting stats", """
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

# LINE: how many messages have come in (`total`), and how many of these no longer wait (`left`):
# what came in is in one of the places, or was counted when it ended. If there are fewer than at the
# last sample, messages or counters were lost, and no sample says anything: then `last` is false.
# (Such a loss is not seen if as many messages have come in by the next beat.)
LINE = """
local left = redis.call('HLEN', running) + redis.call('ZCARD', retry)
for _, counter in ipairs({'done', 'dead'}) do
  left = left + (tonumber(redis.pcall('HGET', stats, counter)) or 0)
end
local total = left + redis.call('LLEN', waiting) + redis.call('LLEN', next)
local last = redis.call('ZRANGE', arrivals, -1, -1, 'WITHSCORES')
last = last[1] and tonumber(last[2]) <= total and last"""

# beat: not a transition. Notes when each loop of a worker last made progress, and drops those of
# workers that have been silent for a day. And takes a sample of how many messages have come in: as
# long as fewer have left the line, its head has been there since then. Samples lie a 200th of
# their span apart, so a year of them is less than 4,000.
#   KEYS  workers running leases dlq pause stats retry waiting next arrivals
#   ARGV  age (ms), loop, age, loop …
#   →     now (ms), messages running, leases, dead letters, paused (0 or 1)
BEAT = Script(
    "beat", "workers running leases dlq pause stats retry waiting next arrivals", CLOCK + """
redis.call('ZREM', workers, '')""" + LINE + """
if not last then redis.call('DEL', arrivals) end
redis.call('ZREMRANGEBYSCORE', arrivals, '-inf', left)
local first = redis.call('ZRANGE', arrivals, 0, 0)[1] or now
if not last or total > tonumber(last[2]) and now - last[1] >= (now - first) / 200 then
  redis.call('ZADD', arrivals, total, now)
end
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - 86400000)
for i = 1, #ARGV, 2 do redis.call('ZADD', workers, now - ARGV[i], ARGV[i + 1]) end
redis.call('ZREMRANGEBYRANK', workers, 0, -10001)
return {now, redis.call('HLEN', running), redis.call('ZCARD', leases), redis.call('LLEN', dlq),
  redis.call('EXISTS', pause)}
""")  # fmt: skip

# Whose fault is it? One table; `Hand.insist` and `Foreman.failed` act on it.
#
#   it passes           refused, reset, timed out, and these answers: wait with full jitter, go on
#   a person            every other answer, and what cannot be mended by waiting: exit code 2
#   this message alone  Redis answers others, but refuses, or twice cuts the connection on, a large
#                       step: TooLarge. Its run is settled in a form that fits (Settlement.small)

PASSES = re.compile(  # the code of an answer, or the name of redis-py's class for it
    r"\b(LOADING|READONLY|MASTERDOWN|NOREPLICAS|MISCONF|OOM|BUSY|UNBLOCKED|CLUSTERDOWN|TRYAGAIN"
    r"|BusyLoadingError|ReadOnlyError|MasterDownError|OutOfMemoryError|ClusterDownError"
    r"|TryAgainError|max number of clients|Redis is busy)\b"
)
PERSON = re.compile(r"AuthenticationError|AuthorizationError|CERTIFICATE|WRONG_VERSION_NUMBER")
Fault = redis.RedisError  # an OSError of ours, a file or a process, is no fault of Redis


def whose(error: Exception) -> str:
    """Whose fault it is: "passes", "lost" (the connection; that passes, too) or "person"."""
    text = f"{type(error).__name__} {error}"
    if PERSON.search(text):  # redis-py counts a wrong password as a lost connection
        return "person"
    if PASSES.search(text) or isinstance(error, redis.TimeoutError):
        return "passes"
    return "lost" if isinstance(error, redis.ConnectionError) else "person"


def passing(error: Exception) -> bool:
    """Tells whether a Redis fault ends by itself; if not, a person has to repair something."""
    return whose(error) != "person"


def fault_text(error: Exception) -> str:
    return printable(str(error)).rstrip(".") or type(error).__name__


class Step(NamedTuple):
    """A transition ready to be sent: a script and its ARGV."""

    script: Script
    args: tuple[bytes | str | int, ...]

    @property
    def size(self) -> int:
        return sum(len(arg) for arg in self.args if isinstance(arg, bytes))


class Note(NamedTuple):
    """What became of a run that nobody settled; `reason` is "released", or that of a failed run."""

    at_ms: int
    owner: str
    reason: str
    error: str

    @classmethod
    def read(cls, lines: bytes) -> tuple[Note, ...]:
        """Reads the lines that FALL wrote; skips what it cannot have written."""
        found = []
        for line in lines.decode(errors="replace").split("\n"):
            at, owner, reason, error = [*line.split(" ", 3), "", "", ""][:4]
            if re.fullmatch("[0-9]{1,15}", at) and reason:
                found.append(cls(int(at), owner, reason, error))
        return tuple(found)


class Run(NamedTuple):
    """A message being run. `start_ms` is the server's clock when we got it, `since` ours.

    `here`: its text has come along, in `raw`.
    """

    token: int
    owner: str
    raw: bytes = b""
    here: bool = True
    notes: tuple[Note, ...] = ()
    start_ms: int = 0
    since: float = 0.0

    @property
    def lease(self) -> str:
        return f"{self.token} {self.owner}"

    @property
    def released(self) -> int:
        """How often a stop has broken off this message since it was last settled."""
        return sum(note.reason == "released" for note in self.notes)

    def now_ms(self) -> float:
        """The server's clock now, carried on by our monotonic one: no wall clock of ours."""
        return self.start_ms + (time.monotonic() - self.since) * 1000


class Claim(NamedTuple):
    """What a claim brought: a run, or how long to wait (ms, -1: no retry is due) and for what."""

    run: Run | None = None
    wait_ms: int = -1
    left: int = 1  # messages running or retrying
    paused: bool = False

    @classmethod
    def of(cls, reply: list[Any], owner: str) -> Claim:
        """Reads the reply of a claim."""
        if reply[0] == b"paused":
            return cls(paused=True)
        if reply[0] == b"idle":
            return cls(None, int(reply[1]), int(reply[2]))
        _, now, token, raw, notes = reply
        since, known = time.monotonic(), Note.read(notes) if notes else ()
        return cls(Run(int(token), owner, raw, notes == b"", known, int(now), since))


class Pulse(NamedTuple):
    """What a beat brought."""

    now_ms: int
    running: int
    leases: int
    dead: int
    paused: int


BLOCK = 5.0  # seconds an idle hand sleeps in Redis at most
PAUSE = 1.0  # seconds between two looks whether a pause is over
SHORTEST = 0.01  # and at least: Redis 6.2 takes one millisecond for none, and none for eternity
SLOWEST = 100_000  # bytes a second; what is sent gets the time that it needs at this speed
NEEDED = (  # every command of the scripts and of Queue's own; * is a key that nothing else uses
    "TIME", "DEL *", "LPUSH * x", "RPUSH * x", "LLEN *", "LINDEX * -1", "LPOS * x", "LREM * 1 x",
    "LTRIM * 1 0", "DEL *", "HSET * x 0", "HGET * x", "HEXISTS * x", "HLEN *", "HINCRBY * x 1",
    "HKEYS *", "HSTRLEN * x", "HDEL * x", "DEL *", "ZADD * 0 x", "ZRANGE * 0 0", "ZSCAN * 0",
    "ZRANGEBYSCORE * 0 0", "ZCARD *", "ZREMRANGEBYSCORE * 1 1", "ZREMRANGEBYRANK * 1 1", "ZREM * x",
    "DEL *", "SET * 0 XX", "GET *", "EXISTS *", "DEL *", f"BRPOPLPUSH * * {SHORTEST}",
)  # fmt: skip


class Queue:
    """A queue in Redis: builds the steps, sends them, waits at the doorbell.

    A method named after a transition returns a `Step`; `do` sends steps, several in one round
    trip. Times are seconds here and milliseconds inside Redis. Every method that talks to Redis
    raises what redis-py raises; see `passing`. One connection, no pool, no resending by the
    client: redis-py's own retries pop twice what they meant to pop once. What may be repeated is
    decided here, because the token makes it safe.

        queue = Queue("redis://127.0.0.1:6379/0")
        [reply] = queue.do(queue.claim("me", lease=30))
    """

    def __init__(self, url: str, name: str = "q:tasks", timeout: float = BLOCK + 3) -> None:
        """Does not connect yet. `timeout` must exceed every wait. ValueError if `url` is none."""
        parse: Any = redis.connection.parse_url
        settings: dict[str, Any] = parse(url)
        kind = settings.pop("connection_class", redis.Connection)
        settings.pop("max_connections", None)  # a pool's, and this is one connection
        settings |= {  # whatever the URL says
            "decode_responses": False,
            "socket_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if CLIENT < (5,):  # it knows one protocol, and no name for it
            del settings["protocol"]
        if "path" not in settings:  # not a unix socket
            settings |= {"socket_keepalive": True, "socket_connect_timeout": min(timeout, 5.0)}
        self.names, self.timeout = Names(name), timeout
        connection: Any = kind(**settings)
        connection.driver_info = connection.lib_name = connection.lib_version = None  # no SETINFO
        self.connection = connection
        self.socket: tuple[int, int] | None = None
        self.prefixes: dict[Script, bytes] = {}
        self.lock = threading.RLock()  # a handler's threads may make checkpoints

    # What is sent ────────────────────────────────────────────────────────────────────────────

    def claim(self, owner: str, lease: float) -> Step:
        return Step(CLAIM, (owner, ms(lease)))

    def done(self, run: Run, *messages: bytes) -> Step:
        return Step(DONE, (run.token, run.owner, *messages))

    def retry(self, run: Run, wait: float, text: Splice) -> Step:
        return Step(RETRY, (run.token, run.owner, ms(wait), *text))

    def bury(self, run: Run, envelope: Splice) -> Step:
        return Step(BURY, (run.token, run.owner, *envelope))

    def bury_unread(self, run: Run, before: bytes, after: bytes) -> Step:
        return Step(BURY_UNREAD, (run.token, run.owner, before, after))

    def fall(self, reason: str, error: str, *leases: str, wait: float | None = 0.0) -> Step:
        """The runs with these leases; with none, those whose deadline has passed by then.

        `wait` None means the front of the line, before all that is due.
        """
        note = f"{reason} {printable(error)}".rstrip()
        return Step(FALL, (note, "front" if wait is None else ms(wait), *leases))

    def renew(self, lease: float, *leases: str | bytes) -> Step:
        return Step(RENEW, (ms(lease), *leases))

    def checkpoint(self, run: Run, lease: float, text: Splice) -> Step:
        return Step(CHECKPOINT, (run.token, run.owner, ms(lease), *text))

    def replay(self, envelope: bytes, text: bytes, end: int = -1, place: int = 0) -> Step:
        return Step(REPLAY, (envelope, text, end, place))

    def beat(self, progress: dict[str, float]) -> Step:
        """`progress`: loop name → seconds since it last made progress. Replies with a Pulse."""
        return Step(BEAT, tuple(x for name, age in progress.items() for x in (ms(age), name)))

    def both(self, first: Step, second: Step) -> Step:
        """Two steps in one: if the first fails, the second is not done. Replies with a list."""
        count = len(first.args)
        return Step(both(first.script, second.script), (count, *first.args, *second.args))

    # How ─────────────────────────────────────────────────────────────────────────────────────

    def do(self, *steps: Step) -> list[Any]:
        """Sends the steps in one round trip and returns their replies, in order.

        A step that Redis answers with an error has the exception as its reply if it is not the
        only one; alone, it is raised. A step whose script Redis has forgotten is sent again, whole:
        that one alone, the others have happened.
        """
        replies = self.exchange([self.pack(step) for step in steps]) if steps else []
        lost = [i for i, x in enumerate(replies) if isinstance(x, redis.exceptions.NoScriptError)]
        if lost:
            again = self.exchange([self.pack(steps[i], whole=True) for i in lost])
            for i, reply in zip(lost, again, strict=True):
                replies[i] = reply
        if len(replies) == 1 and isinstance(replies[0], Exception):
            raise replies[0]
        return replies

    def exchange(self, packed: list[bytes]) -> list[Any]:
        """Sends packed commands and reads as many replies."""
        data, at = b"".join(packed), self.connection
        with self.lock:
            try:
                if at._sock is None:
                    self.connect()
                if len(data) > LARGE:
                    at._sock.settimeout(self.timeout + len(data) / SLOWEST)
                at.send_packed_command([data])
                if len(data) > LARGE:
                    at._sock.settimeout(self.timeout)
                return [self.reply() for _ in packed]
            except BaseException:  # a signal's, too: a reply left unread would pass for the next
                self.close()
                raise

    def connect(self) -> None:
        self.connection.connect()
        self.socket = identity(self.connection._sock.fileno())

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
        [reply] = self.exchange([plain(*args)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def try_everything(self) -> None:
        """Runs each command that we need, to no effect: raises what is refused, by its name.

        A full Redis refuses some, and has to be drained; what else passes stops the script, too.
        """
        calls = [[{"*": self.names.probe}.get(x, x) for x in call.split()] for call in NEEDED]
        for reply in self.exchange([plain(*call) for call in calls]):
            if isinstance(reply, Exception) and not passing(reply):
                raise reply
        self.do(self.renew(1.0))  # a script that writes

    def ring(self, seconds: float) -> bool:
        """Sleeps in Redis until a message comes, `seconds` at most; True if one came.

        The server moves the message to `next` and wakes this client alone. If the client dies now,
        nothing is lost: the next claim, by anyone, takes it from there. (BRPOPLPUSH is what BLMOVE
        RIGHT LEFT does, and Redis 6.0 has it, too.)
        """
        seconds = max(SHORTEST, min(seconds, BLOCK))
        reply = self.command("BRPOPLPUSH", self.names.waiting, self.names.next, seconds)
        return reply is not None

    def held(self, owner: str) -> list[int]:
        """The tokens that this owner has leases for: how a lost claim is found; no text is read."""
        cursor, found = b"0", []
        while True:
            page = ("ZSCAN", self.names.leases, cursor, "MATCH", f"* {owner}", "COUNT", 1000)
            cursor, flat = self.command(*page)
            tokens = [lease.partition(b" ")[0] for lease in flat[::2]]
            found += [int(token) for token in tokens if token.isdigit()]
            if cursor == b"0":
                return sorted(set(found))

    def text(self, token: int) -> bytes | None:
        """The text of a running message; None if it is not running any more."""
        text: bytes | None = self.command("HGET", self.names.running, token)
        return text

    def size(self, token: int) -> int:
        """The size of that text in bytes; 0 if it is not running any more."""
        return int(self.command("HSTRLEN", self.names.running, token))

    def adopt(self, lease: float) -> int:
        """Gives a lease to what is running without one (deleted, evicted); returns how many.

        The tokens are read before the leases: what is claimed in between has a lease by then.
        """
        tokens = self.command("HKEYS", self.names.running)
        leases = self.command("ZRANGE", self.names.leases, 0, -1)
        leased = {lease.rpartition(b" ")[0] for lease in leases}
        bare = [token + b" -" for token in tokens if token not in leased]
        for i in range(0, len(bare), 100):
            self.do(self.renew(lease, *bare[i : i + 100]))
        return len(bare)

    def now_ms(self) -> int:
        seconds, micros = self.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def wrong_types(self) -> list[str]:
        """A sentence for each of our keys that holds something else than it must."""
        wrong = []
        for role, (_, wanted) in KEYS.items():
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
        """Closes the connection; not the descriptor, if somebody else has that number by now."""
        if not self.is_ours():
            self.connection._sock.detach()
        self.socket = None
        self.connection.disconnect()

    def is_ours(self) -> bool:
        """Tells whether our socket's descriptor still is that; a handler may have closed it."""
        at = self.connection._sock
        return at is None or self.socket is None or identity(at.fileno()) == self.socket


def identity(fd: int) -> tuple[int, int] | None:
    """What a descriptor stands for, as (device, inode); None if it is closed."""
    try:
        facts = os.fstat(fd)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def ms(seconds: float) -> int:
    return round(seconds * 1000)


def plain(*args: bytes | str | int | float) -> bytes:
    """A command as it is sent."""
    return b"*%d\r\n%b" % (len(args), b"".join(map(bulk, args)))


def bulk(arg: bytes | str | int | float) -> bytes:
    data = arg if isinstance(arg, bytes) else str(arg).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


# ══ FATE ══════════════════════════════════════════════════════════════════════════════════════
# From what happened in a run to the step that settles it, its size, and a line for people.


class Failure(NamedTuple):
    """A failed run. `reason` is what the envelope says if the message is dead now."""

    error: str
    reason: str = "exhausted"
    fatal: bool = False  # no run can help: dead at once, attempts as they are
    not_before: float = 0.0  # seconds
    at_ms: float = 0.0
    owner: str = ""  # who ran it
    traceback: str = ""


class Settlement(NamedTuple):
    """How a run ends: the step for Redis, and then a line for people.

    `small` makes another one, for where the step is refused for its size.
    """

    run: Run
    step: Step
    facts: dict[str, Any] | None = None
    small: Callable[[], Settlement] | None = None

    def tell(self, settings: Settings) -> None:
        """Says what happened, after it has."""
        if self.facts and self.step.script is RETRY:
            announce(self.facts, settings.qr_dir)
        elif self.facts:
            log("dead", **self.facts)


def conclude(
    queue: Queue, policy: Policy, run: Run, message: Message | None, failures: list[Failure]
) -> Settlement:
    """Charges failed runs to a message, and decides between retry and bury.

    One failure is the rule; several are runs that nobody had settled. Notes of runs that a stop
    broke off go into the message's count of them. Without `message` (it is no JSON object, or
    kills who reads it) it is dead.
    """
    last = failures[-1]
    attempts = message.attempts if message else 0
    for failure in failures:
        if not failure.fatal:
            attempts = attempts + 1
    dead = last.fatal or message is None or attempts >= policy.max_attempts
    waits: dict[str, float | None] = {"wait": None}
    if not dead:
        wait = round(policy.wait(attempts - 1, last.not_before), 3)
        waits = {"wait": wait, "of": ceiling(attempts - 1, policy.base, policy.cap)}
    seen = (message.first_seen_at if message else None) or iso(first_ms(run))
    kept = remember(message.kept if message else {}, failures, run.released, waits)
    facts: dict[str, Any] = {"attempts": attempts}
    facts["kind"] = brief(message.kind if message else None)
    dead_facts = facts | {"reason": last.reason, "token": run.token, "error": last.error}
    small = partial(unread, queue, run, last, attempts, seen, kept, dead_facts)
    if message and not dead:
        facts |= waits | {"token": run.token, "error": last.error}
        step = queue.retry(run, wait, message.noted(attempts, seen, kept))
        return Settlement(run, step, facts, small)
    own = message.own if message else run.raw
    before, after = envelope(run, last, attempts, seen, kept)
    if message and is_strict(own):
        step = queue.bury(run, message.spliced(before, b"", after))
    elif run.here and len(own) <= LARGE:
        step = queue.bury(run, Splice(before + quoted(own) + after))
    else:
        return small()
    return Settlement(run, step, dead_facts, small)


def unread(
    queue: Queue, run: Run, last: Failure, attempts: int, seen: str, kept: dict[str, Any],
    facts: dict[str, Any],
) -> Settlement:  # fmt: skip
    """A message is buried without anything of it being sent: Redis makes a string of its bytes."""
    kept = {name: fact for name, fact in kept.items() if name != "stage"}  # that may be large
    step = queue.bury_unread(run, *envelope(run, last, attempts, seen, kept))
    return Settlement(run, step, facts)


def unsettled(run: Run) -> list[Failure]:
    """The failed runs that the notes speak of."""
    return [
        Failure(note.error, note.reason, at_ms=note.at_ms, owner=note.owner)
        for note in run.notes
        if note.reason != "released"
    ]


def first_ms(run: Run) -> int:
    """When the message was first seen, if it does not say so itself: now, or at its first note."""
    return min([run.start_ms, *(note.at_ms for note in run.notes)])


def remember(
    kept: dict[str, Any], failures: list[Failure], released: int, last: dict[str, float | None]
) -> dict[str, Any]:
    """What is kept with a message, and these failures after it; `last`: how long the last waits."""
    entries = [{"at": iso(x.at_ms), "error": x.error, "wait": 0.0} for x in failures]
    entries[-1] |= last
    kept = kept | {"history": [*kept.get("history", []), *entries][-HISTORY:]}
    if released:
        kept["released"] = min(kept.get("released", 0) + released, COUNT)
    return kept


def envelope(
    run: Run, last: Failure, attempts: int, seen: str, kept: dict[str, Any]
) -> tuple[bytes, bytes]:
    """What stands before and after the payload in a dead letter."""
    facts = {
        "error": last.error,
        "attempts": attempts,
        "first_seen_at": seen,
        "reason": last.reason,
        "failed_at": iso(last.at_ms),
        "worker": last.owner or run.owner,
        "token": run.token,
    }
    if last.traceback:
        facts["traceback"] = last.traceback
    facts |= {name: kept[name] for name in KEPT if name in kept}
    try:
        text = json.dumps(facts, allow_nan=False)
    except (ValueError, RecursionError):  # a history or stage that somebody else has made up
        text = json.dumps({name: fact for name, fact in facts.items() if name not in KEPT})
    return b'{"payload": ', f", {text[1:]}".encode()


# Lines for people ───────────────────────────────────────────────────────────────────────────
# State first, then the line: a full disk, a closed pipe, a reader that has stopped cost a line,
# never a retry. So nothing here raises or blocks. And nothing goes to a descriptor that is not
# the one we were started with: a handler may close it and get its number for a file of its own.

REQUEUE_OUT_BYTES = 10_000_000  # requeue.out grows to this and no further
STREAMS: dict[int, tuple[int, int] | None] = {}  # what 1 and 2 stood for at the start
OUT: dict[int, int] = {}  # where lines for 1 and 2 are written, so that nobody waits for a reader
LOG = {"json": False}  # --log
SHOWN: dict[str, Callable[[Any], str]] = {
    "kind": word, "wait": "{:.3f}".format, "of": "{:g}".format, "error": QUOTE,
}  # fmt: skip


def keep_streams() -> None:
    """Remembers what 1 and 2 are; and opens pipes and terminals once more, so as not to wait there.

    (To set O_NONBLOCK on what we inherited would set it for our parent, too.)
    """
    for fd in (1, 2):
        STREAMS[fd], OUT[fd] = identity(fd), fd
        if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_NOCTTY
            with suppress(OSError):
                OUT[fd] = os.open(f"/proc/self/fd/{fd}", flags)


def emit(fd: int, line: str) -> None:
    if STREAMS and not STREAMS[fd] == identity(fd) == identity(OUT[fd]):
        return
    fd = OUT.get(fd, fd)
    with suppress(OSError, ValueError):
        ready = select.poll()
        ready.register(fd, select.POLLOUT)
        if ready.poll(0):
            os.write(fd, line.encode(errors="backslashreplace") + b"\n")


def log(what: str, **facts: Any) -> None:
    """A line for the log: a sentence, or an event and its facts."""
    emit(2, as_json(what, facts) if LOG["json"] else f"worker: {what} {as_text(facts)}".rstrip())


def announce(facts: dict[str, Any], folder: Path) -> None:
    """Prints the line of a re-queue and appends it to requeue.out, if `folder` exists.

    If stdout is that very file, it is written once.
    """
    line = as_text(facts)
    emit(1, as_json("retry", facts) if LOG["json"] else line)
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        fd = os.open(os.path.join(folder, "requeue.out"), flags, 0o644)
        try:
            if os.fstat(fd).st_size < REQUEUE_OUT_BYTES and identity(fd) != identity(1):
                os.write(fd, line.encode(errors="backslashreplace") + b"\n")
        finally:
            os.close(fd)


def as_text(facts: dict[str, Any]) -> str:
    return " ".join([f"{name}={SHOWN.get(name, str)(fact)}" for name, fact in facts.items()])


def as_json(what: str, facts: dict[str, Any]) -> str:
    return json.dumps({"at": iso(time.time() * 1000), "event": what, **facts}, default=str)


def fill_standard_files() -> None:
    """Opens /dev/null where 0, 1 or 2 is closed: else our next file gets the number, and lines."""
    for fd in (0, 1, 2):
        if identity(fd) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)


# ══ HAND ══════════════════════════════════════════════════════════════════════════════════════
# The process that runs the handler: claim, process, settle, over and over. It is the one place
# where a message is read, and it may die of it: what it holds is then in Redis, and its foreman
# knows the token.

# What a hand and its foreman tell each other, in a small shared memory: words of 8 bytes.
#             writer     what
TOKEN = 0  #  hand       the run it holds, 0: none; before it reads the message
SINCE = 1  #  hand       when the handler began, or the way out (ns, monotonic); 0: neither
PROGRESS = 2  # hand     the last sign of life (ns, monotonic)
ASKING = 3  # hand       since when it has been waiting for the answer to a claim (ns); 0: it is not
RELEASED = 4  # hand     how often a stop has broken off what it holds
LOADED = 5  # hand       LOADED_OTHER or LOADED_EXAMPLE once the handler is there; 0 before
VERDICT = 6  # hand      why it leaves: an exit code, DRAINED or REPLACE; 0: it does not
ORDER = 7  #  foreman    FINISH what you run, or NOW: interrupt it and release it
LOST = 8  #   foreman    the token of a run that has been taken over
LENGTH = 9  # hand       bytes of the note that follows: why Redis does not answer, why it left
WORDS = 10

FINISH, NOW = 1, 2
DRAINED, REPLACE = -1, -2
LOADED_OTHER, LOADED_EXAMPLE = 1, 2


class Slot:
    """One hand's piece of the shared memory: the words above, and a note."""

    SIZE = 1024

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self.bytes = memoryview(memory)[index * self.SIZE : (index + 1) * self.SIZE]
        self.words = self.bytes[: WORDS * 8].cast("q")

    def clear(self) -> None:
        self.bytes[:] = bytes(self.SIZE)
        self.words[PROGRESS] = time.monotonic_ns()

    @property
    def note(self) -> str:
        start = WORDS * 8
        return bytes(self.bytes[start : start + self.words[LENGTH]]).decode(errors="replace")

    @note.setter
    def note(self, text: str) -> None:
        start, data = WORDS * 8, text.encode(errors="replace")[: self.SIZE - WORDS * 8]
        self.words[LENGTH] = 0
        self.bytes[start : start + len(data)] = data
        self.words[LENGTH] = len(data)


IDLE, HELD, HANDLER = "idle", "held", "handler"  # where a signal may raise in a hand
RECONNECT_BASE, RECONNECT_CAP = 0.05, 2.0  # seconds, full jitter
RELEASE_CAP = 300.0  # seconds that a message waits at most which a stop breaks off again and again
TICK = 1.0  # how often a hand looks for its foreman itself, where the kernel may not tell it
KILL = int(signal.SIGKILL)
T = TypeVar("T")

class TimeLimitExceeded(TimeoutError):
    """The handler ran past --time-limit; raised inside it."""


class LeaseLost(Exception):
    """The run has been taken over: what it does to the queue has no effect any more."""


class Stop(BaseException):
    """The hand has been told to stop; raised in waits, and in the handler when grace is over."""


class Repair(Exception):
    """Redis answers, but a person has to repair something."""


class TooLarge(Exception):
    """Redis answers others, but refuses what this message is, or what we send about it."""


class Running:
    """What a handler may do with its run, if it asks: `def process(msg, run)`.

    `token` is the fencing token: it only rises, so a store that remembers the highest it has seen
    can refuse a late writer. `attempts` is the number of failed runs before this one, `stage` what
    the last checkpoint said.
    """

    def __init__(self, hand: Hand, run: Run, message: Message) -> None:
        self.hand, self.run, self.message = hand, run, message
        self.token, self.attempts = run.token, message.attempts
        self.stage: Any = message.kept.get("stage")
        self.follow_ups: list[bytes] = []

    def push(self, message: dict[str, Any]) -> None:
        """Queues a follow-up message, in the same atomic step that makes this run done."""
        if not isinstance(message, dict):
            raise TypeError(f"a message is a dict, this is {type(message).__name__}")
        self.check()
        self.follow_ups.append(json.dumps(message).encode())

    def checkpoint(self, stage: Any) -> None:
        """Writes down how far the run got (any JSON value); a later run finds it in `stage`.

        Raises LeaseLost if the run has been taken over or has ended, ValueError or TypeError if
        `stage` is not JSON, TooLarge if Redis does not take it.
        """
        with self.hand.queue.lock:
            self.write(stage)

    def write(self, stage: Any) -> None:
        hand, run, message = self.hand, self.run, self.message
        json.dumps(stage, allow_nan=False)
        self.check()
        kept, seen = message.kept | {"stage": stage}, message.first_seen_at or iso(first_ms(run))
        text = message.noted(message.attempts, seen, kept)
        step = hand.queue.checkpoint(run, hand.settings.lease, text)
        if hand.insist(partial(hand.queue.do, step), size=step.size) == [b"stale"]:
            raise LeaseLost(f"run {run.token} has been taken over")
        self.message, self.stage = Message.parse(text.of(message.raw)), stage

    def check(self) -> None:
        """A thread or a child process that outlives its run must not speak for the next one."""
        if self.hand.running is not self or self.hand.pid != os.getpid():
            raise LeaseLost(f"run {self.token} has ended, or this is another process")


class Hand:
    """One hand. `work` is the exercise's while loop."""

    def __init__(self, settings: Settings, slot: Slot, foreman: int) -> None:
        self.settings, self.slot, self.foreman = settings, slot, foreman
        self.policy = settings.policy
        self.pid = os.getpid()
        self.libc: Any = None
        can_change_user = sys.platform != "linux" or os.geteuid() == 0
        self.tick = TICK if can_change_user else 0.0
        self.name = f"{settings.name}/{self.pid}"
        self.queue = Queue(settings.redis, settings.queue)
        self.leaving = False
        self.guard: str | None = None
        self.deadline = 0.0
        self.running: Running | None = None
        self.interruption: BaseException | None = None  # what a signal has raised in the handler
        self.loop: asyncio.AbstractEventLoop | None = None
        self.task: asyncio.Task[Any] | None = None
        self.left_over = set[str]()  # names of tasks that have been spoken of
        self.signals = {
            signal.SIGTERM: self.on_stop,
            signal.SIGINT: self.on_stop,
            signal.SIGQUIT: self.on_stop,
            signal.SIGALRM: self.on_alarm,
        }

    def main(self) -> int:
        """Runs until told to stop, and cleans up as Python does at its end; the exit code."""
        status = 0
        try:
            self.settle_in()
            self.load_handler()
            self.work()
        except Stop:
            pass
        except Repair as error:
            self.verdict(2, str(error))
        except BaseException:  # a bug of ours, or no memory; status 1 tells the foreman
            sys.excepthook(*sys.exc_info())
            status = 1
        if status or self.slot.words[TOKEN]:
            os._exit(status)
        self.slot.words[SINCE] = time.monotonic_ns()
        for number in self.signals:
            signal.signal(number, signal.SIG_IGN)
        self.close_loop()
        return status

    def work(self) -> None:
        """The exercise's loop: claim, run, settle, until told to stop (or, with --burst, done)."""
        last: Settlement | None = None
        while last or not self.leaving:
            try:
                self.guard = HELD if last else None
                claim = self.exchange(last)
            except Stop:
                if last:
                    log(
                        f"run {last.run.token} has ended, but Redis does not answer: its result is "
                        f"lost, and the message runs again when its lease has ended"
                    )
                raise
            last = self.guard = None
            if claim.run and self.leaving:
                self.let_fall(claim.run, "released", "claimed by a worker that was stopping")
            elif claim.run:
                last = self.attempt(claim.run)
            elif self.settings.burst and claim.left == 0:
                return self.verdict(DRAINED)
            elif claim.paused:
                self.nap(PAUSE, IDLE)
            elif not self.leaving:
                self.idle(claim)

    def settle_in(self) -> None:
        """Makes a fork of the foreman a process of its own."""
        if sys.platform == "linux":
            import ctypes

            self.libc = ctypes.CDLL(None)
        if not on_terminal():  # there, breakpoint() needs the terminal's group
            os.setpgid(0, 0)
        self.mend_signals()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.register_at_fork(
            before=self.hold_signals,
            after_in_parent=self.free_signals,
            after_in_child=self.disown,
        )

    def verdict(self, code: int, note: str = "") -> None:
        self.slot.note = note
        self.slot.words[VERDICT] = code

    # Claim and settle ────────────────────────────────────────────────────────────────────────

    def exchange(self, last: Settlement | None) -> Claim:
        """Settles the last run, if any, and claims the next, if not leaving: one round trip.

        After a fault that hides what happened, one thing at a time: the settlement is repeated
        until Redis answers (the handler is not run again for that), and a claim whose reply was
        lost is found under our name.
        """
        if os.getppid() != self.foreman:  # orphaned, and the kernel did not see to it
            os._exit(1)
        queue, answer, reply = self.queue, None, None
        claim = queue.claim(self.name, self.settings.lease)
        if not self.leaving:
            self.slot.words[ASKING] = time.monotonic_ns()
        try:
            if last and not self.leaving:
                [[answer, reply]] = queue.do(queue.both(last.step, claim))
            elif last:
                [answer] = queue.do(last.step)
            elif not self.leaving:
                [reply] = queue.do(claim)
        except Fault as error:
            if last is None:
                return self.insist(self.find_or_claim, error)
            self.settle(last, error)
            return self.insist(self.find_or_claim)
        if last:
            self.settled(last, answer)
        return self.took(Claim.of(reply, self.name)) if reply else Claim()

    def took(self, claim: Claim) -> Claim:
        """Tells the foreman what was claimed: before anybody reads it."""
        words = self.slot.words
        if claim.run:
            words[RELEASED], words[TOKEN] = claim.run.released, claim.run.token
        words[ASKING], words[PROGRESS] = 0, time.monotonic_ns()
        return claim

    def settled(self, last: Settlement, answer: bytes | None) -> None:
        """Says what became of a run."""
        self.slot.words[TOKEN] = 0
        if answer == b"ok":
            last.tell(self.settings)
        else:
            self.refused(last.run, "its result is refused")

    def settle(self, last: Settlement, error: Exception) -> None:
        """Settles a run after a fault, in the form that fits if Redis does not take the large one.

        `stale` is what success looks like when the reply was lost.
        """
        try:
            self.insist(partial(self.queue.do, last.step), error, True, last.step.size)
        except TooLarge:
            if last.small is None:
                raise
            last = last.small()
            self.insist(partial(self.queue.do, last.step), held=True)
        self.settled(last, b"ok")

    def refused(self, run: Run, what: str) -> None:
        log(f"run {run.token} had been taken over after its lease: {what}")
        with suppress(Fault):
            self.queue.command("HINCRBY", self.queue.names.stats, "refused", 1)

    def answers(self) -> bool:
        """Tells whether Redis answers others after it did not take what we sent."""
        self.queue.close()
        try:
            return bool(self.queue.command("PING"))
        except Fault:
            return False

    def find_or_claim(self) -> Claim:
        """A run of ours whose claim was never answered, found again at no cost; or a new one.

        Its text is fetched once the foreman knows its token.
        """
        queue, lease = self.queue, self.settings.lease
        for token in queue.held(self.name):
            run = Run(token, self.name, here=False)
            if queue.do(queue.renew(lease, run.lease)) == [[]]:
                notes = Note.read(queue.command("HGET", queue.names.notes, token) or b"")
                now, since = queue.now_ms(), time.monotonic()
                return self.took(Claim(run._replace(notes=notes, start_ms=now, since=since)))
        if self.leaving:
            return Claim()
        [reply] = queue.do(queue.claim(self.name, lease))
        return self.took(Claim.of(reply, self.name))

    def let_fall(self, run: Run, reason: str, error: str) -> None:
        """Gives a run back: the next hand that claims it reads the note."""
        wait = release_wait(run.released) if reason == "released" else 0.0
        step = self.queue.fall(reason, error, run.lease, wait=wait)
        self.insist(partial(self.queue.do, step), held=True)
        self.slot.words[TOKEN] = 0
        log(reason, token=run.token, error=error)

    def insist(
        self,
        action: Callable[[], T],
        error: Exception | None = None,
        held: bool = False,
        size: int = 0,
    ) -> T:
        """Repeats an action until Redis answers, with full jitter between the tries.

        `error` is the fault that led here, if any. `held`: something is being held, so only the
        end of grace interrupts. `size`: bytes that it sends. Raises Repair for a fault that does
        not pass, TooLarge if it is this message's alone, Stop when told to.
        """
        tries = refusals = 0
        while True:
            if error is not None:
                if size > LARGE and whose(error) != "passes" and self.answers():
                    refusals += 1
                    if refusals > 1 or not passing(error):  # one cut may be anybody's
                        raise TooLarge(f"Redis refuses {size} bytes: {fault_text(error)}")
                elif not passing(error):
                    raise Repair(explain(self.queue, error))
                self.queue.close()
                if tries:  # the first is a hiccup
                    self.slot.note = fault_text(error)
                    self.nap(draw(tries, RECONNECT_BASE, RECONNECT_CAP), HELD if held else IDLE)
                tries += 1
            try:
                result = action()
            except Fault as fault:
                if self.guard == HANDLER and self.interruption:  # taken for a socket's timeout
                    raise self.interruption from None
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
            time.sleep(draw(0, min(wait, 1.0)))  # a full Redis refuses to ring, but not a claim
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

    def attempt(self, run: Run) -> Settlement | None:
        """Runs the handler and decides how the run ends; None if there is nothing to settle.

        A claimed message that has notes is charged the failed runs that they speak of, and not run.
        Its text may be what killed those who left them: it is fetched only now, when the foreman
        knows the token, and not at all when it has killed too many.
        """
        queue, policy, words = self.queue, self.policy, self.slot.words
        failures = unsettled(run)
        if len(failures) >= max(policy.max_attempts, 2):  # the first may have been of its run
            return conclude(queue, policy, run, None, failures)
        if not run.here:
            size = self.insist(partial(queue.size, run.token), held=True)
            try:
                text = self.insist(partial(queue.text, run.token), held=True, size=size)
            except TooLarge as error:
                why = f"TooLarge: {error}"
                failures = [Failure(why, "permanent", fatal=True, at_ms=run.now_ms())]
                return conclude(queue, policy, run, None, failures)
            if text is None:  # taken over meanwhile
                words[TOKEN] = 0
                return None
            run = run._replace(raw=text, here=True)
        try:
            body = load(run.raw)
            message = Message.parse(run.raw, body)
        except Undecodable as error:
            why = printable(f"Undecodable: {error}")
            failures = [Failure(why, "undecodable", fatal=True, at_ms=run.now_ms())]
            return conclude(queue, policy, run, None, failures)
        except MemoryError:
            self.let_fall(run, "worker_died", "MemoryError: the message is too large for a hand")
            return None
        if failures:
            return conclude(queue, policy, run, message, failures)
        running = self.running = Running(self, run, message)
        words[SINCE] = time.monotonic_ns()
        failure = self.call(body, running)
        if os.getpid() != self.pid:  # the handler forked, and this is the child coming back
            os._exit(0)
        words[SINCE], self.running = 0, None
        self.mend_signals()
        self.mend_descriptors()
        if isinstance(self.interruption, LeaseLost):
            words[TOKEN] = 0
            self.refused(run, "interrupted")
            return None
        if failure is None:
            return self.finished(run, running)
        if words[ORDER] == NOW:
            self.let_fall(run, "released", "stopped in mid-run")
            return None
        failures = [failure._replace(at_ms=run.now_ms())]
        return conclude(queue, policy, run, running.message, failures)

    def finished(self, run: Run, running: Running) -> Settlement:
        """Done, with the follow-ups; a failed run, if Redis does not take these."""
        step = self.queue.done(run, *running.follow_ups)
        if not running.follow_ups:
            return Settlement(run, step)
        why = "TooLarge: Redis does not take the follow-up messages"
        failures = [Failure(why, at_ms=run.now_ms())]
        small = partial(conclude, self.queue, self.policy, run, running.message, failures)
        return Settlement(run, step, small=small)

    def call(self, body: dict[str, Any], running: Running) -> Failure | None:
        """Calls the handler under the time limit; a Failure if it raised, whatever it raised.

        A handler that a signal of ours has interrupted has failed, whatever it made of that.
        """
        limit, tick = self.settings.time_limit, self.tick
        self.interruption = None
        try:
            try:
                self.guard, self.deadline = HANDLER, time.monotonic() + limit
                signal.setitimer(signal.ITIMER_REAL, min(limit, tick or limit), tick)
                extra = {"run": running} if self.takes_run else {}
                result = self.process(body, **extra)
                if result is not None and inspect.isawaitable(result):
                    self.finish(result)
            finally:
                self.guard = None
                signal.setitimer(signal.ITIMER_REAL, 0)
            if self.interruption:
                raise self.interruption
        except BaseException as error:
            try:
                return self.blame(error, running.message)
            except BaseException as why:  # code of the exception's own class
                return Failure(f"an exception that cannot be examined: {type(why).__name__}")
        return None

    def blame(self, error: BaseException, message: Message) -> Failure:
        """What an exception says, in text: whose code that runs has the foreman's limit."""
        last = message.attempts + 1 >= self.policy.max_attempts
        if isinstance(self.interruption, TimeLimitExceeded):
            limited = self.interruption.with_traceback(error.__traceback__)
            return Failure(describe(limited), "timed_out", traceback=trace(error))
        verdict = self.policy.verdict(error)
        if verdict.action == "give up":
            return Failure(describe(error), "permanent", fatal=True, traceback=trace(error))
        said = trace(error) if last else ""  # only a dead letter has it
        return Failure(describe(error), not_before=verdict.not_before, traceback=said)

    def finish(self, result: Awaitable[Any]) -> None:
        """Runs an awaitable on this hand's one event loop, to its end.

        What the handler left running stays: it may be meant. It is named once in the log.
        """
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)

        async def outcome() -> Any:
            return await result

        self.task = self.loop.create_task(outcome())
        try:
            while not self.task.done():
                try:
                    self.loop.run_until_complete(self.task)
                except BaseException as error:
                    if self.task.done() or self.interruption or self.loop.is_closed():
                        raise
                    log(f"a task of an earlier run has stopped the event loop: {describe(error)}")
        finally:
            self.task.cancel()
            self.task = None
            for task in asyncio.all_tasks(self.loop):
                name = getattr(task.get_coro(), "__qualname__", "?")
                if name not in self.left_over and len(self.left_over) < 100:
                    self.left_over.add(name)
                    log(f"the handler has left a task running: {printable(name)}; it goes on "
                        "while the next message runs, and is cancelled when this hand ends")

    def close_loop(self) -> None:
        """Ends the event loop as `asyncio.run` does; the foreman bounds how long that takes."""
        if self.loop is None:
            return
        import asyncio

        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with suppress(BaseException):
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def load_handler(self) -> None:
        """Imports the handler, here in the hand, so that a new hand has the new code."""
        name, folder, module, function = self.settings.handler()
        try:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
            sys.path.insert(0, str(folder))
            if not (self.settings.process or (folder / "taskproc.py").exists()):
                raise FileNotFoundError("there is no taskproc.py")  # not the next best one
            self.guard = IDLE  # an import may take long, and nothing runs yet
            found: Any = importlib.import_module(module)
            self.guard = None
            example = getattr(found, "EXAMPLE", False) is True
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
        self.mend_signals()
        self.slot.words[LOADED] = LOADED_EXAMPLE if example else LOADED_OTHER

    # Signals ─────────────────────────────────────────────────────────────────────────────────

    def on_stop(self, number: int, frame: FrameType | None) -> None:
        self.leaving = True
        if self.guard == IDLE:
            raise Stop

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        """The end of grace, a run taken over, the time limit, or a dead foreman."""
        words = self.slot.words
        if os.getppid() != self.foreman:
            os._exit(1)
        if words[ORDER] == NOW:
            self.leaving = True
            if self.guard == HANDLER:
                self.interrupt(Stop("the worker is being stopped"))
            elif self.guard is not None:
                raise Stop
        elif self.guard == HANDLER and self.interruption is None:
            if words[LOST] == words[TOKEN]:
                self.interrupt(LeaseLost("this run has been taken over"))
            elif time.monotonic() >= self.deadline:
                limit = f"{self.settings.time_limit:g} s"
                self.interrupt(TimeLimitExceeded(f"ran longer than {limit}"))

    def interrupt(self, error: BaseException) -> None:
        """Raises in the handler; a coroutine that is not running at this instant is cancelled."""
        self.interruption = error
        if self.task is not None and self.loop is not None:
            from asyncio import current_task

            if current_task(self.loop) is not self.task:
                self.loop.call_soon_threadsafe(self.task.cancel)
                return
        raise error

    def mend_signals(self) -> None:
        """Sets our signal handlers, if a handler has changed them, and hears what was missed."""
        for number, ours in self.signals.items():
            if getsignal(number) != ours:
                signal.signal(number, ours)
        pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        if getsignal(signal.SIGPIPE) != signal.SIG_IGN:  # else a cut connection kills us
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self.leaving = self.leaving or self.slot.words[ORDER] != 0
        self.bind()

    def bind(self) -> None:
        """Makes the kernel kill this process when its foreman dies, even inside C code (Linux).

        Again after each run: the kernel forgets it when a process changes its user or group.
        """
        if self.libc:
            self.libc.prctl(1, KILL)  # PR_SET_PDEATHSIG
        if os.getppid() != self.foreman:
            os._exit(1)

    def mend_descriptors(self) -> None:
        """After a handler that closed all files: settle on a new connection, then be replaced."""
        if not self.queue.is_ours():
            fill_standard_files()
            self.queue.close()
            self.leaving = True
            self.verdict(REPLACE, "its handler closed files that are not its own")

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


def on_terminal() -> bool:
    return any(os.isatty(fd) for fd in (0, 1, 2))


def release_wait(before: int) -> float | None:
    """The wait (s) of a message that a stop broke off: none at first, then longer each time."""
    return ceiling(before - 1, 1.0, RELEASE_CAP) if before else None


# ══ FOREMAN ═══════════════════════════════════════════════════════════════════════════════════
# The parent does almost nothing, so it almost never fails. It touches tokens, never texts: it
# reads nothing that a producer or a handler wrote, runs nobody's commands, imports no handler.

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
    falls: int = 0  # early ends in a row of hands that were not running a message
    next_fork: float = 0.0
    finished: bool = False

    @property
    def lease(self) -> str:
        """The lease of what its hand holds; "" if it holds nothing."""
        token = self.slot.words[TOKEN]
        return f"{token} {self.name}" if token else ""

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # a hand may have changed its user
            if self.pid:
                os.kill(self.pid, number)


class Foreman:
    """The parent: forks hands, renews their leases, lets fall what nobody will settle."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.queue = Queue(settings.redis, settings.queue, timeout=ANSWER)
        memory = mmap.mmap(-1, Slot.SIZE * settings.concurrency)
        self.seats = [Seat(Slot(memory, i), i + 1) for i in range(settings.concurrency)]
        self.groups = not on_terminal()  # each hand leads a process group of its own
        self.orphans: list[tuple[str, Step | None]] = []  # dead hands, and their run's fall
        self.alert_at = settings.dlq_alert
        self.code = 0
        self.stopped_at = self.hurried_at = 0.0
        self.next_beat = self.fall_from = 0.0
        self.last_beat = time.monotonic()
        self.offset: tuple[float, float] | None = None  # server's clock less ours, in bounds
        self.fault, self.faults = "", 0  # why Redis does not answer us, and how often in a row
        self.outage = 0.0  # since when people have been told
        self.example_named = self.paused = False

    def run(self) -> int:
        """Works until told to stop, or until --burst has drained the queue; the exit code."""
        self.set_signals()
        while not self.greet():
            self.sleep()
            if self.stopped_at:
                return self.code
        gc.freeze()  # what a hand never changes stays shared with it
        while True:
            self.reap()
            self.report()
            self.fork_missing()
            if self.is_over():
                break
            self.watch()
            self.beat()
            self.sleep()
        self.sign_off()
        return self.code

    def is_over(self) -> bool:
        over = self.stopped_at or all(seat.finished for seat in self.seats)
        return bool(over) and not any(seat.pid for seat in self.seats)

    # Signals ─────────────────────────────────────────────────────────────────────────────────

    STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)  # not SIG_IGN: children inherit it

    def set_signals(self) -> None:
        self.wake, self.waker = os.pipe()
        for fd in (self.wake, self.waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        for number in (*self.STOPS, *self.IGNORED, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*self.STOPS, *self.IGNORED, signal.SIGCHLD])

    def sleep(self) -> None:
        """Sleeps until the next look or beat is due; a signal ends it."""
        seconds = max(0.0, min(LOOK, self.next_beat - time.monotonic()))
        ready = select.select([self.wake], [], [], seconds)[0]
        if ready and not set(os.read(self.wake, 4096)).isdisjoint(self.STOPS):
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

    def order(self, order: int, number: int) -> None:
        for seat in self.seats:
            seat.slot.words[ORDER] = order
            seat.signal(number)

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
                os.close(self.wake)
                os.close(self.waker)
                self.queue.close()
                sys.exit(Hand(self.settings, seat.slot, foreman).main())  # and exit hooks run
            seat.name, seat.born, seat.timed_out = f"{self.settings.name}/{seat.pid}", now, False

    def watch(self) -> None:
        """Kills the hands that are past their limit, and all of them when the grace is over."""
        now, settings = time.monotonic(), self.settings
        if self.stopped_at and now >= self.stopped_at + settings.grace:
            self.hurry()
        for seat in self.seats:
            since, token = seat.slot.words[SINCE] / 1e9, seat.slot.words[TOKEN]
            limit = settings.time_limit + settings.grace if token else settings.grace
            late = since > 0 and now > since + limit
            seat.timed_out = seat.timed_out or (late and token != 0)
            if late or (self.hurried_at and now > self.hurried_at + HURRY):
                seat.signal(signal.SIGKILL)

    def reap(self) -> None:
        """Sees to the dead hands; as PID 1, to everybody's orphans as well."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for seat in self.seats:
                if seat.pid == pid:
                    seat.pid = 0
                    self.bury_hand(seat, pid, os.waitstatus_to_exitcode(status))

    def bury_hand(self, seat: Seat, pid: int, code: int) -> None:
        """Finds out why a hand ended, and what has to become of what it held."""
        words, note = seat.slot.words, seat.slot.note
        token, verdict, now = words[TOKEN], words[VERDICT], time.monotonic()
        asked = bool(words[ORDER] or verdict)
        if code == 0 and asked and not token:
            seat.falls = 0
            if words[ASKING]:  # it left while Redis was away: a claim may have been made
                self.orphans.append((seat.name, None))
        else:
            self.mourn(seat, pid, code)
        if seat.falls >= MOST_FALLS and not words[LOADED] and not verdict:
            verdict, note = 3, f"hands die while they load the handler {self.settings.handler()[0]}"
        if verdict == DRAINED:
            seat.finished = True
        elif verdict == REPLACE:
            log(f"hand {seat.name} is replaced: {note}")
        elif verdict:
            if not self.stopped_at:
                log(note)
            self.stop(verdict)
        seat.next_fork = now + (ceiling(seat.falls - 1, 0.1, 5.0) if seat.falls else 0.0)

    def mourn(self, seat: Seat, pid: int, code: int) -> None:
        """A hand has died, or left unasked: what it had started ends, what it held falls."""
        words = seat.slot.words
        if self.groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        run = f" in run {words[TOKEN]}" if words[TOKEN] else ""
        reason, error = "worker_died", f"WorkerDied: its process {how}"
        if seat.timed_out:
            limit = f"{self.settings.time_limit:g} s and {self.settings.grace:g} s of grace"
            reason, error = "timed_out", f"TimeLimitExceeded: ran longer than {limit}; killed"
        stopped = self.stopped_at and code in (-signal.SIGTERM, -signal.SIGINT)  # it reset ours
        if words[VERDICT] or self.hurried_at or stopped:  # not the message's fault
            reason, error = "released", "stopped in mid-run"
        else:
            log(f"hand {seat.name} {how}{run}")
        early = not words[TOKEN] and time.monotonic() < seat.born + EARLY
        seat.falls = seat.falls + 1 if early else 0
        wait = release_wait(words[RELEASED]) if reason == "released" else 0.0
        fall = self.queue.fall(reason, error, seat.lease, wait=wait) if seat.lease else None
        self.orphans.append((seat.name, fall))
        self.next_beat = 0.0

    # Redis ───────────────────────────────────────────────────────────────────────────────────

    def greet(self) -> bool:
        """Checks what Redis is and whether we may work there; False if it has to be asked again."""
        try:
            refusal, lines, uptime = inspect_server(self.queue)
        except Fault as error:
            self.failed(error)
            self.report()
            return False
        if refusal:
            log(f"{refusal}; nothing claimed")
            self.stop(2)
            return False
        for line in lines:
            log(line)
        log(f"handler {self.settings.handler()[0]}")
        self.answered()
        self.report()
        self.fall_from = time.monotonic() + max(self.settings.lease, REJOIN) - uptime
        return True

    def beat(self) -> None:
        """Renews, lets fall what dead hands and dead workers left, notes progress, warns."""
        asked = time.monotonic()
        if asked < self.next_beat:
            return
        lease = self.settings.lease
        try:
            pulse = self.renew()
            now = time.monotonic()
            jumped = self.clock_jumped(pulse.now_ms / 1000, asked, now)
            if self.fault or jumped or now > self.last_beat + lease / 2:
                self.fall_from = now + max(lease, REJOIN)  # others, too, have to renew: they first
            while self.orphans:
                self.let_fall(*self.orphans[0])
                self.orphans.pop(0)
            finished = now < self.fall_from or self.let_expired_fall()
            if pulse.running != pulse.leases and (bare := self.queue.adopt(max(lease, 3 * PULSE))):
                log(f"{bare} running messages had no lease: they got one")
            self.warn(pulse.dead)
            if self.paused != bool(pulse.paused):
                self.paused = bool(pulse.paused)
                log("paused, until python replay.py --resume" if self.paused else "resumed")
        except Fault as error:
            self.failed(error)
        else:
            self.answered()
            self.last_beat = now
            self.next_beat = now + (min(lease / 3, PULSE) if finished else 0.0)

    def renew(self) -> Pulse:
        """Renews the leases of what the hands hold, and of what one waits for on a slow line."""
        queue, lease, now = self.queue, self.settings.lease, time.monotonic()
        leases = [seat.lease for seat in self.seats if seat.pid and seat.lease]
        for seat in self.seats:
            asking = seat.slot.words[ASKING] / 1e9
            if seat.pid and asking and now > asking + lease / 4:
                leases += [f"{token} {seat.name}" for token in queue.held(seat.name)]
        steps = [queue.renew(lease, *leases[i : i + 100]) for i in range(0, len(leases), 100)]
        *refusals, pulse = queue.do(*steps, queue.beat(self.progress()))
        for reply in (*refusals, pulse):
            if isinstance(reply, Exception):
                raise reply
        for refused in refusals:
            self.lost(refused)
        return Pulse(*pulse)

    def lost(self, refused: list[bytes]) -> None:
        """Interrupts the handlers whose runs have been taken over: they work in vain."""
        for seat in self.seats:
            if seat.pid and seat.lease.encode() in refused:
                seat.slot.words[LOST] = seat.slot.words[TOKEN]
                seat.signal(signal.SIGALRM)

    def clock_jumped(self, server: float, asked: float, answered: float) -> bool:
        """Tells whether the server's clock has moved against ours by a part of a lease."""
        before, self.offset = self.offset, (server - answered, server - asked)
        if before is None:
            return False
        gap = max(self.offset[0] - before[1], before[0] - self.offset[1])
        return gap > self.settings.lease / 4

    def let_fall(self, owner: str, fall: Step | None) -> None:
        """What a dead hand held falls with its note; what it had only claimed, without blame."""
        queue = self.queue
        if fall:
            queue.do(fall)
        claimed = [f"{token} {owner}" for token in queue.held(owner)]
        for i in range(0, len(claimed), 100):
            error = "claimed by a hand that died"
            queue.do(queue.fall("released", error, *claimed[i : i + 100], wait=None))

    def let_expired_fall(self) -> bool:
        """Lets expired runs of anybody fall, for a while; False if there may be more of them."""
        until = time.monotonic() + LOOK / 2
        error = "WorkerDied: its lease ended without a renewal"
        while time.monotonic() < until:
            [fallen] = self.queue.do(self.queue.fall("worker_died", error))
            if not fallen:
                return True
            first = printable(fallen[0].decode(errors="replace"))
            log(f"{len(fallen)} runs fall: leases ended without a renewal; the first: {first}")
        return False

    def progress(self) -> dict[str, float]:
        """Seconds since each loop of this worker last moved; a handler in its limit is moving."""
        now, loops = time.monotonic(), {f"{self.settings.name}/foreman": 0.0}
        for seat in self.seats:
            words = seat.slot.words
            age = 0.0 if words[SINCE] else now - words[PROGRESS] / 1e9
            loops[f"{self.settings.name}/hand{seat.number}"] = age
        return loops

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

    # What people are told ────────────────────────────────────────────────────────────────────

    def warn(self, depth: int) -> None:
        """Says how many dead letters there are: at the threshold and whenever they double."""
        if depth < self.settings.dlq_alert:
            self.alert_at = self.settings.dlq_alert
        if depth < self.alert_at:
            return
        while self.alert_at <= depth:
            self.alert_at *= 2
        name = self.queue.names.waiting
        where = "" if name == "q:tasks" else f"--queue {shlex.quote(name)} "
        look = f"see python replay.py {where}--list"
        log(f"warning: dead letters in {self.queue.names.dlq}: {depth}; {look}")

    def report(self) -> None:
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
        loaded = [seat.slot.words[LOADED] for seat in self.seats]
        if LOADED_EXAMPLE in loaded and not self.example_named:
            self.example_named = True
            log("warning: this handler is the example, it does no real work: put yours there")

    def sign_off(self) -> None:
        """Lets fall what the last hands left, as far as Redis lets us, and removes our notes."""
        fault = self.fault
        for _ in range(1 if fault else 2):  # the first may be that of an old connection
            try:
                while self.orphans:
                    self.let_fall(*self.orphans[0])
                    self.orphans.pop(0)
                self.warn(self.queue.command("LLEN", self.queue.names.dlq))
                self.queue.command("ZREM", self.queue.names.workers, *self.progress())
                return
            except Fault as error:
                self.queue.close()
                fault = fault_text(error)
        if fault:
            log(f"leaving without Redis ({fault}): leases will end by themselves")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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
    except redis.ResponseError as error:  # some hosts forbid INFO: then we do without
        if passing(error):
            raise
    version = info.get("redis_version", "6.0")
    if int(version.split(".")[0]) < 6:
        return f"Redis {version} is too old: 6.0 or newer is needed", [], 0.0
    if wrong := queue.wrong_types():
        return "; ".join(wrong), [], 0.0
    lease = queue.command("ZRANGE", queue.names.leases, 0, 0)
    if lease and lease[0].isdigit():
        old = f"{queue.names.running} is in the form of an earlier version"
        return f"{old}: let that version finish what it runs, then start this one", [], 0.0
    queue.try_everything()
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
    if "CERTIFICATE" in text or "WRONG_VERSION" in text:
        return f"Redis at {queue.place()} is not who it must be (TLS): {text}"
    if re.search(r"CROSSSLOT|MOVED|same slot|non local key", text):
        name = f"{{{queue.names.waiting}}}"
        return f"a cluster cannot hold this queue in one slot: use --queue '{name}' ({text})"
    if isinstance(error, redis.AuthenticationError):
        return f"Redis refuses the login: {text}: check user and password in REDIS_URL"
    if isinstance(error, redis.exceptions.NoPermissionError):
        user = getattr(queue.connection, "username", None) or "default"
        text += f" (user {user}, keys {queue.names.waiting}*)"
    return f"Redis refuses: {text}: repair that, then start again"


# ══ THE COMMAND ═══════════════════════════════════════════════════════════════════════════════


@dataclass(frozen=True)
class Option:
    """An option of a command: `--name`, or else a variable, QR_NAME, or else the default."""

    name: str
    metavar: str  # "": a flag
    parse: Callable[[str], Any]
    help: str
    default: str | None = None
    own_variable: str = ""
    beside: str = ""  # with what it goes, if not with everything
    alone: str | None = None  # what it means without a value; None: it needs one

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return self.own_variable or f"QR_{self.attribute.upper()}"


def add_options(group: Any, options: Iterable[Option]) -> None:
    """Lets a parser collect what was typed, as a list of texts: `values_of` says what it means."""
    for option in options:
        how: dict[str, Any] = {"action": "store_true"}
        if option.metavar:
            how = {"action": "append", "metavar": option.metavar, "default": []}
        if option.alone:
            how |= {"nargs": "?", "const": option.alone}
        default = f" (default {option.default})" if option.default else ""
        group.add_argument(f"--{option.name}", help=option.help + default, **how)


def values_of(parser: argparse.ArgumentParser, option: Option, typed: list[str]) -> list[Any]:
    """What was typed, or else is in the environment, or is the default: parsed, or exit code 2."""
    source, texts = f"--{option.name}", typed
    if not texts and option.variable in os.environ:
        source, texts = option.variable, [os.environ[option.variable]]
    if not texts and option.default is not None:
        texts = [option.default]
    values = []
    for text in texts:
        try:
            values.append(option.parse(text))
        except ValueError as error:
            shown = "" if option.name == "redis" else f" {printable(repr(text), 60)}"
            parser.error(f"{source}{shown}: {error}")
    return values


def refuse_dashes(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """`--base=--` is a mistake that argparse meets with a traceback."""
    for arg in argv:
        if re.fullmatch("--[a-z-]+=--", arg):
            parser.error(f"{arg[:-3]} '--': a value is needed")


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


def like(pattern: str, needed: str) -> Callable[[str], str]:
    """A parser of texts that match a pattern."""

    def parse(text: str) -> str:
        if not (text.isprintable() and re.fullmatch(pattern, text)):
            raise ValueError(needed)
        return text

    return parse


def redis_url(text: str) -> str:
    try:
        Queue(text)
    except Exception as error:
        safe = "@" not in text or isinstance(error, TypeError)  # others may quote the password
        why = f" ({printable(str(error), 200)})" if safe else ""
        raise ValueError(
            "a Redis URL is needed: redis://[user:password@]host:port/db, with special characters "
            f"of the password percent-encoded{why}"
        ) from None
    return text


NAME = r" *[^\W\d]\w*(\.[^\W\d]\w*)* *"


def class_names(text: str) -> frozenset[str]:
    needed = "class names are needed, such as KeyError,myapp.NoSuchUser"
    return frozenset(name.strip() for name in like(f"{NAME}(,{NAME})*", needed)(text).split(","))


OPTIONS = (
    Option("redis", "URL", redis_url, "the server; better given as REDIS_URL: others can read a "
           "command line", "redis://127.0.0.1:6379/0", "REDIS_URL"),
    Option("queue", "KEY", like(".+", "the name of a key is needed, such as q:tasks"),
           "the list that producers push to", "q:tasks"),
    Option("process", "MODULE:FUNCTION", like(
           r"\w+(\.\w+)*:\w+(\.\w+)*", "module:function is needed, such as myapp.tasks:process"),
           "the handler; if not given: process(msg) of taskproc.py, the one in /opt/app if that "
           "exists, else the one beside this file"),
    Option("concurrency", "N", partial(count, most=1000),
           "messages run at a time, each in its own process", "1"),
    Option("lease", "SECONDS", partial(seconds, least=1),
           "after this long without a renewal, others take over a run", "30"),
    Option("time-limit", "SECONDS", seconds,
           "a handler that runs longer is interrupted, and killed a grace later", "600"),
    Option("grace", "SECONDS", seconds, "what running handlers get to finish in at a stop", "25"),
    Option("max-attempts", "N", count, "failed runs after which a message is dead", "5"),
    Option("base", "SECONDS", seconds,
           "the most that the first retry waits; doubles each time", "1"),
    Option("cap", "SECONDS", seconds, "the most that any retry waits by the schedule", "30"),
    Option("retry-after-cap", "SECONDS", seconds,
           "the most of a Retry-After that is obeyed", "900"),
    Option("permanent", "NAME[,NAME]", class_names, "exceptions that no retry can cure"),
    Option("dlq-alert", "N", count,
           "dead letters at which the log warns, and again whenever they double", "1"),
    Option("log", "text|json", like("text|json", "text or json is needed"),
           "how log lines look", "text"),
    Option("burst", "", bool, "exit when nothing is left to run"),
)  # fmt: skip


class Settings(argparse.Namespace):
    """What the command line and the environment say: the options above, and these. In seconds."""

    redis: str
    queue: str
    process: str | None
    concurrency: int
    lease: float
    time_limit: float
    grace: float
    max_attempts: int
    base: float
    cap: float
    retry_after_cap: float
    permanent: frozenset[str] | None
    dlq_alert: int
    log: str
    burst: bool
    qr_dir: Path  # absolute, like app_dir: a handler may change the working directory
    app_dir: Path
    cwd: Path
    name: str  # this worker: host:pid:16 random digits

    @property
    def policy(self) -> Policy:
        permanent = self.permanent or frozenset()
        return Policy(self.max_attempts, self.base, self.cap, self.retry_after_cap, permanent)

    def handler(self) -> tuple[str, Path, str, str]:
        """Where the handler is: (for people, folder for the import path, module, function).

        A folder that QR_APP_DIR names is meant: then nothing else will do.
        """
        if self.process:
            module, _, function = self.process.partition(":")
            return self.process, self.cwd, module, function
        folder = self.app_dir
        if "QR_APP_DIR" not in os.environ and not (folder / "taskproc.py").exists():
            folder = Path(__file__).resolve().parent
        return f"{folder / 'taskproc.py'}:process", folder, "taskproc", "process"


FOLDERS = {"qr_dir": ("QR_DIR", "/root/qr"), "app_dir": ("QR_APP_DIR", "/opt/app")}
EPILOG = """\
examples:
  python worker.py                             work on q:tasks until stopped
  python worker.py --burst                     drain it, retries included, then exit
  python worker.py --concurrency 4 --lease 60  four at a time
  python worker.py --process myapp.jobs:handle --permanent NoSuchUser

variables: QR_A_B does what --a-b does, unless that is given too; REDIS_URL is for --redis.
QR_DIR (/root/qr): where requeue.out gets a line per retry, if that folder exists.
QR_APP_DIR (/opt/app): where taskproc.py is; if it is set, nowhere else is looked.

signals: SIGTERM, SIGINT, SIGQUIT, SIGHUP: finish the running messages, then exit; a second one:
now. SIGUSR1, SIGUSR2, SIGALRM: ignored.
exit codes: 0 stopped or drained; 1 a bug; 2 a setting or Redis needs a person; 3 the handler
cannot be loaded."""


def unknown_variables() -> str:
    """A warning that names the variables that look like ours and are none; "" if there are none."""
    known = {option.variable for option in OPTIONS} | {name for name, _ in FOLDERS.values()}
    unknown = sorted(name for name in os.environ if name.startswith("QR_") and name not in known)
    return f"warning: no such variable, ignored: {printable(', '.join(unknown))}" if unknown else ""


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
    parser.add_argument("--version", action="version", version=f"worker.py {VERSION}")
    add_options(parser, OPTIONS)
    argv = sys.argv[1:] if argv is None else argv
    refuse_dashes(parser, argv)
    settings = parser.parse_args(argv, Settings())
    for option in OPTIONS:
        if option.metavar:
            values = values_of(parser, option, getattr(settings, option.attribute))
            setattr(settings, option.attribute, values[-1] if values else None)
    for attribute, (variable, usual) in FOLDERS.items():
        if not (folder := os.environ.get(variable, usual)):
            parser.error(f"{variable} is empty: the path of a folder is needed, or unset it")
        try:
            setattr(settings, attribute, Path(folder).absolute())
            settings.cwd = Path.cwd() if settings.process else Path()
        except FileNotFoundError:
            parser.error("the working directory is gone: start in one that is there")
    settings.name = f"{host_name()}:{os.getpid()}:{secrets.token_hex(8)}"
    return settings


def host_name() -> str:
    """This machine, as the names of its workers begin."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    fill_standard_files()
    keep_streams()
    settings = read_settings(argv)
    LOG["json"] = settings.log == "json"
    if warning := unknown_variables():
        log(warning)
    return Foreman(settings).run()


if __name__ == "__main__":
    os._exit(main())  # Python's own way out is slow, and a signal that comes then kills it
