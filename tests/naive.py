"""A queue as one writes it on the first day. README says what it loses; `make naive` shows it.

PYTHONPATH=. python tests/naive.py works on q:tasks with the taskproc.py beside worker.py.
"""

import json
import os
import random
import time

import redis

from taskproc import process

queue = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))
while True:
    _, text = queue.brpop("q:tasks")
    msg = json.loads(text)
    try:
        process(msg)
    except Exception as error:
        msg["attempts"] = msg.get("attempts", 0) + 1
        if msg["attempts"] < 5:
            time.sleep(random.uniform(0, min(30, 2 ** (msg["attempts"] - 1))))
            queue.lpush("q:tasks", json.dumps(msg))
        else:
            letter = {"payload": msg, "error": str(error), "attempts": msg["attempts"]}
            queue.lpush("q:tasks:dlq", json.dumps(letter))
