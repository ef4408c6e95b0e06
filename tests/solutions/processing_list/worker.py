"""A worker that keeps what it runs in a processing list, as Redis's own manual suggests.

It differs from the naive one wherever a learner may: environment instead of constants, text instead
of bytes, lines in the middle of a log, seconds since 1970, and an end of its own on SIGTERM.
"""

import json
import os
import random
import signal
import sys
import time

import redis

sys.path.append(os.environ.get("QR_APP_DIR", "/opt/app"))
import taskproc

QUEUE, PROCESSING, DLQ = "q:tasks", "q:tasks:processing", "q:tasks:dlq"
client = redis.Redis.from_url(
    os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"), decode_responses=True
)
running = True


def stop(*_):
    global running
    running = False


def settle(text, *push):
    """Takes a message out of the processing list and puts it where it belongs, in one step."""
    with client.pipeline(transaction=True) as step:
        if push:
            step.lpush(*push)
        step.lrem(PROCESSING, 1, text)
        step.execute()


def failed(text, error):
    message = json.loads(text)
    attempts = message.pop("attempts", 0) + 1
    first_seen_at = message.pop("first_seen_at", time.time())
    if attempts >= 5:
        letter = {
            "payload": message,
            "error": f"{type(error).__name__}: {error}",
            "attempts": attempts,
            "first_seen_at": first_seen_at,
        }
        settle(text, DLQ, json.dumps(letter))
        return
    message.update(attempts=attempts, first_seen_at=first_seen_at)
    wait = random.uniform(0, min(30, 2 ** (attempts - 1)))
    time.sleep(wait)
    settle(text, QUEUE, json.dumps(message))
    print(f"{time.ctime()} requeued attempts={attempts} wait={wait:.2f}")


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
while client.lmove(PROCESSING, QUEUE, "LEFT", "RIGHT"):  # what a dead worker has left
    pass
while running:
    text = client.brpoplpush(QUEUE, PROCESSING, timeout=1)
    if text is not None:
        try:
            taskproc.process(json.loads(text))
        except Exception as error:
            failed(text, error)
        else:
            settle(text)
