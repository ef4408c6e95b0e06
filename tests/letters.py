"""Dead letters made for tests, and the desk called inside the test's own process."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from server import Server

import replay
from worker import iso

DLQ = "q:tasks:dlq"
ERROR = "ValueError: bad message (taskproc.py:3 in process)"
SEEN = "2026-11-30T12:00:00.123+00:00"


def envelope(payload: Any = None, **facts: Any) -> bytes:
    """A dead letter as the worker writes it; a payload given as text is spliced in verbatim."""
    text = payload if isinstance(payload, str) else json.dumps(payload or {"kind": "bad"})
    known = {
        "error": ERROR,
        "attempts": 5,
        "first_seen_at": SEEN,
        "reason": "exhausted",
        "failed_at": "2026-11-30T12:00:09.456+00:00",
        "worker": "host:1:ab12/2",
        "token": 1,
    }
    return f'{{"payload": {text}, {json.dumps(known | facts)[1:]}'.encode()


def dead_for(seconds: float, now_ms: float, payload: Any = None, **facts: Any) -> bytes:
    return envelope(payload, failed_at=iso(now_ms - seconds * 1000), **facts)


class Said(NamedTuple):
    code: int
    out: str
    err: str


def desk(server: Server, *argv: object) -> Said:
    """What `python replay.py <argv>` does on this server, without the half second to start."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = os.environ.get("REDIS_URL")
    os.environ["REDIS_URL"] = server.url
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = replay.main([str(arg) for arg in argv])
    finally:
        del os.environ["REDIS_URL"]
        if before is not None:
            os.environ["REDIS_URL"] = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "Traceback" not in err.getvalue()
    return Said(code, out.getvalue(), err.getvalue())
