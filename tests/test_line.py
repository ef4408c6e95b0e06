"""How long the line has waited: a lower bound, which costs no claim anything."""

from __future__ import annotations

import random
import time
from collections import deque

import redis

from replay import waited
from worker import Claim, Queue, Run, Splice

DAY = 86_400_000  # ms


def beat(queue: Queue) -> None:
    queue.do(queue.beat({"w/foreman": 0.0}))


def take(queue: Queue) -> None:
    """Claims a message and settles it."""
    [reply] = queue.do(queue.claim("me", 30))
    queue.do(queue.done(run_of(reply)))


def run_of(reply: list[bytes]) -> Run:
    run = Claim.of(reply, "me").run
    assert run
    return run


def age(client: redis.Redis, ms: int) -> None:
    """Makes all samples older."""
    for member, score in client.zrange("q:tasks:arrivals", 0, -1, withscores=True):
        client.zrem("q:tasks:arrivals", member)
        client.zadd("q:tasks:arrivals", {str(int(member) - ms): score})


def test_the_head_has_waited_since_the_first_look_that_counted_it(
    queue: Queue, redis_client: redis.Redis
) -> None:
    assert waited(queue) is None
    redis_client.lpush("q:tasks", "{}", "{}")
    assert waited(queue) is None  # nobody has looked
    beat(queue)
    age(redis_client, DAY)
    take(queue)  # the second of the two was there, too
    assert 86_400 <= (waited(queue) or 0) < 86_500
    redis_client.lpush("q:tasks", "{}")
    beat(queue)
    assert 86_400 <= (waited(queue) or 0) < 86_500
    take(queue)
    assert (waited(queue) or 0) < 100  # the third came today
    take(queue)
    beat(queue)
    assert waited(queue) is None
    assert redis_client.zcard("q:tasks:arrivals") <= 1


def test_a_pause_is_seen_however_few_look(queue: Queue, redis_client: redis.Redis) -> None:
    """A line that stands still needs no new samples, and a rung doorbell changes nothing."""
    redis_client.lpush("q:tasks", *["{}"] * 3)
    beat(queue)
    age(redis_client, DAY)
    queue.ring(1)
    for _ in range(3):
        beat(queue)
    assert redis_client.zcard("q:tasks:arrivals") == 1
    assert (waited(queue) or 0) >= 86_400


def test_samples_mean_nothing_once_counters_were_lost(
    queue: Queue, redis_client: redis.Redis
) -> None:
    redis_client.lpush("q:tasks", *["{}"] * 5)
    for _ in range(3):
        take(queue)
    beat(queue)
    age(redis_client, DAY)
    redis_client.delete("q:tasks:stats")
    assert waited(queue) is None
    beat(queue)
    assert (waited(queue) or 0) < 100
    redis_client.set("q:tasks:stats", "of another type")
    beat(queue)
    assert (waited(queue) or 0) < 100


def test_samples_stay_few(queue: Queue, redis_client: redis.Redis) -> None:
    """Between two of them lies a 200th of the time since the first."""
    redis_client.lpush("q:tasks", "{}")
    beat(queue)
    age(redis_client, DAY)
    redis_client.lpush("q:tasks", "{}")
    beat(queue)
    for _ in range(20):
        redis_client.lpush("q:tasks", "{}")
        beat(queue)
    assert redis_client.zcard("q:tasks:arrivals") == 2


def test_the_bound_is_never_above_the_truth(queue: Queue, redis_client: redis.Redis) -> None:
    """Random pushes, runs, retries and looks, against a list of when each message came."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    line = deque[int]()  # when those that wait came, the head first
    running = list[Run]()
    told = 0
    for _ in range(400):
        act = rng.choice(["push", "push", "claim", "claim", "done", "retry", "beat", "sleep"])
        if act == "push":
            line.append(queue.now_ms())
            redis_client.lpush("q:tasks", "{}")
        elif act == "claim":
            retrying = redis_client.zcard("q:tasks:retry")
            [reply] = queue.do(queue.claim("me", 30))
            if reply[0] == b"run":
                running.append(run_of(reply))
                if redis_client.zcard("q:tasks:retry") == retrying:
                    line.popleft()
        elif act == "done" and running:
            queue.do(queue.done(running.pop()))
        elif act == "retry" and running:
            queue.do(queue.retry(running.pop(), 0.001, Splice(b"{}")))
        elif act == "beat":
            beat(queue)
        elif act == "sleep":
            time.sleep(0.002)
        if (bound := waited(queue)) is not None:
            assert line, seed
            assert bound * 1000 <= queue.now_ms() - line[0], seed
            told += bound > 0
    assert told, seed
