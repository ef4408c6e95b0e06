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

Three parts: the arithmetic (`ceiling`, `draw`); the policy (`Policy.verdict`, from an exception to
"retry" or "give up"); a command that shows the waits and writes them to files: python backoff.py
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
import importlib
import math
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta, timezone
from email.utils import parsedate_to_datetime
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
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
            thing = thing.get(name) if isinstance(thing, dict) else getattr(thing, name)
        return thing
    except BaseException:  # an attribute can be code, and code can raise anything
        return None


def kind(exc: BaseException) -> str:
    """The name of an exception's class, short and printable."""
    return ascii(type(exc).__name__)[1:-1][:80] or "an exception without a name"


def names(exc: BaseException) -> set[str]:
    """All names a person may use for an exception's class and its parents."""
    found: set[str] = set()
    for cls in type(exc).__mro__:
        package = str(cls.__module__).partition(".")[0]
        found |= {cls.__name__, f"{package}.{cls.__name__}", f"{cls.__module__}.{cls.__qualname__}"}
    return found


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

# ---- The command: see the waits, and write them to files --------------------------------------

ADVICE = "Mend that, or use another folder: QR_DIR=./lab python backoff.py"
ASCII = str.maketrans("█┃●─┴", "#|o-+")


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="backoff.py",
        description="""\
Shows exponential backoff, its cap and full jitter, and writes three files, in seconds:
schedule.txt (6 waits that double), jitter.txt (20 random waits for attempt 3),
capped.txt (9 waits that double up to 30 s). Needs no Redis.""",
        epilog="""\
examples:
  python backoff.py                      write to /root/qr, or to $QR_DIR if that is set
  QR_DIR=./lab python backoff.py         write to another folder; it is made if missing
  python backoff.py && cat /root/qr/capped.txt

exit codes: 0 written; 2 the folder or a file cannot be written""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)

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


if __name__ == "__main__":
    sys.exit(main())
