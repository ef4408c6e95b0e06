"""The work. This is the file to replace: `process(msg)` gets one message and does it.

How a run ends is how `process` ends. Push one of each and watch:

    kind         what process does           what happens to the message
    ok           returns                     done
    slow         sleeps `seconds` (3)        done; shows that a stop waits for it
    bad          raises ValueError           retried after backoff; dead after 5 failed runs
    flaky        fails twice, then works     done at the third run
    busy         raises with retry_after     retried, not before that (as HTTP 429 or 503)
    permanent    raises PermanentError       dead at once: no retry can help
    missing      raises an HTTP 404          dead at once: a reference that does not exist
    crash        kills its own process       a failed run like any other: worker_died
    hang         never returns               a failed run at the time limit: timed_out

`msg` is the parsed message, with `attempts` (failed runs so far) once it has failed. A worker may
die at any moment and the message then runs again, so make the work idempotent: what has a second
effect the second time needs a key of its own to be recognised by. If you write
`process(msg, run)` you also get the run: `run.token` (a number that only rises: a store can refuse
a late writer by it), `run.checkpoint(stage)`, `run.stage` and `run.push(message)`.
"""

import os
import signal
import time
from typing import Any

from backoff import PermanentError

EXAMPLE = True  # the worker warns at start that this does no real work; not so in yours


class Busy(Exception):
    """The other side asks for time. Any exception with `retry_after` (seconds) is obeyed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"busy, come back in {seconds:g} s")
        self.retry_after = seconds


class HTTPStatus(Exception):
    """Has the shape of every HTTP library's error: a number in `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def process(msg: dict[str, Any]) -> None:
    """Does the work that the message asks for; see the table above."""
    kind = msg.get("kind")
    if kind == "slow":
        time.sleep(msg.get("seconds", 3))
    elif kind == "bad":
        raise ValueError("bad message")
    elif kind == "flaky" and msg.get("attempts", 0) < 2:
        raise ConnectionError("the other side hung up")
    elif kind == "busy" and not msg.get("attempts"):
        raise Busy(msg.get("seconds", 1))
    elif kind == "permanent":
        raise PermanentError("no such template: welcome-2019")
    elif kind == "missing":
        raise HTTPStatus(404)
    elif kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        while True:
            time.sleep(1)
    print(f"done kind={kind}")
