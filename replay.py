"""The desk where dead letters are looked at, put back or thrown away. It only acts when asked.

  $ python replay.py
  replayed df5d15fe13, kind missing, HTTPStatus: HTTP 404 (taskproc.py:63 in process):
  5 left in q:tasks:dlq

  $ python replay.py --group
  COUNT  REASON     KIND     FIRST  LAST  EXAMPLE     ERROR
  2      permanent  missing  2 s    2 s   fa0de01bbb  HTTPStatus: HTTP 404 (taskproc.py:63 in pro…
  2      exhausted  bad      2 s    1 s   8badd771ba  ValueError: bad message (taskproc.py:55 in …
  replay: 4 letters in 2 groups; --like EXAMPLE means a group

  $ python replay.py --list --kind bad
  ID          AGE  KIND  ATTEMPTS  REASON     ERROR
  8badd771ba  2 s  bad   5         exhausted  ValueError: bad message (taskproc.py:55 in process)
  b611f4f134  2 s  bad   5         exhausted  ValueError: bad message (taskproc.py:55 in process)
  replay: letters in all: 4

  $ python replay.py --like 8bad --set user.id=42
  - b611f4f134  user.id: 41
  + b611f4f134  user.id: 42
  - 8badd771ba  user.id: 41
  + 8badd771ba  user.id: 42
  replayed 2

A replay moves and never copies: a letter leaves `q:tasks:dlq` in the same atomic step that puts its
message on `q:tasks`. So it may be killed at any moment, and two people may replay at once. Attempts
start again at 0; the history of failures, the first date and a count of replays stay with the
message. What cannot be read stays where it is, is named, and stops nothing.

Exit codes: 0 done; 1 partly done, not found, or not healthy; 2 a wrong option, or Redis needs a
person. --check has those of Nagios: 0 fine, 1 warning, 2 critical, 3 unknown.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import operator
import os
import re
import shutil
import signal
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any

try:
    import redis
except ModuleNotFoundError:
    sys.stderr.write(f"replay: {sys.executable} has no package redis: pip install redis\n")
    sys.exit(2)

from backoff import Policy, printable
from worker import (
    BLANK,
    CLOCK,
    DECODER,
    LINE,
    OPTIONS,
    RESERVED,
    VERSION,
    Failure,
    Message,
    Note,
    Option,
    Queue,
    Run,
    Script,
    Step,
    Undecodable,
    add_options,
    conclude,
    count,
    date_ms,
    explain,
    fill_standard_files,
    host_name,
    iso,
    load,
    members,
    passing,
    refuse,
    refuse_dashes,
    revive,
    seconds,
    unknown_variables,
    unsettled,
    values_of,
)

PAGE = 500  # dead letters read at a time at most; fewer if they are large
PAGE_BYTES = 500_000  # what a page should hold, so that reading it holds Redis for a millisecond
SHOWN = 20  # rows of a table, if nothing says otherwise
STALE = 60.0  # seconds without progress after which a loop stands still, for --health
GONE = 10  # times that: a worker silent for so long has gone, it is not stuck
DEEPEST = 64  # columns of indentation; what lies deeper is shown as it was written
REASONS = ("exhausted", "permanent", "undecodable", "worker_died", "timed_out", "cancelled")
LOOK_EVERY = 0.5  # seconds between two looks for new letters, for --follow
REMEMBERED = 10_000  # letters that it knows again
DEPTH = (1, 100)  # dead letters that are a warning, and critical, for --check


# ── Text for people ───────────────────────────────────────────────────────────────────────────
# Nothing out of Redis reaches a terminal but through `printable`.

BOLD, RED, GREEN = "1", "31", "32"


def paint(text: str, code: str) -> str:
    """Colours the text on a terminal that wants colours (no-color.org), and nowhere else."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def plain(value: object, limit: int = 500) -> str:
    """Any JSON value in one line: text bare, nothing as a dash, the rest as JSON."""
    if isinstance(value, str):
        return printable(value, limit)
    return "-" if value is None else printable(json.dumps(value, ensure_ascii=False), limit)


def json_line(value: object) -> str:
    """One line of strict JSON; what JSON has no number for (NaN) becomes text."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=str))


def since(seconds: float | None) -> str:
    return "-" if seconds is None else span(max(0.0, seconds))


def span(seconds: float) -> str:
    """A duration for people: 45 s, 12 min, 3.5 h, 2.0 d."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds // 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


EMOJI = "\ufe0f"  # after a character: show it as an emoji, which is wide


def width(text: str) -> int:
    """The columns that a printable text takes on a terminal: CJK and emoji two, accents none."""
    if text.isascii():
        return len(text)
    total, last = 0, 0
    for c in text:
        if c == EMOJI:
            last = 1 if last == 1 else 0
        elif unicodedata.category(c) in ("Mn", "Me"):
            last = 0
        else:
            last = 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1
        total += last
    return total


def fitted(line: str) -> str:
    """The line, cut to the width of a terminal; elsewhere nothing is cut."""
    if not sys.stdout.isatty() or width(line) <= (most := shutil.get_terminal_size().columns):
        return line
    line = line[:most]
    while width(line) >= most:
        line = line[:-1]
    return line + "…"


def columns(head: str, rows: Iterable[list[str]]) -> Iterator[str]:
    """Lines of an aligned table."""
    rows, names = iter(rows), head.split()
    while page := list(islice(rows, PAGE)):
        sizes = [max(map(width, column)) for column in zip(names, *page, strict=True)]
        for row in [names, *page] if head else page:
            cells = [f"{x}{' ' * (size - width(x))}" for x, size in zip(row, sizes, strict=True)]
            line = fitted("  ".join(cells).rstrip())
            yield paint(line, BOLD) if row is names else line
        head = ""


# In the text of a JSON string: two escapes that make one character, one that makes one, another.
ESCAPE = re.compile(r"(?:\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.)")


def readable(text: str) -> str:
    """A JSON text with the characters that its escapes mean, as far as they are printable."""

    def meant(escape: re.Match[str]) -> str:
        c = str(json.loads(f'"{escape[0]}"'))
        return c if escape[0][1] == "u" and c.isprintable() and c not in '"\\' else escape[0]

    return ESCAPE.sub(meant, text)


# An error is cut into what stays in its fingerprint and what goes, whichever comes first.
STAYS = r"""
    [ ]\([^()\s]+:\d+[ ]in[ ][^()]*\)                                      # a place in the code
    | ^[A-Za-z_][\w.]*(?=:|$|[ ][(\[])                                     # the type
    | \b[A-Z]\w*(?:Error|Exception|Timeout|Warning)\b                      # those behind it
    | \b(?:HTTP(?:/[\d.]+)?|[Ss]tatus|[Cc]ode|[Ee]rrno|SQLSTATE|sqlstate|WinError|ORA)
      (?:[ ](?:Error|[Cc]ode))?(?:[ ]is)?[ =:\[(-]{1,3}[\dA-Z]{1,6}\b
    | \b[45]\d\d[ ](?:Client|Server)[ ]Error | '[45]\d\d[ ][A-Z][\w ]+'    # requests, httpx
    | (?<=:[ ])[45]\d\d(?=,[ ]message=) | (?<=:[ ]\()\d{4}(?=,)            # aiohttp, MySQL
    | \b[Ee]rror[ ]occurred[ ]\(\w+\)                                      # boto
"""
GOES = {  # what stands there instead: what it looks like
    "'…'": r"""(?<!\w)'(?:[^']*'(?!\w)|[^']*…) | (?<!\w)"(?:[^"]*"(?!\w)|[^"]*…)""",
    "URL": r"\b[a-z][a-z+.-]*://[^\s'\"<>)\]]+",
    "ADDRESS": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*",
    "PATH": r"""(?<![\w/])(?:[A-Za-z]:|~)?(?:[\\/][\w.@%+~=:-]+){2,}[\\/]?
        | \b[\w.-]+(?:/[\w.-]+){2,}""",
    "#": r"""\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)? # a date
        | \b\d{1,6}(?:[.,:]\d+)*[ ]?(?:[mµun]?s|m|h|d|secs?|mins?|(?:milli|micro)?seconds?
          |minutes?|hours?|days?)(?![\w-])                                 # a duration
        | \b(?:ch|cus|pi|sub|evt|acct|prod|req|tok|src|pm|txn|usr|ord|inv)_\w+
        | \b[a-z]{2,10}_(?=\w*[\dA-Z])\w+ | \b[a-z]{2,10}_[a-f]{4,}\b      # cus_9s6XKz
        | \b(?=[\w-]*\d)\w+(?:-\w+)+\b                                     # a UUID, SKU-12-b
        | \b(?=\w*\d)(?=\w*[A-Za-z])\w{6,}\b | \b[\da-fA-F]{6,}\b          # a ULID, a hash
        | \b(?=\w{6})\w*[A-Z][a-z][A-Z]\w*\b                               # base62 without a digit
        | \b0x[\da-fA-F]+ | \d+(?:[.,:]\d+)*""",
}
PARTS = re.compile("|".join(f"({part})" for part in (STAYS, *GOES.values())), re.VERBOSE)


@lru_cache(10_000)
def fingerprint(error: str) -> str:
    """What equal faults have in common: an error without its numbers, ids and quoted texts."""
    names = ["", *GOES]  # of the groups, from 1
    return PARTS.sub(lambda part: names[(part.lastindex or 1) - 1] or part[0], error)


PROGRESS = {"shown": 0.0, "there": 0.0}  # when the line was last written; 1 while it is there


def progress(text: str) -> None:
    """A line on the terminal that says how far we are; it is gone before the next one."""
    if sys.stderr.isatty():
        PROGRESS["shown"], PROGRESS["there"] = time.monotonic(), 1
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def clear_progress() -> None:
    if PROGRESS["there"]:
        PROGRESS["there"] = 0
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(text: str, end: str = "\n", flush: bool = False) -> None:
    clear_progress()
    print(text, end=end, flush=flush)


def complain(text: str) -> None:
    with suppress(OSError):  # a full disk must not hide the exit code
        clear_progress()
        print(f"replay: {text}", file=sys.stderr)


# ── Letters ───────────────────────────────────────────────────────────────────────────────────


def ago(now_ms: float, at_ms: float | None) -> float | None:
    return None if at_ms is None else round((now_ms - at_ms) / 1000, 3)


class Letter:
    """A dead letter: its exact bytes, and what they say, as far as they can be read.

    `older` and `newer` are the numbers of letters on both sides of it when it was read. Whoever
    takes it out of the list sets `gone`.
    """

    def __init__(self, raw: bytes, now_ms: float = 0.0, older: int = 0, newer: int = 0) -> None:
        self.raw, self.now_ms, self.older, self.newer = raw, now_ms, older, newer
        self.gone = False

    @cached_property
    def id(self) -> str:
        """Ten digits made of the bytes: any entry has them, equal entries have the same."""
        return hashlib.sha256(self.raw).hexdigest()[:10]

    @cached_property
    def facts(self) -> dict[str, Any]:
        try:
            return load(self.raw)
        except Undecodable:
            return {}

    @cached_property
    def body(self) -> dict[str, Any]:
        """The payload as an object; empty if it is none."""
        found = self.facts.get("payload")
        if isinstance(found, str):
            with suppress(ValueError):
                found = load(found.encode(errors="surrogateescape"))
        return found if isinstance(found, dict) else {}

    @property
    def problem(self) -> str:
        """Why it cannot be replayed; "" if it can."""
        try:
            revive(self.raw)
        except ValueError as error:
            return printable(str(error))
        return ""

    @cached_property
    def error(self) -> str:
        return plain(self.facts.get("error")) if self.facts else f"cannot be read: {self.problem}"

    @cached_property
    def fault(self) -> tuple[str, str]:
        """What letters of one group have in common: the reason, and the error's fingerprint."""
        return plain(self.facts.get("reason")), fingerprint(self.error)

    @property
    def about(self) -> str:
        return f"kind {plain(self.body.get('kind'), 40)}, {self.error}"

    @cached_property
    def died_ms(self) -> float | None:
        return date_ms(self.facts.get("failed_at"))

    @property
    def age(self) -> float | None:
        return ago(self.now_ms, self.died_ms)

    @property
    def token(self) -> int:
        token = self.facts.get("token")
        return token if isinstance(token, int) else 0

    def row(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "id": self.id,
            "age": self.age,
            "kind": self.body.get("kind"),
            "attempts": facts.get("attempts"),
            "reason": facts.get("reason"),
            "error": self.error,
            "failed_at": facts.get("failed_at"),
            "first_seen_at": facts.get("first_seen_at"),
            "replays": facts.get("replays", 0),
        }

    def cells(self) -> list[str]:
        row = self.row()
        facts = [plain(row[name], 40) for name in ("kind", "attempts", "reason")]
        return [row["id"], since(row["age"]), *facts, row["error"]]


class Group:
    """Letters with the same reason and sort of error."""

    def __init__(self, example: Letter) -> None:
        self.example, self.count = example, 0
        self.kinds = Counter[str]()
        self.first: float | None = None
        self.last: float | None = None

    def add(self, letter: Letter) -> None:
        self.count += 1
        self.kinds[plain(letter.body.get("kind"), 40)] += 1
        if (died := letter.died_ms) is not None:
            self.first = min(died, died if self.first is None else self.first)
            self.last = max(died, died if self.last is None else self.last)

    def row(self) -> dict[str, Any]:
        reason, error = self.example.fault
        dates = [None if at is None else iso(at) for at in (self.first, self.last)]
        return {
            "count": self.count, "reason": reason, "kinds": dict(self.kinds.most_common(SHOWN)),
            "first": dates[0], "last": dates[1], "example": self.example.id, "error": error,
        }  # fmt: skip

    def cells(self, now_ms: float) -> list[object]:
        reason, error = self.example.fault
        [(kind, _), *others] = self.kinds.most_common()
        ages = [since(ago(now_ms, at)) for at in (self.first, self.last)]
        more = f" +{len(others)}" if others else ""
        return [self.count, reason, kind + more, *ages, self.example.id, error]


def depth(queue: Queue) -> int:
    """How many dead letters there are."""
    return int(queue.command("LLEN", queue.names.dlq))


def read(queue: Queue, low: int, high: int) -> list[bytes]:
    """The letters at these positions, `high` excluded, the oldest first; the oldest of all is 0."""
    block: list[bytes] = queue.command("LRANGE", queue.names.dlq, -high, -low - 1)
    return block[::-1]


def page_size(before: int, block: list[bytes]) -> int:
    """How many letters to read next: more and more, but not more than PAGE_BYTES of them."""
    longest = max(map(len, block), default=0)
    return min(2 * before, PAGE, PAGE_BYTES // (1 + longest) or 1)


def last_token(queue: Queue) -> int:
    """Who has a higher token than this died later: a token is the time in µs, or follows it."""
    fence = queue.command("GET", queue.names.fence) or b""
    return max(int(fence) if fence.isdigit() else 0, 1000 * queue.now_ms())


class Cursor:
    """A place among the dead letters: those below it have been seen, those above it not yet.

    Positions count from the oldest end: new letters come in at the other one and move nothing; what
    others take out lets the newer ones slide down. So a page begins with the last letter seen. If
    another one lies there, the cursor steps back until it stands on one that it knows, and what
    follows the known ones is new. (Of letters equal to the byte, one may be passed over then.)
    """

    def __init__(self, queue: Queue) -> None:
        self.queue, self.at, self.size = queue, 0, SHOWN
        self.seen: list[int] = []  # hashes of the letters below, in order, as far as known
        self.last = b""
        self.lost = set[int]()  # what it knew, if it came down to the oldest and met nothing known

    def page(self) -> list[bytes]:
        """The next letters above, the oldest first; none if there is none."""
        self.at = min(self.at, depth(self.queue))
        while True:
            low = max(self.at - 1, 0)
            block = read(self.queue, low, self.at + self.size)
            known = 0
            if self.at and block[:1] == [self.last]:
                known = 1
            elif self.at and block and hash(block[0]) in self.seen:
                known = self.known(block)
                self.at = low + known
            elif self.at:
                self.at = max(self.at - self.size, 0)
                continue
            else:
                self.lost |= set(self.seen)
                self.seen = []
            self.size = page_size(self.size, block)
            fresh = self.not_lost(block[known:])
            if fresh:
                return fresh
            if len(block) < 2:
                self.lost.clear()
                return []

    def known(self, block: list[bytes]) -> int:
        """How many were seen, at its beginning: they are in their order, but some may be gone."""
        place = 0
        for i, raw in enumerate(block):
            try:
                place = self.seen.index(hash(raw), place) + 1
            except ValueError:
                return i
        return len(block)

    def not_lost(self, block: list[bytes]) -> list[bytes]:
        """Passes letters that it knew; returns those that follow, as far as the next known one."""
        start = 0
        while self.lost and start < len(block) and hash(block[start]) in self.lost:
            self.saw(block[start])
            start += 1
        end = start
        while end < len(block) and hash(block[end]) not in self.lost:
            end += 1
        return block[start:end]

    def saw(self, raw: bytes, gone: bool = False) -> None:
        """Moves above this letter; `gone`: we have taken it out."""
        if not gone:
            self.at, self.last = self.at + 1, raw
            self.seen.append(hash(raw))


def oldest_first(queue: Queue) -> Iterator[Letter]:
    """Each letter that is there at the start, once, whatever others take and bring meanwhile."""
    now, newest, cursor = queue.now_ms(), last_token(queue), Cursor(queue)
    there = left = depth(queue)
    while left > 0 and (page := cursor.page()):
        for raw in page[:left]:
            letter = Letter(raw, now, cursor.at, there - cursor.at)
            if letter.token <= newest:
                yield letter
            cursor.saw(raw, letter.gone)
        left -= len(page)


def newest_first(queue: Queue) -> Iterator[Letter]:
    """The same from the other end; what slides down here has been seen, and its hash is known."""
    now, newest, seen, last = queue.now_ms(), last_token(queue), set[int](), b""
    there = at = depth(queue)
    size = SHOWN
    while at > 0:
        low, high = max(at - size, 0), at + 1 if seen else at
        block = read(queue, low, high)[::-1]
        if seen and block[:1] == [last]:
            fresh = block[1:]
        else:
            fresh = [raw for raw in block if hash(raw) not in seen]
        for i, raw in enumerate(fresh, 1):
            letter = Letter(raw, now, at - i, there - at + i)
            if letter.token <= newest:
                yield letter
            if not letter.gone:
                seen.add(hash(raw))
                last = raw
        at, size = low, page_size(size, block)


# ── Which letters ─────────────────────────────────────────────────────────────────────────────
# A condition is a function; the parser of an option makes it out of what was typed.

Condition = Callable[[Letter], bool]


def words(text: str) -> str:
    if not text:
        raise ValueError("some text is needed")
    return text


def age(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?[smhdw]", text):
        raise ValueError("an age is needed, such as 90s, 10m, 2h, 3d or 1w")
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[text[-1]]


STEP = r"""(?:"(?:[^"\\]|\\.)+"|[^".=][^.=]*)"""  # of a path: a name, or a quoted one
Steps = tuple[str, ...]


def at_path(text: str) -> tuple[Steps, str]:
    """Splits `items.0.sku=x`, `"a.b".c=x`: (the names, or numbers of elements, on the way; "x")."""
    found = re.match(rf"({STEP}(?:\.{STEP})*)=", text)
    if not found:
        raise ValueError('field=value is needed, such as user.id=42, items.0.sku=x or "a.b"=1')
    steps = re.findall(STEP, found[1])
    return tuple(decoded(x) if x[0] == '"' else x for x in steps), text[found.end() :]


def decoded(text: str) -> str:
    """A JSON string."""
    try:
        return str(json.loads(text))
    except ValueError:
        raise ValueError(f"{text} is no quoted name") from None


def named(path: Steps) -> str:
    """The path as it is typed."""
    return ".".join(x if re.fullmatch(STEP, x) else json.dumps(x) for x in path)


def equal(fact: Callable[[Letter], object], text: str) -> Condition:
    wanted = words(text)
    return lambda letter: plain(fact(letter)) == wanted


def reason(text: str) -> Condition:
    if text not in REASONS:
        raise ValueError(f"one of these is needed: {', '.join(REASONS)}")
    return equal(lambda x: x.facts.get("reason"), text)


def error(text: str) -> Condition:
    bare = re.fullmatch("/(.+)/", text, re.DOTALL)
    try:
        pattern = re.compile(bare[1] if bare else re.escape(words(text)))
    except (re.error, RecursionError, OverflowError) as fault:
        raise ValueError(f"this is no regular expression: {fault}") from None
    return lambda letter: pattern.search(letter.error) is not None


def aged(compare: Callable[[float, float], bool], text: str) -> Condition:
    bound = age(text)
    return lambda letter: letter.age is not None and compare(letter.age, bound)


def where(text: str) -> Condition:
    """This text, or what it says as JSON, at a path in the payload; 1 is not true."""
    path, text = at_path(text)
    try:
        wanted = json.loads(text)
    except (ValueError, RecursionError):
        wanted = text

    def fits(letter: Letter) -> bool:
        value: Any = letter.body
        for step in path:
            if isinstance(value, list):
                value = {str(i): element for i, element in enumerate(value)}
            if not isinstance(value, dict) or step not in value:
                return False
            value = value[step]
        alike = isinstance(value, bool) == isinstance(wanted, bool)
        return value == text or (alike and value == wanted)

    return fits


# ── Changing and keeping letters ──────────────────────────────────────────────────────────────


class Problem(Exception):
    """What was asked cannot be done as it was asked; exit code 2."""


def change(text: str) -> tuple[Steps, str]:
    """As `at_path`, but the value is JSON text: what was typed, if it is that, else a string."""
    path, value = at_path(text)
    if path[0] in RESERVED:
        raise ValueError(f"{path[0]} is the queue's own")
    try:
        json.loads(value, parse_constant=refuse)
    except (ValueError, RecursionError):
        return path, json.dumps(value)
    return path, value.strip()


def elements(text: str) -> tuple[str, list[tuple[str, Any, str, str]], str]:
    """Splits a JSON array's text as `members` splits an object's; the names are 0, 1, …"""

    def skip(at: int) -> int:
        return BLANK.match(text, at).end()  # type: ignore[union-attr]

    found, start, at = list[tuple[str, Any, str, str]](), 1, skip(1)
    while text[at] != "]":
        value, at = DECODER.raw_decode(text, skip(at))
        at = skip(at)
        span = text[start:at]
        found.append((str(len(found)), value, span, span))
        if text[at] == ",":
            at = start = at + 1
    return "[", found, text[at if found else 1 :]


def payload(path: str) -> str:
    """The text of the JSON object in a file, or what comes from the standard input for "-"."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            raw = file.read().strip()
    except OSError as error:
        raise ValueError(error.strerror) from None
    load(raw)
    return raw.decode()


def put(text: str, path: Steps, value: str) -> tuple[str, str | None]:
    """Replaces one value in the text of a JSON object or array, and leaves every other byte alone.

    Returns the new text, and the old text of the value: None if the member is new. Of equal names
    the last counts, as for parsers. ValueError if the path leads through something else.
    """
    name, *deeper = path
    array = text.startswith("[")
    head, found, tail = elements(text) if array else members(text)
    spans = [whole for *_, whole in found]
    places = [i for i, (each, *_) in enumerate(found) if each == name]
    if not places and (array or deeper):
        raise ValueError(f'its payload has no {"element" if array else "object"} "{name}"')
    if not places:
        spans.append(f"{' ' if spans else ''}{json.dumps(name)}: {value}")
        return head + ",".join(spans) + tail, None
    _, there, inner, whole = found[places[-1]]
    bare = inner.strip()
    before: str | None = bare
    if deeper:
        if not isinstance(there, (dict, list)):
            raise ValueError(f'its payload has no object or array "{name}"')
        value, before = put(bare, tuple(deeper), value)
    spans[places[-1]] = whole.removesuffix(inner) + inner.replace(bare, value, 1)
    return head + ",".join(spans) + tail, before


def saved(dlq: str, raw: bytes) -> str:
    """A line of the file that --discard writes: ASCII, and the exact bytes can be had back."""
    return json.dumps({"dlq": dlq, "envelope": raw.decode(errors="surrogateescape")}) + "\n"


def unsaved(dlq: str, line: str) -> bytes:
    """The bytes in such a line. Raises Problem if it is none, or another queue's."""
    try:
        entry = json.loads(line)
        whose, raw = entry["dlq"], entry["envelope"].encode(errors="surrogateescape")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Problem(f"this is no line of a --discard file: {printable(line, 60)}") from None
    if whose != dlq:
        raise Problem(f"the file holds letters of {plain(whose)}, this queue's are in {dlq}")
    return bytes(raw)


def private(path: str, flags: int) -> int:
    """Opens a file that others cannot read: what was in messages may be nobody's business."""
    return os.open(path, flags, 0o600)


def write_new(path: str, lines: Iterable[str]) -> int:
    """Writes a new file, safe on disk with its name when this returns; returns how many lines."""
    n = 0
    with open(path, "x", encoding="ascii", opener=private) as file:  # x: never over another
        for n, line in enumerate(lines, 1):  # noqa: B007
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return n


# ── The desk ──────────────────────────────────────────────────────────────────────────────────


class Desk:
    """One command on one queue. `do_list` is --list, and so on; each returns the exit code."""

    def __init__(self, queue: Queue, asked: argparse.Namespace) -> None:
        self.queue, self.asked, self.dlq = queue, asked, queue.names.dlq
        self.narrow = bool(asked.id or asked.conditions or asked.like)
        self.moved = 0
        self.rest: Counter[str] = Counter()  # what became of the others, and of how many
        self.partial = self.stopping = False
        self.not_before = time.monotonic()

    def walk(self) -> Iterator[Letter]:
        """The letters that fit; shows progress, on a terminal only, after half a second."""
        PROGRESS["shown"] = time.monotonic()
        walk = newest_first if self.asked.newest else oldest_first
        for read, letter in enumerate(walk(self.queue), 1):
            if time.monotonic() - PROGRESS["shown"] > 0.5:
                all_of = letter.older + letter.newer
                progress(f"{read:,} of {all_of:,} read, {self.moved:,} moved")
            if self.stopping:
                return
            if self.fits(letter):
                yield letter

    def fits(self, letter: Letter) -> bool:
        """All conditions must hold; of the same one, given twice, either."""
        return all(any(fits(letter) for fits in same) for same in self.asked.conditions)

    def chosen(self) -> Iterator[Letter]:
        """The letters that are meant, as they are found; by id, only when all have been seen.

        Raises Problem if the beginning of an id fits different letters.
        """
        if self.asked.like:
            self.asked.conditions.append(self.alike())
        starts = tuple(self.asked.id)
        if not starts:
            return self.walk()
        named = [letter for letter in self.walk() if letter.id.startswith(starts)]
        copies = Counter(letter.id for letter in named)
        for start in starts:
            fits = sorted(name for name in copies if name.startswith(start))
            if len(fits) > 1:
                raise Problem(f"id {start} fits {len(fits)} letters: {', '.join(fits[:5])}")
            if not fits:
                self.missing(start)
        for name, n in copies.items():
            if n > 1:
                complain(f"{n} equal letters share the id {name}; --limit 1 means one of them")
        return iter(named)

    def alike(self) -> list[Condition]:
        """The condition to be in a group with one of the letters that --like names."""
        found = dict[str, set[tuple[str, str]]]()
        for letter in newest_first(self.queue):
            for start in self.asked.like:
                if letter.id.startswith(start):
                    found.setdefault(start, set()).add(letter.fault)
        for start in self.asked.like:
            if len(found.get(start, ())) > 1:
                raise Problem(f"id {start} fits letters of {len(found[start])} groups")
            if start not in found:
                self.missing(start)
        faults = set[tuple[str, str]]().union(*found.values())
        return [lambda letter: letter.fault in faults]

    def missing(self, start: str) -> None:
        complain(f"there is no dead letter {start} (any more)")
        self.partial = True

    def nothing(self) -> str:
        """Says that there was nothing to do, and makes the exit code 1 if something was meant."""
        self.partial = self.partial or self.narrow or (self.asked.page or 1) > 1
        if (self.asked.page or 1) > 1:
            return f"there is no page {self.asked.page}"
        if self.narrow:
            return f"no dead letter in {self.dlq} fits"
        return f"{self.dlq} is empty: there is no dead letter"

    # Look ────────────────────────────────────────────────────────────────────────────────────

    def show(self, rows: Iterable[dict[str, Any]], lines: Iterable[str]) -> int:
        """Prints the rows as JSON if that was asked for, else the lines. Returns the exit code."""
        n = 0
        for n, line in enumerate(map(json_line, rows) if self.asked.json else lines, 1):  # noqa: B007
            say(line)
        sys.stdout.flush()
        if not (n or self.partial):
            complain(self.nothing())
        return int(self.partial)

    def do_list(self) -> int:
        """A page of letters as a table; as JSON lines, all of them. Then how many there are."""
        asked, page = self.asked, self.asked.page or 1
        whole = (asked.all or asked.json) and not asked.page
        size = asked.limit or (sys.maxsize if whole else SHOWN)
        chosen = self.chosen()
        some = islice(chosen, (page - 1) * size, page * size)
        head, cells = "ID AGE KIND ATTEMPTS REASON ERROR", (letter.cells() for letter in some)
        code = self.show((letter.row() for letter in some), columns(head, cells))
        if not (code or asked.json):
            there = f"letters in all: {depth(self.queue):,}"
            more = next(chosen, None) is not None
            complain(f"{there}; more: --page {page + 1}, --limit N or --all" if more else there)
        return code

    def do_show(self) -> int:
        """Everything about the letters that are meant; about one, if nothing says which."""
        asked = self.asked
        some = islice(self.chosen(), asked.limit or (None if asked.all or self.narrow else 1))
        rows = map(everything, some)
        lines = ("\n" * (i > 0) + "\n".join(portrait(x)) for i, x in enumerate(some))
        return self.show(rows, lines)

    def do_group(self) -> int:
        """One row per reason and sort of error, the most frequent first."""
        now, groups = self.queue.now_ms(), dict[tuple[str, str], Group]()
        for letter in self.chosen():
            groups.setdefault(letter.fault, Group(letter)).add(letter)
        ordered = sorted(groups.values(), key=lambda group: -group.count)
        some = ordered[: self.asked.limit]
        rows = (group.row() for group in some)
        cells = ([plain(fact) for fact in group.cells(now)] for group in some)
        code = self.show(rows, columns("COUNT REASON KIND FIRST LAST EXAMPLE ERROR", cells))
        if some and not self.asked.json:
            total = sum(group.count for group in ordered)
            complain(f"{total:,} letters in {len(ordered):,} groups; --like EXAMPLE means a group")
        return code

    def do_follow(self) -> int:
        """Prints letters as they come, until Ctrl-C or the end of the reader. None is missed and
        none printed twice; an outage of Redis is waited for.

        The exception: if more than is remembered, the newest thousands, is taken between two
        looks, then what is new is told by the date of its death.
        """
        if self.asked.like:
            self.asked.conditions.append(self.alike())
        looked, waiting = self.queue.now_ms(), False
        cursor = self.at_the_end()
        while True:
            try:
                now, page = self.queue.now_ms(), cursor.page()
            except redis.RedisError as error:
                if not passing(error):
                    raise
                if not waiting:
                    complain(f"waiting for Redis at {self.queue.place()}: {printable(str(error))}")
                waiting = True
                time.sleep(LOOK_EVERY)
                continue
            if waiting:
                complain("Redis answers again")
                waiting = False
            for raw in page:
                letter = Letter(raw, now)
                old = cursor.lost and (letter.died_ms or 0.0) <= looked
                if not old and self.fits(letter):
                    say(json_line(everything(letter)) if self.asked.json else headline(letter))
                cursor.saw(raw)
            del cursor.seen[:-REMEMBERED]
            sys.stdout.flush()
            if not page:
                looked = now
                time.sleep(LOOK_EVERY)

    def at_the_end(self) -> Cursor:
        """A cursor above the newest letter, that knows some of the letters below."""
        cursor, known, size = Cursor(self.queue), list[Letter](), 0
        for letter in newest_first(self.queue):
            known.append(letter)
            size += len(letter.raw)
            if len(known) == PAGE or size > PAGE_BYTES:
                break
        for letter in reversed(known):
            cursor.saw(letter.raw)
        if known:
            cursor.at = known[0].older + 1
        return cursor

    # Move ────────────────────────────────────────────────────────────────────────────────────

    def do_replay(self) -> int:
        """Puts letters back on the queue; the oldest one that can be read, if nothing is chosen."""
        asked, verb = self.asked, "would replay" if self.asked.dry_run else "replayed"
        one = not (self.narrow or asked.all or asked.limit)
        self.listen()
        with nullcontext() if one else self.receipt(verb):
            for letter in islice(self.chosen(), PAGE if one else None):
                try:
                    text = self.edited(letter)
                except ValueError as error:
                    self.stays(letter, printable(str(error)))
                    if one and (asked.set or asked.payload):  # that was meant for this one
                        break
                    continue
                if asked.dry_run:
                    self.moved += 1
                    say(f"{verb} {letter.id}, {letter.about}")
                elif self.move(letter, text) and one:
                    left = self.queue.command("LLEN", self.dlq)
                    say(f"{verb} {letter.id}, {letter.about}: {left} left in {self.dlq}")
                if self.stopping or self.moved == (1 if one else asked.limit):
                    break
        if one and not self.moved:
            complain("nothing was moved") if self.rest else say(self.nothing())
        elif not (one or self.moved or self.rest or self.partial):
            complain(self.nothing())
        return int(self.partial and not (one and self.moved))

    def edited(self, letter: Letter) -> bytes:
        """The message to put back, each --set done and shown. ValueError if that cannot be."""
        raw = letter.raw
        if self.asked.payload:
            load(raw)
            envelope, before = put(raw.decode(), ("payload",), self.asked.payload)
            self.differs(letter, "payload", before, self.asked.payload)
            raw = envelope.encode()
        text = revive(raw)
        if self.asked.set:
            message = Message.parse(text)
            body = message.own.decode()
            for path, value in self.asked.set:
                body, before = put(body, path, value)
                self.differs(letter, named(path), before, value)
            changed = Message.parse(body.encode())
            facts = (message.attempts, message.first_seen_at, message.kept)
            return changed.noted(*facts).of(changed.raw)
        return text

    def differs(self, letter: Letter, name: str, before: str | None, after: str) -> None:
        say(paint(f"- {letter.id}  {plain(name)}: {plain(before)}", RED))
        say(paint(f"+ {letter.id}  {plain(name)}: {plain(after)}", GREEN))

    def move(self, letter: Letter, text: bytes) -> bool:
        """Replays one letter, not sooner than --rate allows; False if it was gone."""
        while not self.stopping and (wait := self.not_before - time.monotonic()) > 0:
            time.sleep(min(wait, 0.1))
        if self.stopping:
            return False
        self.not_before = time.monotonic() + (1 / self.asked.rate if self.asked.rate else 0.0)
        end = 1 if letter.newer < letter.older else -1
        step = self.queue.replay(letter.raw, text, end, letter.older + 1)
        [word] = self.queue.do(step)
        letter.gone = True
        return self.count(word == b"ok")

    def count(self, by_us: bool) -> bool:
        if by_us:
            self.moved += 1
        else:
            self.rest["had been taken by someone else"] += 1
        return by_us

    def stays(self, letter: Letter, why: str) -> None:
        self.partial = True
        self.rest[f"left in place ({why})"] += 1
        if self.rest.total() <= SHOWN:
            complain(f"{letter.id} stays where it is: {why}")

    def listen(self) -> None:
        """From here on, SIGINT and SIGTERM stop between two letters."""

        def stop(number: int, frame: object) -> None:
            if self.stopping:  # the second one, if Redis does not answer
                raise KeyboardInterrupt
            self.stopping = self.partial = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)

    @contextmanager
    def receipt(self, verb: str) -> Iterator[None]:
        """Says at the end, and at a fault too, how many were moved, how many not, and why."""
        end = "broken off: "
        try:
            yield
            end = "stopped by a signal: " if self.stopping else ""
        finally:
            parts = [f"{n:,} {what}" for what, n in self.rest.most_common(5)]
            say(end + "; ".join([f"{verb} {self.moved:,}", *parts]))

    def do_discard(self) -> int:
        """Removes letters for good, after writing them to a file and asking."""
        asked, chosen = self.asked, islice(self.chosen(), self.asked.limit)
        if asked.dry_run:
            for letter in chosen:
                self.moved += 1
                say(f"would discard {letter.id}, {letter.about}")
            say(f"would discard {self.moved:,}")
            return int(self.partial)
        name = time.strftime(f"discarded-%Y%m%dT%H%M%SZ-{os.getpid()}.jsonl", time.gmtime())
        path = os.path.abspath(asked.file or name)
        n = write_new(path, (saved(self.dlq, letter.raw) for letter in chosen))
        if n and not asked.yes:
            say(f"{n} letters of {self.dlq} are in {path} now.")
            say(f"Type {n} to discard them: ", end="", flush=True)
        if not n or not (asked.yes or sys.stdin.readline().strip() == str(n)):
            os.remove(path)
            complain("nothing was discarded" if n else self.nothing())
            return int(n > 0 or self.partial)
        self.listen()
        part = f"{path}.part"
        try:
            with self.receipt("discarded"):
                write_new(part, self.removed(path))
            os.replace(part, path)  # what others took meanwhile is not ours to restore
        finally:
            with suppress(FileNotFoundError):
                os.remove(part)
        say(f"--restore {path} takes them back")
        return int(self.partial)

    def removed(self, path: str) -> Iterator[str]:
        """Removes the letters in a file, and yields the line of each that was still there."""
        end = 1 if self.asked.newest else -1
        with open(path, encoding="ascii") as file:
            for line in file:
                if self.stopping:
                    return
                gone = self.queue.command("LREM", self.dlq, end, unsaved(self.dlq, line))
                if self.count(gone > 0):
                    yield line

    def do_restore(self) -> int:
        """Puts discarded letters back, at the oldest end; not again those that are there already.

        So it can be killed and run again. But what was restored and has been replayed since then
        would be restored a second time: so the file gets another name when all is done.
        """
        path = self.asked.restore
        if os.path.exists(f"{path}.restored") and not os.path.exists(path):
            raise Problem(f"{path} has been restored: it is {path}.restored now")
        with open(path, encoding="utf-8", errors="replace") as file:
            lost = [unsaved(self.dlq, line) for line in file]
        wanted = set(lost)
        there = Counter(letter.raw for letter in self.walk() if letter.raw in wanted)
        if there:
            self.rest["were there already"] = there.total()
        lost = list((Counter(lost) - there).elements())
        lost.sort(key=lambda raw: Letter(raw).died_ms or 0.0, reverse=True)
        self.listen()
        with self.receipt("restored"):
            for i in range(0, len(lost), PAGE):
                if self.stopping:
                    return 1
                self.queue.command("RPUSH", self.dlq, *lost[i : i + PAGE])
                self.moved += len(lost[i : i + PAGE])
        os.replace(path, f"{path}.restored")
        return 0

    # Steer ───────────────────────────────────────────────────────────────────────────────────

    def do_cancel(self) -> int:
        """Ends a run: its message is dead now. Its worker is refused when it next renews the lease,
        and then interrupts the handler.
        """
        queue, token, owner = self.queue, self.asked.cancel, "-"
        for lease in queue.command("ZRANGE", queue.names.leases, 0, -1):
            if lease.startswith(b"%d " % token):
                owner = lease.decode(errors="replace").partition(" ")[2]
        text, answer = queue.text(token), None
        if text is not None:
            notes = Note.read(queue.command("HGET", queue.names.notes, token) or b"")
            run = Run(token, owner, text, True, notes, start_ms=token // 1000)
            error = f"Cancelled: by somebody at the desk on {host_name()}"
            end = Failure(error, "cancelled", fatal=True, at_ms=queue.now_ms(), owner=owner)
            failures = [*unsettled(run), end]
            [answer] = queue.do(conclude(queue, Policy(), run, parsed(text), failures).step)
        if text is None or answer != b"ok":
            complain(f"no message runs under {token} (any more)")
            return 1
        say(f"cancelled {token}, kind {plain(peek(text).kind, 40)}: it is in {self.dlq} now")
        say(f"its worker, {printable(owner)}, hears of it when it renews its lease")
        return 0

    def do_pause(self) -> int:
        """No worker claims a message any more; what runs goes on, and what fails waits."""
        at = f"since {iso(self.queue.now_ms())} by {host_name()}"
        name, runs = self.queue.names.waiting, self.queue.command("HLEN", self.queue.names.running)
        if self.queue.command("SET", self.queue.names.pause, at, "NX") is None:
            say(f"{name} was paused already, {paused(self.queue)}")
        else:
            say(f"paused: nothing of {name} is claimed until --resume; messages running: {runs}")
        return 0

    def do_resume(self) -> int:
        """Workers claim again, within a second."""
        gone = self.queue.command("DEL", self.queue.names.pause)
        say(f"{self.queue.names.waiting} {'goes on' if gone else 'was not paused'}")
        return 0

    # See the whole ───────────────────────────────────────────────────────────────────────────

    def do_status(self) -> int:
        """Every state, what runs, what is due, the counters and the workers; once or again."""
        before = None
        while True:
            now = survey(self.queue)
            if self.asked.json:
                say(json_line(now), flush=True)
            else:
                lines = list(overview(now, before))
                if self.asked.watch and sys.stdout.isatty():
                    lines = screenful(lines)
                say("\n".join(lines), flush=True)
            if not self.asked.watch:
                return 0
            before = now
            time.sleep(self.asked.watch)

    def do_prometheus(self) -> int:
        """The same as metrics, in the text format of Prometheus; a file is written all at once."""
        text = "\n".join(exposition(survey(self.queue)))
        if path := self.asked.file:
            part = f"{path}.{os.getpid()}"  # an exporter looks for *.prom
            try:
                with open(part, "w", encoding="utf-8") as file:
                    file.write(f"{text}\n")
                os.replace(part, path)
            finally:
                with suppress(FileNotFoundError):
                    os.remove(part)
        else:
            say(text)
        return 0

    def do_health(self) -> int:
        """Names each loop that stands still, and says if there is work and no worker."""
        now, stale = survey(self.queue), self.asked.stale or STALE
        troubles, alive = [], 0
        for worker, loops in now["workers"].items():
            elsewhere = self.asked.here and not worker.startswith(f"{host_name()}:")
            if elsewhere or min(loops.values()) > GONE * stale:
                continue
            still = {loop: idle for loop, idle in loops.items() if idle > stale}
            if "foreman" in loops and "foreman" not in still:
                alive += 1
            for loop, idle in still.items():
                troubles.append(f"{worker}: its {loop} has not moved for {since(idle)}")
        work = sum(now["states"][name]["count"] for name in ("waiting", "running", "retrying"))
        if work and not alive:
            here = "here" if self.asked.here else "anywhere"
            troubles.append(f"no worker is alive {here}; messages to be worked on: {work}")
        say("\n".join(map(printable, troubles)) or f"healthy: workers {alive}, messages {work}")
        if now["paused"]:
            say(f"paused {now['paused']}")
        return int(bool(troubles))

    def do_check(self) -> int:
        """One line for Nagios and its kin: how many, how old, what of; how long messages wait."""
        asked, now = self.asked, self.queue.now_ms()
        there = depth(self.queue)
        page = [Letter(raw, now) for raw in self.queue.command("LRANGE", self.dlq, -SHOWN, -1)]
        age, wait = oldest(page), waited(self.queue) or 0.0
        depths = asked.warn_depth or DEPTH[0], asked.crit_depth or DEPTH[1]
        ages = asked.warn_age or math.inf, asked.crit_age or math.inf
        longest = asked.warn_wait or math.inf
        code = int(wait >= longest)
        for level in (1, 2):
            if there >= depths[level - 1] or (age or 0.0) >= ages[level - 1]:
                code = level
        text = f"DLQ {('OK', 'WARNING', 'CRITICAL')[code]} - {there} dead letters in {self.dlq}"
        text += f", the oldest for {since(age)}: {page[-1].error}" if page else ""
        text += f"; messages wait for {since(wait)} and more" if wait else ""
        pause = paused(self.queue)
        text += f"; paused {pause}" if pause else ""
        bounds = ["" if a == math.inf else f"{a:g}" for a in (*ages, longest)]
        data = f"depth={there};{depths[0]};{depths[1]};0"
        data += f" oldest={age or 0.0:.0f}s;{bounds[0]};{bounds[1]};0"
        data += f" wait={wait:.0f}s;{bounds[2]};;0"
        say(f"{printable(text).replace('|', '/')} | {data}")
        return code


def everything(letter: Letter) -> dict[str, Any]:
    """A letter for programs: what --list shows, and all that it says itself."""
    payload = letter.body or letter.facts.get("payload")
    return letter.row() | letter.facts | {"payload": payload}


def headline(letter: Letter) -> str:
    facts = letter.facts
    words = [facts.get("failed_at"), letter.id, letter.body.get("kind"), facts.get("reason")]
    return fitted("  ".join([*(plain(word, 40) for word in words), letter.error]))


APART = ("payload", "error", "history", "released", "traceback")  # shown in a place of their own


def portrait(letter: Letter) -> Iterator[str]:
    """A letter as lines: its facts, its payload, its failures in the order of time, the last one's
    traceback.
    """
    facts, whole = letter.facts, 10**6
    yield paint(f"{letter.id}  {letter.error}", BOLD)
    if letter.problem:
        yield f"  cannot be replayed: {letter.problem}"
        yield f"  {printable(letter.raw.decode(errors='surrogateescape'), whole)}"
    rows = {"kind": letter.body.get("kind"), "dead for": since(letter.age)}
    rows |= {name: fact for name, fact in facts.items() if name not in APART}
    yield from (f"  {printable(name, 30):16}  {plain(fact)}" for name, fact in rows.items())
    yield "  payload"
    try:
        text = Message.parse(revive(letter.raw)).own.decode()
        yield from (printable(line, whole) for line in outline(text, "    "))
    except ValueError:
        yield f"    {plain(facts.get('payload'), whole)}"
    history = facts.get("history")
    if isinstance(history, list) and history:
        yield "  history"
        yield from past(history, date_ms(facts.get("first_seen_at")))
    if facts.get("released"):
        yield f"    broken off by stops of workers, uncharged: {plain(facts['released'])}"
    if isinstance(facts.get("traceback"), str):
        yield "  traceback of the last run"
        yield from (f"    {printable(x, whole)}" for x in facts["traceback"].splitlines())


def past(history: list[Any], before_ms: float | None) -> Iterator[str]:
    """A line for each failed run: when, how long after the one before, the wait, the error."""
    for entry in history:
        entry = entry if isinstance(entry, dict) else {"error": entry}
        at_ms, wait, most = date_ms(entry.get("at")), entry.get("wait"), entry.get("of")
        after = f"+{(at_ms - before_ms) / 1000:.3f} s" if at_ms and before_ms else ""
        then = "then dead" if wait is None else f"waits {plain(wait, 12)} s"
        then += "" if most is None else f" of {plain(most, 12).removesuffix('.0')} s"
        when = plain(entry.get("at"), 29)
        yield f"    {when:29} {after:>12}  {then:22}  {plain(entry.get('error'))}"
        before_ms = at_ms


def outline(text: str, pad: str) -> Iterator[str]:
    """The members of a JSON object, indented, each value as the producer wrote it."""
    for name, value, inner, _ in members(text)[1]:
        nested = isinstance(value, dict) and value and len(pad) < DEEPEST
        yield f"{pad}{name}:" + ("" if nested else f" {readable(inner.strip())}")
        if nested:
            yield from outline(inner, pad + "  ")


# ── The whole ─────────────────────────────────────────────────────────────────────────────────


def parsed(raw: bytes) -> Message | None:
    """A message taken apart; None if it cannot be read."""
    try:
        return Message.parse(raw)
    except Undecodable:
        return None


def peek(raw: bytes | None) -> Message:
    """A message, to look at; an empty one if it cannot be read."""
    return parsed(raw or b"") or Message(b"", 0, 0, None, {})


def paused(queue: Queue) -> str:
    """Since when, and by whom; "" if nothing is paused."""
    text = queue.command("GET", queue.names.pause)
    return "" if text is None else printable(text.decode(errors="replace"), 100) or "by somebody"


def pairs(flat: list[bytes]) -> Iterator[tuple[str, bytes]]:
    return ((k.decode(errors="replace"), v) for k, v in zip(flat[::2], flat[1::2], strict=True))


# waited: how long the head of the line has been there at least; the line is what waits.
#   KEYS  running retry stats waiting next arrivals
#   →     that time in ms, or -1 if nothing is known
WAITED = Script("waited", "running retry stats waiting next arrivals", CLOCK + LINE + """
local above = string.format('(%.0f', left)
local sample = last and total > left and
  redis.call('ZRANGEBYSCORE', arrivals, above, '+inf', 'LIMIT', 0, 1)[1]
return sample and math.max(now - sample, 0) or -1
""")  # fmt: skip


def waited(queue: Queue) -> float | None:
    """A lower bound (s) of how long the message at the head of the line has waited there.

    The line is first in, first out, as long as producers push left. None if nothing waits, or if
    no worker has looked since it came.
    """
    [known] = queue.do(Step(WAITED, ()))
    return None if known < 0 else known / 1000


def survey(queue: Queue) -> dict[str, Any]:
    """What is where now: counts, ages, runs, due times, counters, workers. Times in seconds.

    Bounded: a thousand of what runs are looked at, the next twenty retries and the oldest twenty
    dead, and only those can be the oldest here. Not one instant: what moves may count twice.
    """
    ask, names, now = queue.command, queue.names, queue.now_ms()
    running: list[dict[str, Any]] = []
    leases = ask("ZRANGE", names.leases, 0, 999)
    for lease in leases:
        token, _, owner = lease.decode(errors="replace").rpartition(" ")
        age = ago(now, int(token) / 1000) if token.isdigit() and len(token) < 18 else None
        running.append({"token": token, "for": age, "kind": None, "owner": owner})
    running.sort(key=lambda run: -(run["for"] or 0.0))
    for run in running[:SHOWN]:
        run["kind"] = peek(ask("HGET", names.running, run["token"])).kind
    due, seen = [], []
    for member, score in pairs(ask("ZRANGE", names.retry, 0, SHOWN - 1, "WITHSCORES")):
        message = peek(member.partition(":")[2].encode())
        wait = round(min(max((float(score) - now) / 1000, -1e9), 1e9), 3)
        due.append({"in": wait, "kind": message.kind, "attempts": message.attempts})
        seen.append(ago(now, date_ms(message.first_seen_at)) or 0.0)
    workers: dict[str, dict[str, float]] = {}
    for i in range(0, ask("ZCARD", names.workers), 1000):
        for member, score in pairs(ask("ZRANGE", names.workers, i, i + 999, "WITHSCORES")):
            name, _, loop = printable(member).rpartition("/")
            workers.setdefault(name, {})[loop] = ago(now, float(score)) or 0.0
    page = [Letter(raw, now) for raw in ask("LRANGE", names.dlq, -SHOWN, -1)]
    states = {
        "waiting": (ask("LLEN", names.waiting) + ask("LLEN", names.next), waited(queue)),
        "running": (ask("HLEN", names.running), running[0]["for"] if running else None),
        "retrying": (ask("ZCARD", names.retry), max(seen, default=None)),
        "dead": (ask("LLEN", names.dlq), oldest(page)),
    }  # fmt: skip
    return {
        "queue": names.waiting,
        "at": iso(now),
        "paused": paused(queue) or None,
        "states": {name: {"count": n, "oldest": age} for name, (n, age) in states.items()},
        "running": running[:SHOWN],
        "due": due[:SHOWN],
        "overdue": ask("ZCOUNT", names.retry, "-inf", now),
        "counters": {
            printable(name): int(n)
            for name, n in pairs(ask("HGETALL", names.stats))
            if n.isdigit() and len(n) < 20
        },
        "workers": workers,
    }


def oldest(page: list[Letter]) -> float | None:
    """The age of the last letter that says when it died."""
    return next((x.age for x in reversed(page) if x.age is not None), None)


def shown_age(state: str, oldest: float | None) -> str:
    """An age for people; of what waits only a lower bound is known."""
    return ("≥ " if state == "waiting" and oldest else "") + since(oldest)


def overview(now: dict[str, Any], before: dict[str, Any] | None) -> Iterator[str]:
    """The survey as lines for people, the counts first; with rates, if there is one before it."""
    workers = list(now["workers"].items())[-SHOWN:]  # those that moved last
    then, passed = (before or now)["counters"], 0.0
    if before:
        passed = ((date_ms(now["at"]) or 0.0) - (date_ms(before["at"]) or 0.0)) / 1000
    tables: dict[str, list[tuple[object, ...]]] = {
        "STATE COUNT OLDEST": [
            (name, s["count"], shown_age(name, s["oldest"]))
            for name, s in now["states"].items()],
        "COUNTER TOTAL RATE": [
            (name, n, f"{(n - then.get(name, 0)) / passed:.1f}/s" if passed else None)
            for name, n in now["counters"].items()],
        "WORKER HANDS MOVED": [
            (name, len(loops.keys() - {"foreman"}), f"{since(max(loops.values()))} ago")
            for name, loops in workers],
        "RUNNING KIND WORKER FOR": [
            (run["token"], run["kind"], run["owner"], since(run["for"])) for run in now["running"]],
        "RETRY DUE KIND ATTEMPTS": [
            (i, f"in {max(0.0, due['in']):.1f} s", due["kind"], due["attempts"])
            for i, due in enumerate(now["due"][:5], 1)],
    }  # fmt: skip
    yield paint(fitted(f"{printable(now['queue'])} at {now['at']}"), BOLD)
    if now["paused"]:
        yield paint(fitted(f"paused {now['paused']}"), RED)
    for head, rows in tables.items():
        if rows:
            yield ""
            yield from columns(head, ([plain(cell, 60) for cell in row] for row in rows))


def screenful(lines: list[str]) -> list[str]:
    """A cleared screen, and as many of the lines as it has room for; the first are the counts."""
    room = shutil.get_terminal_size().lines - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines: without --watch"]
    return ["\x1b[H\x1b[2J" + lines[0], *lines[1:]]


def exposition(now: dict[str, Any]) -> Iterator[str]:
    """The survey in the text format of Prometheus, version 0.0.4."""
    states, workers = now["states"].items(), now["workers"].items()
    metrics: dict[str, list[tuple[dict[str, str], float]]] = {
        "qr_messages gauge Messages in each state.": [
            ({"state": name}, state["count"]) for name, state in states],
        "qr_oldest_seconds gauge Age of the oldest known in each state; waiting: at least.": [
            ({"state": name}, state["oldest"]) for name, state in states if state["oldest"]],
        "qr_paused gauge 1 while nothing is claimed.": [({}, int(now["paused"] is not None))],
        "qr_overdue gauge Retries that are due and not taken yet.": [({}, now["overdue"])],
        "qr_transitions_total counter Transitions since the counters began.": [
            ({"transition": name}, n) for name, n in now["counters"].items()],
        "qr_loop_idle_seconds gauge How long each loop of a worker has not moved.": [
            ({"worker": name, "loop": loop}, idle)
            for name, loops in workers for loop, idle in loops.items()],
    }  # fmt: skip
    escapes = str.maketrans({"\\": r"\\", '"': r"\""})  # of control characters none is left
    for head, samples in metrics.items():
        name, sort, text = head.split(" ", 2)
        yield f"# HELP {name} {text}\n# TYPE {name} {sort}"
        for labels, value in samples:
            known = {"queue": now["queue"]} | labels
            inside = ",".join(f'{key}="{v.translate(escapes)}"' for key, v in known.items())
            yield f"{name}{{{inside}}} {value}"


# ── The command ───────────────────────────────────────────────────────────────────────────────


def letter_id(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{1,10}", text):
        raise ValueError("an id as --list shows it is needed, or its beginning")
    return text


DOES = {
    "list": "a table of letters, the newest first",
    "show": "everything about each",
    "group": "how many there are of each reason and sort of error, and of which kinds",
    "follow": "print letters as they come, until Ctrl-C",
    "discard": "write them to a file, then remove them",
    "restore FILE": "put back what --discard has written to FILE",
    "cancel TOKEN": "end a run (--status shows its token): its message is dead",
    "pause": "nothing is claimed any more, by any worker",
    "resume": "end a pause",
    "status": "the whole queue: states, runs, retries, counters, workers",
    "prometheus": "the same as metrics",
    "health": "exit 1, and name it, if a loop of a worker stands still",
    "check": "a probe in the format of Nagios plug-ins",
}
LOOK, ANY = "list show group", "replay list show group discard"
FITS = f"{ANY} follow"
CHOICES = (
    Option(
        "kind", "KIND", partial(equal, lambda x: x.body.get("kind")),
        "of this kind", beside=FITS),
    Option("reason", "WORD", reason, ", ".join(REASONS), beside=FITS),
    Option(
        "error", "TEXT", error,
        "with TEXT in the error, or matching a /regular expression/", beside=FITS),
    Option("older", "AGE", partial(aged, operator.ge), "dead for so long or longer", beside=ANY),
    Option("newer", "AGE", partial(aged, operator.lt), "dead for less", beside=ANY),
    Option(
        "where", "FIELD=VALUE", where,
        'with this in the payload: user.id=42, items.0.sku=x, "a.b"=1', beside=FITS),
    Option("like", "ID", letter_id, "of the same group as this one", beside=FITS),
    Option("all", "", bool, "every one that is there at the start", beside=ANY),
    Option("limit", "N", count, "at most N", beside=ANY),
    Option("newest", "", bool, "the newest first, as looking does", beside=ANY),
    Option("oldest", "", bool, "the oldest first, as replay and --discard do", beside=ANY),
    Option("dry-run", "", bool, "only say what would be done", beside="replay discard"),
    Option("rate", "N", count, "not more than N a second", beside="replay"),
    Option(
        "set", "FIELD=VALUE", change,
        "change the payload; VALUE is JSON, else text", beside="replay"),
    Option(
        "payload", "FILE", payload,
        "put back this payload instead; - is the standard input", beside="replay"),
    Option("yes", "", bool, "do not ask", beside="discard"),
    Option(
        "file", "FILE", words,
        "where to write to (--discard: default discarded-TIME-PID.jsonl)",
        beside="discard prometheus"),
    Option("json", "", bool, "one JSON object per line", beside=LOOK + " follow status"),
    Option("page", "N", count, "which page of the table (default 1)", beside="list"),
    Option(
        "watch", "SECONDS", seconds,
        "again and again until Ctrl-C (default every 2 s)", beside="status", alone="2"),
    Option(
        "here", "", bool,
        "only the workers of this machine: for a liveness probe", beside="health"),
    Option(
        "stale", "SECONDS", seconds,
        f"what standing still is (default {STALE:g} s)", beside="health"),
    Option(
        "warn-depth", "N", count,
        f"so many letters are a warning (default {DEPTH[0]})", beside="check"),
    Option("crit-depth", "N", count, f"so many are critical (default {DEPTH[1]})", beside="check"),
    Option("warn-age", "AGE", age, "an oldest letter of this age is a warning", beside="check"),
    Option("crit-age", "AGE", age, "an oldest letter of this age is critical", beside="check"),
    Option("warn-wait", "AGE", age, "messages that wait so long are a warning", beside="check"),
    *(option for option in OPTIONS if option.name in ("redis", "queue")),
)  # fmt: skip
ID = Option("id", "ID", letter_id, "this one; the beginning of an id will do", beside=ANY)
CONDITIONS = ("kind", "reason", "error", "older", "newer", "where")
MANY = ("id", "like", "set")  # what else may be given more than once
EPILOG = """\
examples:
  python replay.py                              put the oldest one back
  python replay.py --group                      what do they die of?
  python replay.py --list --reason permanent    which ones are these?
  python replay.py --show 3f2a                  everything about one
  python replay.py --like 3f2a                  put back all that died of the same
  python replay.py --error timeout --rate 10    put these back, ten a second
  python replay.py 3f2a --set user.id=42        correct one and put it back
  python replay.py 3f2a --payload new.json      give it another payload and put it back
  python replay.py --follow --json | while read -r letter; do …; done
  python replay.py --discard --older 30d        throw away; --restore FILE takes it back
  python replay.py --status --watch             the whole queue, again and again

All conditions must hold; of the same one given twice, either. An AGE is a number and s, m, h, d
or w. REDIS_URL and QR_QUEUE do what --redis and --queue do.

exit codes: 0 done; 1 partly done, not found, or not healthy; 2 a wrong option, or Redis needs a
person. --check: 0 fine, 1 warning, 2 critical, 3 unknown."""


def command_line() -> argparse.ArgumentParser:
    """Reads options as lists of texts; what they mean, and whether they fit, comes later."""
    parser = argparse.ArgumentParser(
        prog="replay.py",
        usage="replay.py [what to do] [ID ...] [option ...]",
        description="Puts dead letters back on the queue: the oldest one, if nothing else is said. "
        "Looks at them, throws them away, and shows the whole queue.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"replay.py {VERSION}")
    group = parser.add_argument_group("what to do, if not to replay")
    does = group.add_mutually_exclusive_group()
    for what, text in DOES.items():
        name, _, metavar = what.partition(" ")
        takes = {"metavar": metavar} if metavar else {"action": "store_true"}
        does.add_argument(f"--{name}", help=text, **takes)  # type: ignore[arg-type]
    which, others = map(parser.add_argument_group, ("which letters", "how"))
    which.add_argument("id", metavar="ID", nargs="*", help=ID.help)
    add_options(which, [option for option in CHOICES if option.beside in (ANY, FITS)])
    add_options(others, [option for option in CHOICES if option.beside not in (ANY, FITS)])
    return parser


def read_command(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """What to do, and how. Exits with code 2 for what makes no sense."""
    parser = command_line()
    refuse_dashes(parser, argv)
    asked = parser.parse_intermixed_args(argv)
    conditions = dict[object, list[Condition]]()
    does = [what.split()[0] for what in DOES]
    action = next((name for name in does if getattr(asked, name) not in (None, False)), "replay")
    for option in (ID, *CHOICES):
        typed = getattr(asked, option.attribute)
        if typed and option.beside and action not in option.beside.split():
            source = "ID" if option is ID else f"--{option.name}"
            parser.error(f"{source} goes with {option.beside}, not with {action}")
        if not option.metavar:
            continue
        values = values_of(parser, option, typed)
        many = option.name in (*CONDITIONS, *MANY)
        if len(values) > 1 and not many:
            parser.error(f"--{option.name} can be given once")
        if option.name in CONDITIONS:
            alike = [at_path(x)[0] if option.name == "where" else option.name for x in typed]
            for key, condition in zip(alike, values, strict=True):
                conditions.setdefault(key, []).append(condition)
        setattr(asked, option.attribute, values if many else (values or [None])[0])
    asked.conditions = list(conditions.values())
    if asked.newest and asked.oldest:
        parser.error("--newest or --oldest, not both")
    asked.newest = asked.newest or (action in LOOK.split() and not asked.oldest)
    if asked.payload and (len(asked.id) > 1 or asked.all or asked.conditions or asked.like):
        parser.error("--payload is for one letter: name its ID")
    if action == "cancel":
        if not re.fullmatch("[0-9]{1,16}", asked.cancel):
            parser.error(f"--cancel {printable(asked.cancel, 40)}: a token is needed: see --status")
        asked.cancel = int(asked.cancel)
    if action == "discard":
        if not (asked.id or asked.conditions or asked.all or asked.limit):
            parser.error("--discard needs an id, a condition, --limit or --all")
        if not (asked.yes or asked.dry_run or (sys.stdin and sys.stdin.isatty())):
            parser.error("--discard asks on a terminal; elsewhere it needs --yes")
    return action, asked


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    fill_standard_files()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  it was closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    trouble = 3 if "--check" in argv else 2
    try:
        action, asked = read_command(argv)
    except SystemExit as error:
        return trouble if error.code else 0
    if warning := unknown_variables():
        complain(warning)
    queue, text = Queue(asked.redis, asked.queue), ""
    try:
        code: int = getattr(Desk(queue, asked), f"do_{action}")()
        sys.stdout.flush()
        return code
    except redis.RedisError as error:
        text = f"Redis at {queue.place()} does not answer: {printable(str(error))}"
        text = text if passing(error) else explain(queue, error)
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        trouble = int(action not in f"{LOOK} follow")
        silence()
    except OSError as error:
        text = printable(f"{error.filename or 'the output'}: {error.strerror or error}")
        silence()
    except Problem as error:
        text = str(error)
    except KeyboardInterrupt:
        trouble = int(action not in ("status", "follow"))
    if text and trouble == 3:
        print(f"DLQ UNKNOWN - {text.replace('|', '/')}")
    elif text:
        complain(text)
    return trouble


def silence() -> None:
    """Lets the interpreter's last flush go nowhere, instead of failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
