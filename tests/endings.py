"""How runs end, as the worker decides it, without a worker and without a Redis."""

from __future__ import annotations

import time

from backoff import Policy
from worker import (
    BURY,
    BURY_UNREAD,
    RETRY,
    Failure,
    Message,
    Queue,
    Run,
    Settlement,
    Splice,
    Undecodable,
    conclude,
    quoted,
)

NOWHERE = Queue("redis://127.0.0.1:1/0")  # builds steps; nothing is sent


def run_of(raw: bytes) -> Run:
    return Run(1, "worker", raw, start_ms=1_796_000_000_000, since=time.monotonic())


def settled(run: Run, max_attempts: int = 1) -> Settlement:
    """How a run ends whose message is undecodable, or whose handler fails."""
    failure = Failure("E: e", at_ms=run.now_ms())
    try:
        message = Message.parse(run.raw)
    except Undecodable:
        message, failure = None, failure._replace(reason="undecodable", fatal=True)
    return conclude(NOWHERE, Policy(max_attempts), run, message, [failure])


def stored(settlement: Settlement) -> bytes:
    """What Redis stores for it: the text of the retry, or the envelope."""
    run, step = settlement.run, settlement.step
    if step.script is BURY_UNREAD:
        before, after = step.args[2:]
        assert isinstance(before, bytes) and isinstance(after, bytes)
        return before + quoted(run.raw) + after
    assert step.script in (RETRY, BURY)
    before, head, middle, tail, after = step.args[-5:]
    return Splice(before, head, middle, tail, after).of(run.raw)


def envelope_of(raw: bytes) -> bytes:
    """The envelope that the worker writes when this message has failed for the last time."""
    return stored(settled(run_of(raw)))


def retried(raw: bytes) -> bytes:
    """The text that the worker writes when this message has failed and is tried again."""
    return stored(settled(run_of(raw), max_attempts=2**53))
