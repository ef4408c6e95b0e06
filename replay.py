#!/usr/bin/env python3
"""Puts dead letters back on the queue, by hand: the oldest one, if nothing else is asked.

It moves and never copies: each letter leaves `q:tasks:dlq` in the same atomic step that puts its
message on `q:tasks`. Attempts start again at 0; the history of failures stays with the message.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import redis

from worker import Queue, Undecodable, explain, load, passing, printable, revive

PAGE = 200  # dead letters read at a time


def letter_id(raw: bytes) -> str:
    """Ten digits that name a dead letter, whoever wrote it: of equal ones, all."""
    return hashlib.sha256(raw).hexdigest()[:10]


def oldest(queue: Queue) -> int:
    """Moves the oldest dead letter that can be read; returns the exit code."""
    page = queue.command("LRANGE", queue.names.dlq, -PAGE, -1)
    for raw in reversed(page):
        try:
            text = revive(raw)
        except ValueError as error:
            print(f"{letter_id(raw)} stays where it is: {printable(str(error))}", file=sys.stderr)
            continue
        [word] = queue.do(queue.replay(raw, text))
        if word == b"gone":  # someone else was quicker
            continue
        left = queue.command("LLEN", queue.names.dlq)
        print(f"replayed {letter_id(raw)}, {about(raw)}: {left} left in {queue.names.dlq}")
        return 0
    if page:
        print("nothing was moved", file=sys.stderr)
        return 1
    print(f"{queue.names.dlq} is empty: there is nothing to replay")
    return 0


def about(raw: bytes) -> str:
    facts = load(raw)
    body = facts["payload"]
    if isinstance(body, str):
        try:
            body = load(body.encode(errors="surrogateescape"))
        except Undecodable:
            body = {}
    return printable(f"kind {body.get('kind', '-')}, {facts.get('error', 'no error noted')}", 200)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    argparse.ArgumentParser(prog="replay.py").parse_args(argv)
    queue = Queue(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))
    try:
        return oldest(queue)
    except redis.RedisError as error:
        text = printable(str(error)) if passing(error) else explain(queue, error)
        print(f"replay: {text}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
