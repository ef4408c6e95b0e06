#!/usr/bin/env python3
"""When to try again, and whether: exponential backoff with a cap and full jitter.

    wait before retry n  =  random.uniform(0, min(cap, base * 2**n))          n = 0, 1, 2, ...

    n                 0     1     2     3     4     5     6   ...   1000   ...   10**18
    at most (s)       1     2     4     8    16    30    30           30             30
    on average (s)  0.5     1     2     4     8    15    15           15             15

Exponential, because a service in trouble needs room, and more room the longer the trouble lasts.
Capped, because beyond some length a wait helps nobody. Full jitter, because a thousand messages
that failed together must not come back together: waiting exactly 8 s only moves the crowd, waiting
anything from 0 to 8 s spreads it out (Marc Brooker, "Exponential Backoff And Jitter", AWS
Architecture Blog, 2015). At attempt 1000 nothing special happens: the power cannot overflow.

The arithmetic (`ceiling`, `draw`) comes first; then the policy (`Policy.verdict`, from an exception
to "retry" or "give up"); then a command that shows the waits and writes them to files: python
backoff.py; and a storm to look at, with jitter and without: python backoff.py --simulate
"""

from __future__ import annotations

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036  an older Python comes this far, and no further
    script = os.path.basename(sys.argv[0])  # also when worker.py was started, and imports us
    script = script if script.endswith(".py") else "backoff.py"
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.stderr.write(f"{script}: Python 3.10 or newer is needed, this is {version}\n")
    raise SystemExit(2)

import argparse
import heapq
import importlib
import linecache
import math
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta, timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from textwrap import wrap
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

# ---- The arithmetic: how long ----------------------------------------------------------------
# The ceiling is certain and can be checked to the digit; only the draw is random.

# Not the generator that `random` shares: a handler that calls `random.seed(42)` would give all
# workers the same waits, and our draws would disturb the sequence that it asked for.
SYSTEM = random.SystemRandom()


def ceiling(n: int, base: float = 1.0, cap: float = 30.0) -> float:
    """The longest wait before retry n, in seconds: min(cap, base * 2**n), for any n from 0 up.

    Raises ValueError if n is negative. Never overflows, and takes no longer for a large n.
    """
    if n < 0:
        raise ValueError(f"retry {n}: the first retry has number 0")
    try:
        return float(min(cap, math.ldexp(base, n)))  # base * 2**n, without building 2**n
    except OverflowError:
        return float(cap)


def draw(n: int, base: float = 1.0, cap: float = 30.0, rng: random.Random = SYSTEM) -> float:
    """One wait before retry n, in seconds: anything from 0 to the ceiling, all equally likely."""
    return rng.uniform(0.0, ceiling(n, base, cap))


# ---- The policy: whether ---------------------------------------------------------------------
# Giving up too early costs a person's time, a retry too many costs seconds: what is not surely
# hopeless is tried again. Plain built-in exceptions are, too; the handler is somebody else's.


class PermanentError(Exception):
    """Raised by a handler to say that trying again is of no use: the message is dead at once.

    The mark is the attribute, not the class: any exception with `retryable = False` says the same.
    So a handler need not import this file, and may import another copy of it.
    """

    retryable = False


class Verdict(NamedTuple):
    """What to do with a failed message, why (one clause for a person), and the least wait (s)."""

    action: Literal["retry", "give up"]
    reason: str
    not_before: float = 0.0  # 0.0: the schedule alone


@dataclass(frozen=True)
class Policy:
    """How often, how long and whether to try again; times in seconds.

    `permanent` names exception classes that are never retried, as `Name`, `package.Name` or
    `full.module.Name`; subclasses count. A value that makes no sense is a ValueError that names
    its field.
    """

    max_attempts: int = 5
    base: float = 1.0
    cap: float = 30.0
    retry_after_cap: float = 900.0
    permanent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise ValueError(f"max_attempts must be an integer from 1 up: {self.max_attempts!r}")
        for field in ("base", "cap", "retry_after_cap"):
            value = getattr(self, field)
            if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
                raise ValueError(f"{field} must be a number of seconds from 0 up: {value!r}")
        if not isinstance(self.permanent, (set, frozenset)):
            raise ValueError(f"permanent must be a set of class names: {self.permanent!r}")

    def wait(self, n: int, not_before: float = 0.0, rng: random.Random = SYSTEM) -> float:
        """The wait before retry n, in seconds, never less than `not_before`.

        The jitter comes on top, so that all who were told "in 60 s" do not return at one instant.
        """
        return not_before + draw(n, self.base, self.cap, rng)

    def verdict(self, exc: BaseException, now: float | None = None) -> Verdict:
        """What to do after this exception. Never raises: what cannot be read is tried again.

        `now` (s since 1970) matters only where an answer gives a date but not its own Date.
        """
        try:
            return self.judge(exc, time.time() if now is None else now)
        except BaseException:
            return Verdict("retry", "an exception that cannot be examined")

    def judge(self, exc: BaseException, now: float) -> Verdict:
        """The rules: what the exception says, then what the operator says, then how it looks."""
        said, own_wait = peek(exc, "retryable"), seconds(peek(exc, "retry_after"))
        if said is False:
            return Verdict("give up", f"{kind(exc)} is marked as not retryable")
        if named := self.permanent & names(exc):
            return Verdict("give up", f"{min(named)} is on the list of permanent errors")

        if type(exc).__module__ == "builtins" and not (vars(exc) or hasattr(exc, "exceptions")):
            return Verdict("retry", kind(exc))  # bare: there is nothing more to read
        status = http_status(exc)
        wait = asked_wait(headers(exc), status, now)
        hopeless = why_hopeless(exc, status, wait)
        if parts := [self.judge(error, now) for error in leaves(exc)]:
            wait = max(part.not_before for part in parts)
            lost = all(part.action == "give up" for part in parts)
            hopeless = f"{kind(exc)} of {len(parts)}, first: {parts[0].reason}" if lost else ""
        if hopeless and said is not True and not own_wait:  # to say when is to say "again"
            return Verdict("give up", hopeless)
        reason = f"HTTP {status}" if status else kind(exc)
        return Verdict("retry", reason, min(own_wait or wait, self.retry_after_cap))


# ---- Reading exceptions by their shape -------------------------------------------------------
# No library is imported, and nothing that an exception does may hurt us. Causes are not followed:
# `raise Mine from theirs` is the handler's own word on what happened.

VALIDATION = {f"{by}.ValidationError" for by in ("jsonschema", "pydantic", "pydantic_core")}

RETRY_AFTER = {"retry-after-ms": 0.001, "x-ms-retry-after-ms": 0.001, "retry-after": 1.0}

# Their `code` is no HTTP status: an exit code; a mail server's reply, in which 4xx means "later".
NOT_HTTP = {"SystemExit", "SMTPResponseException"}

AWS = "response.ResponseMetadata."
STATUS_PATHS = ("status_code", "response.status_code", AWS + "HTTPStatusCode", "status", "code")
HEADER_PATHS = ("headers", "response.headers", AWS + "HTTPHeaders")

PASSING_4XX = {408, 425, 429}  # Request Timeout, Too Early, Too Many Requests
PASSING_IF_TOLD_WHEN = {403, 413}  # GitHub's rate limit; Content Too Large (RFC 9110, 15.5.14)

# AWS answers 400 where others answer 429 or 503; the truth is in its error code.
AWS_PASSING = re.compile("Throttl|TooMany|(Limit|Throughput)Exceeded|SlowDown|Timeout|InProgress")

# The codes that google/rpc/code.proto maps to a 4xx, less those that ask to be tried again.
GRPC_PERMANENT = {
    *("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS"),
}

# SQLSTATE classes (ISO 9075): data exception, integrity constraint violation. Not 42 (no such
# table, no such right): the migration or the grant may be on its way.
SQL_PERMANENT = ("22", "23")


def why_hopeless(exc: BaseException, status: int, wait: float) -> str:
    """Why another try cannot end better, read from the exception's shape; empty if it may."""
    if found := VALIDATION & names(exc):
        return f"not valid: {min(found)}"
    if status:
        passing = status not in range(400, 500) or status in PASSING_4XX
        told_when = status in PASSING_IF_TOLD_WHEN and wait > 0
        throttled = AWS_PASSING.search(str(peek(exc, "response.Error.Code")))
        return "" if passing or told_when or throttled else f"HTTP {status}"
    code = peek(exc, "code")
    if callable(code) and (name := peek(code(), "name")) in GRPC_PERMANENT:
        return f"gRPC {name}"
    state = peek(exc, "sqlstate") or peek(exc, "pgcode")  # psycopg, asyncpg, MySQL; psycopg2
    if isinstance(state, str) and len(state) == 5 and state.startswith(SQL_PERMANENT):
        return f"SQLSTATE {state}"
    return ""


def peek(thing: object, path: str) -> Any:
    """What lies at a dotted path of attributes or dict members; None if it cannot be had."""
    try:
        for name in path.split("."):
            thing = thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)
        return thing
    except BaseException:  # an attribute can be code, and code can raise anything
        return None


def kind(exc: BaseException) -> str:
    """The name of an exception's class, short and printable."""
    return ascii(type(exc).__name__)[1:-1][:80] or "an exception without a name"


def names(exc: BaseException) -> frozenset[str]:
    """All names a person may use for an exception's class and its parents."""
    kind: Any = type(exc)
    return names_of(kind)


@lru_cache(1000)
def names_of(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for cls in kind.__mro__:
        package = str(cls.__module__).partition(".")[0]
        found |= {cls.__name__, f"{package}.{cls.__name__}", f"{cls.__module__}.{cls.__qualname__}"}
    return frozenset(found)


def leaves(exc: BaseException, limit: int = 1000) -> list[BaseException]:
    """The errors in an exception group, at any depth; none if it is no group, or a huge one."""
    found: list[BaseException] = []
    ahead, seen = [exc], {id(exc)}  # a cycle is walked once
    while ahead and len(seen) <= limit:
        error = ahead.pop()
        inner = peek(error, "exceptions")  # by shape: Python 3.10 has no class for it
        if isinstance(inner, tuple) and inner and isinstance(inner[0], BaseException):
            fresh = {id(each): each for each in reversed(inner) if id(each) not in seen}
            seen |= fresh.keys()
            ahead += fresh.values()
        elif error is not exc:
            found.append(error)
    return [] if ahead else found


def http_status(exc: BaseException) -> int:
    """The HTTP status (100...599) that an exception carries, 0 if none."""
    for path in STATUS_PATHS:
        value = peek(exc, path)
        if path == "code" and NOT_HTTP & names(exc):
            continue
        if isinstance(value, int) and 100 <= value <= 599:
            return int(value)
    return 0


def headers(exc: BaseException) -> dict[str, str]:
    """The header fields of the answer in an exception, names in lower case; empty if none."""
    for path in HEADER_PATHS:
        with suppress(Exception):
            pairs = islice(peek(exc, path).items(), 500)
            if fields := {str(name).lower(): str(value)[:200] for name, value in pairs}:
                return fields
    return {}


def seconds(value: object) -> float:
    """A wait in seconds, from a number, a timedelta or decimal digits; 0.0 if it makes no sense."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,10}(\.[0-9]*)?\s*", value):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if 0 < value <= sys.float_info.max else 0.0
    return 0.0


def http_date(text: str) -> float:
    """An HTTP date (all three forms of RFC 9110) as seconds since 1970; 0.0 if it is none."""
    try:
        when = parsedate_to_datetime(text)
        return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


def asked_wait(fields: dict[str, str], status: int, now: float) -> float:
    """The wait in seconds that an answer asks for; 0.0 if it does not ask, or asks for nonsense.

    First Retry-After (RFC 9110: seconds or a date) and its forms in ms; then, if the answer says
    that a limit is used up, when its window ends (IETF RateLimit drafts, GitHub, Discord, ...).
    A date counts from the answer's own Date: our clock may be wrong, and the server's too.
    """
    clock = http_date(fields.get("date", "")) or now
    for name, unit in RETRY_AFTER.items():
        if wait := seconds(fields.get(name)) * unit:
            return wait
    if until := http_date(fields.get("retry-after", "")):
        return max(0.0, until - clock)

    # now: "burst";r=0;t=30      in an earlier draft: limit=9, remaining=0, reset=30
    limit = fields.get("ratelimit", "")
    if used_up := re.search(r'\b(?:r|remaining)=0\b[^"]*?\b(?:t|reset)=([0-9]+)', limit):
        return seconds(used_up[1])
    for prefix in ("ratelimit-", "x-ratelimit-", "x-rate-limit-"):
        if status in (429, 503) or fields.get(prefix + "remaining") in ("0", "0.0"):
            wait = seconds(fields.get(prefix + "reset-after") or fields.get(prefix + "reset"))
            if wait:
                return wait if wait < 1e9 else max(0.0, wait - clock)  # a date in s since 1970
    return 0.0


# ---- What an exception says ---------------------------------------------------------------------
# In one line for a list, and in many for the one who repairs it. Whatever the exception does when
# it is asked: it is somebody else's code.

ERROR = 500  # characters of the line
TRACEBACK = 8000  # bytes of the traceback


def printable(text: str, limit: int = ERROR) -> str:
    """One line that no terminal or log reader can misread: control characters are escaped."""
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


HERE, OURS = os.path.dirname(os.path.realpath(__file__)), ("backoff.py", "worker.py")
LIBRARY = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


@lru_cache(1000)
def author(file: str) -> str:
    """Who wrote a file of code: "us" (and what loads a handler), "library" or "handler"."""
    if file.startswith("<"):  # no file: and where there is no working directory, no path either
        return "us" if "importlib" in file else "library"
    path = os.path.realpath(file)
    ours = os.path.dirname(path) == HERE and os.path.basename(path) in OURS
    if ours or "importlib" in file:
        return "us"
    library = path.startswith(LIBRARY) or INSTALLED.search(path)
    return "library" if library else "handler"


def steps_of(error: BaseException) -> Iterator[tuple[TracebackType, str]]:
    """The steps of a traceback that are not ours, from the outermost in, each with its author."""
    step = error.__traceback__
    while step is not None:
        who = author(step.tb_frame.f_code.co_filename)
        if who != "us":
            yield step, who
        step = step.tb_next


def place(error: BaseException) -> str:
    """` (file:line in function)` of the deepest step in the handler's own code, or of any."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({os.path.basename(error.filename)}:{error.lineno} in <module>)"
    steps = list(steps_of(error))
    own = [step for step, who in steps if who == "handler"] or [step for step, _ in steps]
    if not own:
        return ""
    code = own[-1].tb_frame.f_code
    return f" ({os.path.basename(code.co_filename)}:{own[-1].tb_lineno} in {code.co_name})"


def said(error: BaseException, limit: int) -> str:
    """`Type: text`, whatever the exception does when asked for its text."""
    name = "Exception"
    try:
        name = type(error).__name__ or name
        text = f": {error}"[: limit + 1].rstrip(": ")
    except BaseException as why:  # the handler's own class: anything may come out of it
        text = f": <cannot be told: {type(why).__name__}>"
    return printable(f"{name}{text}", limit)


def causes(error: BaseException) -> list[str]:
    """What is behind an exception, shortened: its notes, the members of a group, its causes."""
    behind = [f"note: {printable(str(note), 100)}" for note in getattr(error, "__notes__", ())[:3]]
    parts = leaves(error)
    behind += [f"{said(part, 100)}{place(part)}" for part in parts[:3]]
    if len(parts) > 3:
        behind.append(f"and {len(parts) - 3} more")
    seen, cause = {id(error)}, error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen and len(seen) < 4:
        hidden = error.__suppress_context__ and cause is not error.__cause__
        if not hidden:
            behind.append(f"from {said(cause, 100)}{place(cause)}")
        seen.add(id(cause))
        error, cause = cause, cause.__cause__ or cause.__context__
    return behind


def describe(error: BaseException) -> str:
    """`Type: text [what is behind it] (file:line in function)` in one line of at most ERROR."""
    where, behind = "", ""
    try:
        where = printable(place(error), ERROR // 3)
        if found := causes(error):
            behind = printable(f" [{'; '.join(found)}", ERROR // 3) + "]"
    except BaseException as why:  # a property of the handler's own class
        behind = f" [the rest cannot be told: {type(why).__name__}]"
    return said(error, ERROR - len(where) - len(behind)) + behind + where


def trace(error: BaseException) -> str:
    """The traceback, at most TRACEBACK bytes; if it is longer, own code stays. Never a local."""
    try:
        text = "".join(traced(error, only_own=False))
        if len(text.encode(errors="replace")) > TRACEBACK:
            text = "".join(traced(error, only_own=True))
        return text.encode(errors="replace")[:TRACEBACK].decode(errors="ignore")
    except BaseException as why:
        return f"cannot be told: {type(why).__name__}"


def traced(error: BaseException, only_own: bool) -> Iterator[str]:
    """The lines of the traceback of an exception and of its causes, as Python writes them."""
    seen = {id(error)}
    cause: BaseException | None = error
    while cause is not None:
        for step, who in steps_of(cause):
            if who == "handler" or not only_own:
                file, name = step.tb_frame.f_code.co_filename, step.tb_frame.f_code.co_name
                yield f'  File "{file}", line {step.tb_lineno}, in {name}\n'
                if line := linecache.getline(file, step.tb_lineno).strip():
                    yield f"    {line}\n"
        yield f"{said(cause, ERROR)}\n"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if id(cause) in seen or len(seen) > 4:
            return
        seen.add(id(cause))
        yield "caused by\n" if cause is not None else ""


# ---- The other backoff -----------------------------------------------------------------------
# PyPI has a package of the same name, and this file hides it from every handler and every library
# that is imported with us in front. So what is not ours is looked up there: `backoff.on_exception`,
# `from backoff import expo`, `import backoff._decorator` work, and what is ours stays ours.


def other_backoff(name: str) -> Any:
    """An attribute that this module lacks: that of the package `backoff`, further along sys.path.

    Nothing is searched before somebody asks, and nothing of the package runs before a name of it
    is wanted. AttributeError if no such package is installed, or it has no such name.
    """
    special = name.startswith("__") and name not in ("__path__", "__version__")
    if __name__ == "backoff" and not special:  # special names are what tools ask of any module
        path = their_path()
        if name == "__path__" and path:  # with it Python finds their modules, and calls them ours
            return path
        if name.startswith("_") and PathFinder.find_spec(f"backoff.{name}", path):
            return importlib.import_module(f"backoff.{name}")  # their modules need each other
        # As a module of ours their __init__ is run once, under Python's own locks, and when it
        # imports `backoff` it gets us. While it runs it may lack the name yet.
        theirs = importlib.import_module("backoff.__init__") if path else None
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def their_path() -> list[str]:
    """The folders of the first package `backoff` on sys.path; empty if there is none.

    A package, not a file: this one, or a copy of it. Not a mere folder of that name either.
    """
    for folder in sys.path:
        found = PathFinder.find_spec("backoff", [folder])
        if found and found.origin and found.submodule_search_locations:
            return found.submodule_search_locations
    return []


if not TYPE_CHECKING:  # else mypy would believe that we have whatever anybody asks for
    __getattr__ = other_backoff

# ---- The files, and pictures of them ---------------------------------------------------------

ADVICE = "Mend that, or use another folder: QR_DIR=./lab python backoff.py"
ASCII = str.maketrans("█┃●─┴▁▂▃▄▅▆▇", "#|o-+..::oo8")


def bars() -> list[str]:
    """The ceilings of attempts 0...8 as bars, one column a second, with the cap as a wall."""
    lines = []
    for n in range(9):
        length, free = ceiling(n), ceiling(n, cap=math.inf)
        note = f"{length:.0f} s" + (f", would be {free:.0f}" if free > length else "")
        lines.append(f"  attempt {n}  {'█' * int(length):30}┃ {note}")
    return lines


def dots(draws: Sequence[str], width: int = 48) -> list[str]:
    """The draws as dots on an axis from 0 to 8 s; those that fall together pile up."""
    columns = [min(int(float(value) / 8 * width), width - 1) for value in draws]
    heights = range(max(map(columns.count, columns)), 0, -1)
    rows = [["●" if columns.count(x) >= y else " " for x in range(width)] for y in heights]
    axis = ["┴" if x % (width // 8) == 0 else "─" for x in range(width + 1)]
    labels = "".join(f"{second:<{width // 8}}" for second in range(9))
    return [f"  {''.join(row).rstrip()}" for row in (*rows, axis)] + [f"  {labels.rstrip()} s"]


def write(path: Path, lines: Sequence[str]) -> None:
    """Replaces a file as a whole: a reader sees the old one or the new one, and no half of any."""
    goal = Path(os.path.realpath(path))  # a symbolic link stays one
    draft = goal.with_name(f".{goal.name}.{os.getpid()}")
    try:
        with draft.open("x", encoding="ascii") as file:
            file.writelines(f"{line}\n" for line in lines)
        draft.replace(goal)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def show(lines: Sequence[str]) -> None:
    """Prints as well as the terminal can. The files are written: a lost picture is no failure."""
    if sys.stdout is None:  # started with stdout closed
        return
    text, encoding = "\n".join(lines), sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeError:
        text = text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(text, flush=True)
    except OSError:  # `| head -1` has left; Python would try once more at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- The simulation: what the waits are for ---------------------------------------------------
# Clients that failed at one instant come back by seven rules, ours among them: the very functions
# above, with the policy's base and cap. Nothing else differs, so there is no network in it, no
# service time and no queue in the server: a call is served in its tick, or refused.

TICKS = 10  # in a second; the server's capacity is per tick
HOUR = 3600 * TICKS  # then the simulation stops: a rule without a cap would never end
BASE, CAP = Policy.base, Policy.cap

# A rule: (n, the last wait, base, cap, generator) -> the wait before retry n.
RULES: dict[str, Callable[[int, float, float, float, random.Random], float]] = {
    "no wait": lambda n, last, base, cap, rng: 0.0,
    "fixed interval": lambda n, last, base, cap, rng: base,
    "exponential": lambda n, last, base, cap, rng: ceiling(n, base, math.inf),
    "exponential + cap": lambda n, last, base, cap, rng: ceiling(n, base, cap),
    "equal jitter": lambda n, last, base, cap, rng: (
        ceiling(n, base, cap) / 2 + draw(n, base, cap, rng) / 2
    ),
    "full jitter": lambda n, last, base, cap, rng: draw(n, base, cap, rng),
    "decorrelated": lambda n, last, base, cap, rng: min(cap, rng.uniform(base, last * 3)),
}
CERTAIN = ("fixed interval", "exponential", "exponential + cap")  # nothing is drawn
ENDLESS = "no giving up"  # full jitter; one message is poison and nobody gives up on it


class Storm(NamedTuple):
    """What one rule did: how many called and how many were served, by tick, for ticks with calls.

    `poison_calls` is how often the poison message was tried; 0 where there is none.
    """

    rule: str
    clients: int
    calls: dict[int, int]
    served: dict[int, int]
    poison_calls: int

    def left(self) -> int:
        return self.clients - sum(self.served.values())

    def peak(self) -> int:
        """Calls in the busiest tick after the first."""
        return max((calls for tick, calls in self.calls.items() if tick > 0), default=0)

    def wait(self, share: float) -> float:
        """Seconds until this share of the clients is served; infinite if that never happens."""
        served = 0
        for tick, some in self.served.items():  # in order of time
            served += some
            if served >= share * self.clients:
                return tick / TICKS
        return math.inf


def storm(rule: str, clients: int, capacity: int, seed: int) -> Storm:
    """All clients call at once; in each tick `capacity` of those who call are served, by lot.

    The others hear 503 and come back by the rule, until all are served or the hour is over. A
    client is a number, and each tick has a list of who comes then: a million clients need no
    objects, no heap, and 120 MB.
    """
    rng = random.Random(seed)
    wait_of = RULES["full jitter" if rule == ENDLESS else rule]
    poison = 0 if rule == ENDLESS else None
    tries, waits = [0] * clients, [BASE] * clients
    coming = defaultdict(list, {0: list(range(clients))})
    calls, served = {}, {}
    for now in range(HOUR + 1):
        if now not in coming:
            continue
        crowd = coming.pop(now)
        calls[now] = len(crowd)
        served[now] = min(capacity, len(crowd))
        failed = []
        for _ in range(served[now]):
            lot = int(rng.random() * len(crowd))
            crowd[lot], crowd[-1] = crowd[-1], crowd[lot]
            client = crowd.pop()
            if client == poison:
                failed.append(client)
        served[now] -= len(failed)
        crowd += failed
        if crowd and rule in CERTAIN:  # who failed together comes back together: one wait for all
            wait = wait_of(len(calls) - 1, BASE, BASE, CAP, rng)
            coming[now + math.ceil(wait * TICKS)] = crowd
            continue
        for client in crowd:
            waits[client] = wait_of(tries[client], waits[client], BASE, CAP, rng)
            tries[client] += 1
            coming[now + max(1, math.ceil(waits[client] * TICKS))].append(client)
    return Storm(rule, clients, calls, served, 0 if poison is None else tries[poison])


def terminal_width() -> int:
    return min(max(shutil.get_terminal_size().columns, 30), 120) - 1


def span(seconds: float) -> str:
    """A length of time for a person."""
    if seconds == math.inf:
        return "over 1 h"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def ending(one: Storm) -> str:
    """When the last client was served, or how many were not."""
    return f"{one.left():,} left" if one.left() else span(one.wait(1))


def table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Rows as aligned columns under the heads in the first; as a list where these are too wide."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{size}}" for cell, size in zip(row, widths, strict=True)]
        cells[0] = f"{row[0]:{widths[0]}}"
        lines.append("  ".join(cells))
    if len(lines[0]) <= width:
        return lines
    lines = []
    for row in rows[1:]:
        lines += [f"{head}: {cell}" for head, cell in zip(rows[0], row, strict=True)] + [""]
    return lines[:-1]


def waves(one: Storm, columns: int) -> list[str]:
    """A storm as three rows of blocks; a column is half a second, its height the busiest tick."""
    heights = []
    for x in range(columns):
        ticks = range(x * TICKS // 2, (x + 1) * TICKS // 2)
        busiest = max(one.calls.get(tick, 0) for tick in ticks)
        heights.append(math.ceil(24 * busiest / one.clients))  # in eighths of a row
    rows = []
    for floor in (16, 8, 0):
        blocks = [" ▁▂▃▄▅▆▇█"[min(8, max(0, height - floor))] for height in heights]
        rows.append(f"  {''.join(blocks)}".rstrip())
    return rows


def claims(storms: dict[str, Storm], capacity: int) -> list[str]:
    """Why jitter, why a cap, why giving up: three claims in numbers of this run."""
    fixed, capped = storms["fixed interval"], storms["exponential + cap"]
    free, full, endless = storms["exponential"], storms["full jitter"], storms[ENDLESS]
    tenth, last_run = ceiling(10, cap=math.inf), sum(map(ceiling, range(Policy.max_attempts - 1)))
    return [
        f"{fixed.clients:,} at one instant. Without jitter they stay one crowd: after the first "
        f"second {fixed.peak():,} come in one tick, to a server that takes {capacity:,} and then "
        f"has nothing to do until the next wave. Exponential + cap: {ending(capped)}. "
        f"Full jitter: {ending(full)}.",
        f"No cap. The wait before retry 10 is {tenth:,.0f} s, {tenth / 60:.0f} minutes, even if "
        f"the server has been well for 16 of them. Exponential without a cap: {ending(free)}. "
        f"With the cap nobody waits longer than {CAP:.0f} s.",
        f"No giving up. One poison message has failed {endless.poison_calls:,} times within the "
        f"hour and goes on, {86400 / (CAP / 2):,.0f} times a day, for ever. Given up after "
        f"{Policy.max_attempts} runs it is out of the way within {last_run:.0f} s of waiting.",
    ]


def simulate(clients: int, capacity: int, seed: int, svg: Path | None) -> int:
    """Runs the storms; shows pictures, a table, three claims. The exit code."""
    rules = [rule for rule in RULES if rule != "no wait"] + [ENDLESS]
    storms = {rule: storm(rule, clients, capacity, seed) for rule in rules}
    if svg:
        try:
            write(svg, figure(storms, capacity))
        except OSError as error:
            print(f"backoff.py: cannot write {svg}: {error.strerror or error}", file=sys.stderr)
            return 2

    width = terminal_width()
    columns = max(20, width - 2)
    axis = "".join("┴" if x % 10 == 0 else "─" for x in range(columns))
    marks = "".join(f"{x // 2:<10}" for x in range(0, columns - 4, 10)).rstrip() + " s"
    lines = wrap(
        f"{clients:,} clients fail at one instant and try again. The server takes {capacity:,} "
        f"calls per tick of 0.1 s; the others hear 503. Base {BASE:.0f} s, cap {CAP:.0f} s. Behind "
        "each name: when the last client is served. Full height: all of them in one tick.",
        width,
    )
    rows = [("rule", "peak req/s", "calls", "last served", "median wait", "p99 wait")]
    for one in storms.values():
        lines += ["", f"{one.rule}: {ending(one)}", *waves(one, columns), f"  {axis}", f"  {marks}"]
        load = f"{one.peak() * TICKS:,}", f"{sum(one.calls.values()):,}"
        rows.append((one.rule, *load, ending(one), span(one.wait(0.50)), span(one.wait(0.99))))
    lines += ["", *table(rows, width), ""]
    lines += wrap("Peak: in the busiest tick after the first. Left: not served in one hour.", width)
    for number, claim in enumerate(claims(storms, capacity), 1):
        lines += ["", *wrap(f"{number}. {claim}", width, subsequent_indent="   ")]
    show(lines + (["", f"wrote {svg}"] if svg else []))
    return 0


# The drawing: 60 s from left to right, a panel for each rule; upwards the busiest tick of each
# 0.2 s, logarithmic, from a tenth of the capacity to all clients at once.

STYLE = """\
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #59636e }
.strong { font-size: 16px; font-weight: 600; fill: #1f2328 } .large { font-size: 22px }
.end { text-anchor: end } .mid { text-anchor: middle } .small { font-size: 11px }
.paper { fill: #ffffff } .line { stroke: #d1d9e0 }
.limit { stroke: #59636e; stroke-dasharray: 3 3 }
.served { fill: #2f81f7 } .refused { fill: #f0643c }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .strong { fill: #f0f6fc }
.paper { fill: #0d1117 } .line { stroke: #30363d } .limit { stroke: #9198a1 }
.served { fill: #388bfd } .refused { fill: #f7845f }
}"""
LEFT, RIGHT, TOP, PANEL, HIGH = 300, 900, 96, 92, 66  # pixels; 600 wide: 2 for each 0.2 s


def skyline(heights: Sequence[float], floor: float) -> str:
    """The outline of columns that stand on a floor, as an SVG path."""
    path, last = f"M{LEFT} {floor:.1f}", 0.0
    for column, height in enumerate(heights):
        if height != last:
            path += f"H{LEFT + 2 * column}V{floor - height:.1f}"
            last = height
    return f"{path}H{RIGHT}V{floor:.1f}Z"


def figure(storms: dict[str, Storm], capacity: int) -> list[str]:
    """The storms as an SVG document, for light and dark pages."""
    full, endless = storms["full jitter"], storms[ENDLESS]
    most = max(full.clients, capacity * 10)
    tenth = ceiling(10, cap=math.inf)
    remarks = {
        "exponential": f"retry 10 waits {tenth:,.0f} s: {tenth / 60:.0f} minutes",
        "exponential + cap": f"and so on, every {CAP:.0f} s",
        "full jitter": "the rule of this queue",
        ENDLESS: f"one poison message: {endless.poison_calls:,} failures",
    }

    def height(calls: int) -> float:
        if calls == 0:
            return 0.0
        return max(2.0, HIGH * math.log(10 * calls / capacity) / math.log(10 * most / capacity))

    def text(x: float, y: float, words: str, kind: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{words}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
        return f'<path d="M{x1:.0f} {y1:.1f}L{x2:.0f} {y2:.1f}" class="{kind}"/>'

    bottom, limit = TOP + PANEL * len(storms), height(capacity)
    title = f"{full.clients:,} clients fail at one instant and try again"
    server = f"The server takes {capacity * TICKS:,} requests/s; the others hear 503."
    scale = "Height: requests/s in the busiest 0.1 s, logarithmic."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 {bottom + 40}" role="img">',
        f"<title>{title}: {len(storms)} rules compared</title>",
        f"<style>\n{STYLE}\n</style>",
        '<rect width="100%" height="100%" rx="8" class="paper"/>',
        text(24, 40, title, "strong large"),
        text(24, 64, f"{server} {scale}"),
        f'<rect x="{RIGHT - 112}" y="55" width="10" height="10" class="served"/>',
        text(RIGHT - 97, 64, "served"),
        f'<rect x="{RIGHT - 42}" y="55" width="10" height="10" class="refused"/>',
        text(RIGHT - 27, 64, "refused"),
        text(LEFT - 6, TOP, "requests/s", "end small"),
    ]
    for second in range(0, 61, 10):
        x = LEFT + 10 * second
        parts += [line(x, TOP, x, bottom, "line"), text(x, bottom + 18, f"{second} s", "mid")]
    for number, one in enumerate(storms.values(), 1):
        floor = TOP + PANEL * number - 6
        came, done = [], []
        for column in range(300):
            tick = max(2 * column, 2 * column + 1, key=lambda tick: one.calls.get(tick, 0))
            calls, served = one.calls.get(tick, 0), one.served.get(tick, 0)
            came.append(height(calls) if calls > served else 0.0)
            done.append(height(served))
        load = f"{sum(one.calls.values()):,} calls, peak {one.peak() * TICKS:,}/s"
        parts += [
            text(24, floor - 44, one.rule, "strong"),
            text(24, floor - 24, load),
            text(24, floor - 6, f"median {span(one.wait(0.50))}, p99 {span(one.wait(0.99))}"),
            f'<path d="{skyline(came, floor)}" class="refused"/>',
            f'<path d="{skyline(done, floor)}" class="served"/>',
            line(LEFT, floor, RIGHT, floor, "line"),
            line(LEFT, floor - limit, RIGHT, floor - limit, "limit"),
            text(LEFT - 6, floor - limit + 4, f"{capacity * TICKS:,}", "end small"),
            text(LEFT - 6, floor - HIGH + 4, f"{most * TICKS:,}", "end small"),
            text(RIGHT + 16, floor - 34, ending(one), "strong"),
            text(RIGHT + 16, floor - 15, "after one hour" if one.left() else "until the last"),
        ]
        if one.rule in remarks:
            parts.append(text(LEFT + 330, floor - limit - 14, remarks[one.rule]))
    return [*parts, "</svg>"]


# The published experiment: Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
# 2015. The numbers are those of its simulator: github.com/aws-samples/aws-arch-backoff-simulator

CONTENDERS = ("no wait", "exponential + cap", "equal jitter", "full jitter", "decorrelated")


def occ(rule: str, clients: int, rng: random.Random) -> tuple[int, float]:
    """One contest for one database row: the writes sent, and the ms until each client has had one.

    Optimistic concurrency control: read the row's version, write if it is still the same; else
    wait and read again. Each way through the network takes |normal(10, 2)| ms; base 5 ms, cap
    2000 ms; the first wait is that of n = 1.
    """

    def net() -> float:
        return abs(rng.normalvariate(10, 2))

    version, writes, done = 0, 0, 0.0
    tries, waits, seen = [0] * clients, [5.0] * clients, [0] * clients
    events = [(net(), client, "read") for client in range(clients)]
    heapq.heapify(events)
    while events:
        now, client, what = heapq.heappop(events)
        answer = now + net()
        if what == "read":
            seen[client] = version
            heapq.heappush(events, (answer + net(), client, "write"))
            continue
        writes += 1
        done = max(done, answer)
        if seen[client] == version:
            version += 1
        else:
            tries[client] += 1
            waits[client] = RULES[rule](tries[client], waits[client], 5.0, 2000.0, rng)
            heapq.heappush(events, (answer + waits[client] + net(), client, "read"))
    return writes, done


def contest(rule: str, clients: int, seed: int, runs: int = 20) -> tuple[float, float]:
    """The means of some runs: writes, and seconds."""
    rng = random.Random(seed)
    results = [occ(rule, clients, rng) for _ in range(runs)]
    writes, ms = (sum(column) / runs for column in zip(*results, strict=True))
    return writes, ms / 1000


def occ_report(seed: int) -> list[str]:
    """Work and time of 10...100 clients, and what was published about them."""
    width = terminal_width()
    work, took = [["clients", *CONTENDERS]], [["clients", *CONTENDERS]]
    for clients in range(10, 101, 10):
        means = [contest(rule, clients, seed) for rule in CONTENDERS]
        work.append([str(clients), *(f"{writes:,.0f}" for writes, _ in means)])
        took.append([str(clients), *(f"{seconds:.2f}" for _, seconds in means)])
    full, plain = (contest(rule, 100, seed)[0] for rule in ("full jitter", "exponential + cap"))
    published = (
        f"Of 100 clients, full jitter needs {100 * full / plain:.0f}% of the writes that backoff "
        "without jitter needs; published is less than half. Equal jitter: as many writes, but "
        "longer. Decorrelated: more writes, a little less time. Without jitter: longest by far."
    )
    return [
        *wrap("Clients contend for one row: read it, write it if nobody else has.", width),
        *("", "Work: writes until each has succeeded", *table(work, width)),
        *("", "Time: seconds until the last has", *table(took, width), ""),
        *wrap(published, width),
    ]


# ---- The command -----------------------------------------------------------------------------


def lab() -> int:
    """Writes the exercise's three files, then shows them. The exit code."""
    place = os.environ.get("QR_DIR", "/root/qr")
    if not place:
        print("backoff.py: QR_DIR is empty: name a folder, or unset it", file=sys.stderr)
        return 2
    folder = Path(place)
    files = {
        "schedule.txt": [f"attempt={n} wait={ceiling(n, cap=math.inf):.0f}" for n in range(6)],
        "jitter.txt": [f"{draw(3):.6f}" for _ in range(20)],
        "capped.txt": [f"{ceiling(n):.0f}" for n in range(9)],
    }
    doing = f"make the folder {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in files.items():
            doing = f"write {folder / name}"
            write(folder / name, lines)
    except OSError as error:
        print(f"backoff.py: cannot {doing}: {error.strerror or error}. {ADVICE}", file=sys.stderr)
        return 2

    show(
        [
            "Exponential: each failure doubles the longest wait. Capped: never over 30 s.",
            "",
            *bars(),
            "",
            "Full jitter: the real wait is any time up to that. Twenty draws for attempt 3:",
            "",
            *dots(files["jitter.txt"]),
            "",
            *(f"wrote {folder / name} ({len(lines)} lines)" for name, lines in files.items()),
        ]
    )
    return 0


def whole(least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers within bounds, for an option."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"a whole number {least}...{most}, not {text[:40]!r}")
        return int(text)

    return read


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="backoff.py",
        description="""\
Shows exponential backoff, its cap and full jitter, and writes three files, in seconds:
schedule.txt (6 waits that double), jitter.txt (20 random waits for attempt 3),
capped.txt (9 waits that double up to 30 s). Needs no Redis.

With --simulate it writes none of these, but shows what the waits are for: thousands of
clients fail at one instant, and come back by seven different rules.""",
        epilog="""\
examples:
  python backoff.py                      write to /root/qr, or to $QR_DIR if that is set
  QR_DIR=./lab python backoff.py         write to another folder; it is made if missing
  python backoff.py && cat /root/qr/capped.txt
  python backoff.py --simulate           ten thousand clients; well under a second
  python backoff.py --simulate --svg storm.svg             the same as a drawing
  python backoff.py --simulate --clients 1000000           15 s, 120 MB
  python backoff.py --simulate --clients 500 --capacity 5  five served per 0.1 s
  python backoff.py --simulate --model occ                 the published experiment

exit codes: 0 done; 2 a wrong option, or a folder or file that cannot be written; 130 Ctrl-C""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--simulate", action="store_true", help="show a storm; write no files")
    group = parser.add_argument_group("with --simulate")
    number = whole(1, 10**7)
    tick = "how many the server serves per tick of 0.1 s; the others hear 503 (N / 100)"
    same = "of the random numbers: the same seed, the same storm (1)"
    occ = "occ: clients contend for one database row, as AWS has published it (storm)"
    group.add_argument("--clients", metavar="N", type=number, help="how many fail at once (10000)")
    group.add_argument("--capacity", metavar="C", type=number, help=tick)
    group.add_argument("--seed", metavar="S", type=whole(0, 10**18 - 1), help=same)
    group.add_argument("--svg", metavar="FILE", type=Path, help="draw the storm into a file, too")
    group.add_argument("--model", choices=["storm", "occ"], help=occ)
    asked = parser.parse_args(argv)
    given = {name for name, value in vars(asked).items() if value is not None} - {"simulate"}
    if given and not asked.simulate:
        parser.error(f"argument --{min(given)}: only together with --simulate")
    if asked.model == "occ" and (strange := given - {"model", "seed"}):
        parser.error(f"argument --{min(strange)}: not together with --model occ")

    if not asked.simulate:
        return lab()
    seed = 1 if asked.seed is None else asked.seed
    try:
        if asked.model == "occ":
            show(occ_report(seed))
            return 0
        clients = asked.clients or 10_000
        return simulate(clients, asked.capacity or max(1, clients // 100), seed, asked.svg)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
