"""How long a failed message waits, as the retry set has it: full jitter, uniform from zero to the
ceiling of its attempt number, and no two workers alike."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import pytest
import redis
from processes import Process, until
from server import Server

from worker import Queue

# Thirty million times the exercise's 1 s and 30 s: no retry is due while the test runs, and what a
# slow machine adds to a wait does not count.
BASE = 3e7
CEILINGS = (1, 2, 4, 8, 16, 30, 30, 30, 30)  # in bases, for n = 0 … 8
EACH = 150  # messages of each n for each worker

# By the inequality of Dvoretzky, Kiefer and Wolfowitz, P(distance > d) <= 2 exp(-2 m d²) for m
# draws. The bound is at 1e-12, so a right distribution fails here once in the life of the project
# at most, while half or double the ceiling, or jitter on a part of it, has a distance of 0.5.
IMPROBABLE = 1e-12


def bound(m: int) -> float:
    return math.sqrt(math.log(2 / IMPROBABLE) / (2 * m))


def distance(draws: Sequence[float]) -> float:
    """The Kolmogorov-Smirnov distance of `draws` from the uniform distribution on 0…1."""
    m = len(draws)
    return max(max((i + 1) / m - x, x - i / m) for i, x in enumerate(sorted(draws)))


def waits(queue: Queue, client: redis.Redis) -> dict[int, list[float]]:
    """n → the waits in the retry set, in bases and in the order of the messages: due minus failed.

    Without the rare message whose wait was over at once and which has failed again.
    """
    found: dict[tuple[int, int], float] = {}
    for member, due in client.zrange(queue.names.retry, 0, -1, withscores=True):
        message = json.loads(member.partition(b":")[2])
        if message["attempts"] == message["n"] + 1:
            failed = datetime.fromisoformat(message["_retry"]["history"][-1]["at"]).timestamp()
            found[message["n"], message["id"]] = (due / 1000 - failed) / BASE
    by_n: dict[int, list[float]] = defaultdict(list)
    for (n, _), wait in sorted(found.items()):
        by_n[n].append(wait)
    return by_n


def test_the_waits_are_uniform_up_to_the_ceiling_and_no_two_workers_agree(
    redis_client: redis.Redis,
    server: Server,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    """Two workers of two hands, started at one instant, with the same messages each."""
    handler("def process(msg):\n    raise ValueError('no')\n")
    queues = [Queue(server.url, name) for name in ("q:one", "q:two")]
    texts = [json.dumps({"n": n, "id": i, "attempts": n}) for i in range(EACH) for n in range(9)]
    for queue in queues:
        redis_client.lpush(queue.names.waiting, *texts)
    flags = ("--max-attempts", 20, "--concurrency", 2, "--base", int(BASE), "--cap", int(30 * BASE))
    workers = [worker("--queue", queue.names.waiting, *flags) for queue in queues]
    for queue in queues:
        until(
            lambda key=queue.names.retry: redis_client.zcard(key) == len(texts),
            saw=lambda: [w.err for w in workers],
        )
    assert [w.stop() for w in workers] == [0, 0]
    one, two = (waits(queue, redis_client) for queue in queues)
    for n, ceiling in enumerate(CEILINGS):
        draws = [wait / ceiling for wait in one[n] + two[n]]
        assert len(draws) > 0.99 * 2 * EACH
        assert min(draws) >= -1e-9  # the start of a run is known to the millisecond
        assert max(draws) <= 1 + 1e-5
        assert min(draws) < 0.1 and max(draws) > 0.9
        assert abs(sum(draws) / len(draws) - 0.5) < bound(len(draws))
        assert distance(draws) < bound(len(draws))
        assert len(set(draws)) > 0.99 * len(draws), "hands draw the same numbers"
        assert one[n] != two[n]
    for queue in queues:
        queue.close()


def test_the_distance_tells_full_jitter_from_its_neighbours() -> None:
    """The measure measures: equal steps pass; equal jitter, half and double the ceiling do not."""
    steps = [(i + 0.5) / 500 for i in range(500)]
    assert distance(steps) == pytest.approx(0.001)
    for wrong in ([0.5 + x / 2 for x in steps], [x / 2 for x in steps], [x * 2 for x in steps]):
        assert distance(wrong) > bound(500)
