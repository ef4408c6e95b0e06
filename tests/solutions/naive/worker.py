"""A learner's worker.py, as the exercise suggests it: BRPOP, sleep, LPUSH."""

import json
import random
import sys
import time
from datetime import datetime, timezone

import redis

sys.path.insert(0, "/opt/app")
from taskproc import process

MAX_ATTEMPTS = 5
r = redis.Redis()


def now():
    return datetime.now(timezone.utc).isoformat()


def requeue(msg):
    time.sleep(random.uniform(0, min(30, 2 ** (msg["attempts"] - 1))))
    r.lpush("q:tasks", json.dumps(msg))
    line = f"attempts={msg['attempts']}"
    print(line, flush=True)
    with open("/root/qr/requeue.out", "a") as out:
        out.write(line + "\n")


def bury(msg, error):
    attempts = msg.pop("attempts")
    first_seen_at = msg.pop("first_seen_at")
    envelope = {
        "payload": msg,
        "error": repr(error),
        "attempts": attempts,
        "first_seen_at": first_seen_at,
    }
    r.lpush("q:tasks:dlq", json.dumps(envelope))


while True:
    item = r.brpop("q:tasks", timeout=1)
    if item is None:
        continue
    msg = json.loads(item[1])
    msg.setdefault("first_seen_at", now())
    try:
        process(msg)
    except Exception as error:
        msg["attempts"] = msg.get("attempts", 0) + 1
        if msg["attempts"] < MAX_ATTEMPTS:
            requeue(msg)
        else:
            bury(msg, error)
