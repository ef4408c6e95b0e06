"""kill -9 of hands, of foremen and of both, at random moments over some thousand messages: nothing
is lost, and nothing runs again without a failure or a kill that explains it."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from conftest import Conservation
from processes import Process, until

from worker import Queue

MESSAGES = 2_500
WORKERS, HANDS, ATTEMPTS = 2, 2, 5

# What a run needs is in the id: most work at once, every tenth at the second run, some never.
HANDLER = """
import os, time

ran = os.open({ran!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

def process(msg):
    os.write(ran, b"%d\\n" % msg["id"])
    if msg["id"] % 7 == 0:
        time.sleep(0.01)
    if msg["id"] % 100 == 1:
        raise ValueError("always")
    if msg["id"] % 10 == 0 and not msg.get("attempts"):
        raise ConnectionError("once")
"""


def needed(number: int) -> int:
    """How many runs a message has if nobody kills anything."""
    return ATTEMPTS if number % 100 == 1 else 2 if number % 10 == 0 else 1


@pytest.mark.parametrize(("victim", "kills"), [("hand", 30), ("foreman", 8), ("both", 8)])
def test_kill_9_loses_nothing_and_repeats_only_what_it_cut_off(
    victim: str,
    kills: int,
    conservation: Conservation,
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    tmp_path: Path,
) -> None:
    """Each message ends as done or dead, one or the other; all runs are accounted for.

    A kill -9 of a hand cuts off one run at most, and that run is charged as a failed one. So there
    are no more runs than the messages need by themselves and the kills explain; and, should this
    machine stand still for longer than a lease, the late results that were refused. A hand may
    die, too, while it charges a run that was cut off: then the two are charged together.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    ran = tmp_path / "ran"
    handler(HANDLER.format(ran=str(ran)))
    conservation.push(*[b'{"id": %d}' % number for number in range(MESSAGES)])

    def start(*flags: object) -> Process:
        return worker("--lease", 1, "--base", 0.01, "--max-attempts", ATTEMPTS, *flags)

    def settled() -> int:
        return sum(int(n or 0) for n in redis_client.hmget(queue.names.stats, "done", "dead"))

    workers = [start("--concurrency", HANDS) for _ in range(WORKERS)]
    for kill in range(kills):
        # By progress, not by the clock: on a slow machine the kills are spread as evenly.
        goal = MESSAGES * (kill + dice.random()) / (kills + 2)
        until(lambda goal=goal: settled() >= goal, saw=lambda: workers)
        seat = dice.randrange(WORKERS)
        struck = workers[seat]
        hands = until(struck.children, saw=lambda struck=struck: struck)
        targets = {
            "hand": dice.sample(hands, k=1),
            "foreman": [struck.pid],
            "both": dice.sample([struck.pid, *hands], k=1 + len(hands)),
        }
        for pid in targets[victim]:
            with suppress(ProcessLookupError):  # it has just gone by itself, with its foreman
                os.kill(pid, signal.SIGKILL)
        if victim != "hand":
            assert struck.wait() == -signal.SIGKILL
            workers[seat] = start("--concurrency", HANDS)
    for process in workers:
        until(process.children, saw=lambda process=process: process)
        assert process.stop() == 0, process
    assert start("--burst").wait() == 0

    runs = Counter(map(int, ran.read_text().split()))
    dead = [json.loads(text) for text in redis_client.lrange(queue.names.dlq, 0, -1)]
    dead_ids = {envelope["payload"]["id"] for envelope in dead}
    assert len(dead_ids) == len(dead)
    assert settled() == MESSAGES
    assert {number for number in range(MESSAGES) if needed(number) == ATTEMPTS} <= dead_ids
    surplus = 0
    for envelope in dead:
        assert envelope["attempts"] == len(envelope["history"]) >= ATTEMPTS
        assert runs[envelope["payload"]["id"]] <= ATTEMPTS
        surplus += envelope["attempts"] - ATTEMPTS
    assert runs.keys() | dead_ids == set(range(MESSAGES))
    # Where both are killed, a hand may have been replaced before its foreman was struck.
    cut_off = kills * {"hand": 1, "foreman": HANDS, "both": 2 * HANDS}[victim]
    late, fallen = (int(n or 0) for n in redis_client.hmget(queue.names.stats, "refused", "fallen"))
    assert surplus <= fallen <= cut_off + late
    assert runs.total() <= sum(map(needed, range(MESSAGES))) + fallen + late
    assert not redis_client.exists(queue.names.notes, queue.names.leases)
