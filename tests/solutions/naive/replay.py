"""A learner's replay.py: one dead letter goes back, by hand."""

import json

import redis

r = redis.Redis(host="localhost", port=6379, decode_responses=True)

text = r.rpop("q:tasks:dlq")
if text is None:
    print("the dead letter queue is empty")
else:
    letter = json.loads(text)
    msg = letter["payload"]
    msg["attempts"] = 0
    r.lpush("q:tasks", json.dumps(msg))
    print("replayed", msg)
