"""What Redis, the network, the terminal and the settings can do to a worker.

Every fault is a real one: a real server is killed, frozen, filled, demoted, forbidden. What must
hold each time is the same: nothing is lost, nothing runs twice that need not, the worker says what
is wrong in one line, and goes on by itself or leaves with exit code 2 if a person is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from processes import PROJECT, Process, descendants, until
from proxy import Proxy
from server import Server, find_server, free_port, version

import worker as script
from worker import Names, Note, Queue

# Each run leaves its id; `gate` waits, `fails` raises at its first run, `dies` always raises.
HANDLER = """
import os, time

def process(msg):
    folder = os.environ["QR_DIR"]
    fd = os.open(folder + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, (str(msg["id"]) + "\\n").encode())
    os.close(fd)
    while msg["kind"] == "gate" and not os.path.exists(folder + "/gate"):
        time.sleep(0.01)
    if msg["kind"] == "gate":
        open(folder + "/ended", "w").close()
    if msg["kind"] == "dies" or (msg["kind"] == "fails" and not msg.get("attempts")):
        raise ValueError("as asked")
"""

START = "worker: handler "  # the last line that a worker says at its start
DOWN, UP = "does not answer", "answers again"
COUNT = {"waiting": "LLEN", "next": "LLEN", "running": "HLEN", "retry": "ZCARD", "dlq": "LLEN"}


class Scene:
    """A queue on a server that may be broken, workers on it, and what they did."""

    def __init__(
        self, server: Server, run: Callable[..., Process], folder: Path, queue: str = "q:tasks"
    ) -> None:
        self.server, self.run, self.folder = server, run, folder
        self.client = server.client()
        self.queue = Queue(server.url, queue)
        self.names = self.queue.names
        self.pushed = 0

    def beside(self, name: str) -> Scene:
        """Another queue on the same server, so that many faults can be tried at a time."""
        folder = self.folder / name
        folder.mkdir()
        return Scene(self.server, self.run, folder, name)

    def start(self, *flags: object, script: Path | str = "worker.py", **more: object) -> Process:
        settings = {"REDIS_URL": self.server.url, "QR_DIR": self.folder, "QR_BASE": 0.01}
        if self.names.waiting != "q:tasks":
            settings["QR_QUEUE"] = self.names.waiting
        return self.run(script, *flags, **{**settings, **more})

    def worker(self, *flags: object, **more: object) -> Process:
        """A worker that sleeps in Redis or works already when this returns."""
        process = self.start(*flags, **more)
        until(lambda: START in process.err or not process.running(), saw=lambda: process)
        return process

    def push(self, kind: str = "ok", count: int = 1) -> None:
        ids = range(self.pushed, self.pushed + count)
        self.client.lpush(self.names.waiting, *[json.dumps({"id": i, "kind": kind}) for i in ids])
        self.pushed += count

    def runs(self) -> Counter[int]:
        path = self.folder / "marks"
        return Counter(map(int, path.read_text().split() if path.exists() else []))

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def counts(self) -> dict[str, int]:
        """How many messages are where. Not in a MULTI, which a full Redis 6.2 refuses."""
        keys = {place: getattr(self.names, place) for place in COUNT}
        lines = [f"redis.call('{COUNT[place]}', KEYS[{i}])" for i, place in enumerate(keys, 1)]
        found = self.client.eval(f"return {{{', '.join(lines)}}}", len(keys), *keys.values())
        return {place: count for place, count in zip(keys, found, strict=True) if count}

    def stats(self) -> dict[str, int]:
        return {k.decode(): int(n) for k, n in self.client.hgetall(self.names.stats).items()}

    def drained(self, process: Process) -> None:
        until(lambda: not self.counts(), saw=lambda: (self.counts(), process))

    def close(self) -> None:
        self.client.close()
        self.queue.close()


@pytest.fixture
def scene(
    start_server: Callable[..., Server],
    run: Callable[..., Process],
    handler: Callable[[str], Path],
    qr_dir: Path,
) -> Iterator[Callable[..., Scene]]:
    """A factory: scene(append_only=True) is a Scene on a server with these settings."""
    handler(HANDLER)
    made: list[Scene] = []

    def make(**settings: Any) -> Scene:
        made.append(Scene(start_server(**settings), run, qr_dir))
        return made[-1]

    yield make
    for each in made:
        each.close()


def lines(process: Process, text: str) -> list[str]:
    return [line for line in process.err.splitlines() if text in line]


def says(process: Process, text: str, times: int = 1) -> None:
    """Returns when the worker has logged so many lines with this text."""
    until(lambda: len(lines(process, text)) == times, saw=lambda: process)


# --- Faults that pass -----------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back_with_its_data_costs_nothing(
    scene: Callable[..., Scene],
) -> None:
    """Three times under load; every message is done once, and each outage is two lines."""
    stage = scene(append_only=True, options={"appendfsync": "always"})
    stage.push("ok", 300)
    stage.push("fails", 30)
    process = stage.worker("--concurrency", 2, "--lease", 1)
    for n in range(3):
        stage.server.kill()
        says(process, DOWN, n + 1)
        stage.server.start()
        says(process, UP, n + 1)
    stage.drained(process)
    assert process.stop() == 0
    assert set(stage.runs()) == set(range(330))
    assert stage.stats()["done"] == 330
    assert len(lines(process, DOWN)) == len(lines(process, UP)) == 3


def test_a_result_is_kept_while_redis_is_down_and_settled_when_it_is_back(
    scene: Callable[..., Scene],
) -> None:
    """Longer than the lease, beside another worker: the handler does not run again for that."""
    stage = scene(append_only=True, options={"appendfsync": "always"})
    stage.push("gate")
    first = stage.worker("--lease", 1)
    until(stage.runs, saw=lambda: first)
    second = stage.worker("--lease", 1)
    stage.server.kill()
    stage.open_gate()
    for process in (first, second):
        says(process, DOWN)
    time.sleep(1.2)  # the lease ends; were this too short, the test would pass as well
    stage.server.start()
    stage.drained(first)
    assert first.stop() == 0 and second.stop() == 0
    assert stage.runs() == {0: 1}
    assert stage.stats() == {"done": 1}


def test_a_server_that_comes_back_empty_is_worked_on(scene: Callable[..., Scene]) -> None:
    """What it lost is lost; the result of a run that it has forgotten is no alarm."""
    stage = scene()
    stage.push("gate")
    process = stage.worker()
    until(stage.runs, saw=lambda: process)
    stage.server.kill()
    stage.open_gate()
    until((stage.folder / "ended").exists, saw=lambda: process)
    stage.server.start()
    stage.push()
    until(lambda: stage.stats() == {"done": 1}, saw=lambda: (stage.stats(), process))
    assert stage.runs() == {0: 1, 1: 1}
    assert process.stop() == 0
    assert "refused" not in process.err


def test_messages_that_run_are_not_taken_over_because_redis_stood_still(
    scene: Callable[..., Scene],
) -> None:
    """Frozen, then paused, each for longer than the lease and the foreman's patience."""
    stage = scene()
    stage.push("gate", 2)
    workers = [stage.worker("--lease", 1) for _ in range(2)]
    until(lambda: len(stage.runs()) == 2, saw=lambda: workers)
    pauses: list[tuple[Callable[[], object], Callable[[], object]]]
    pauses = [(stage.server.freeze, stage.server.thaw)]
    if version(find_server()) >= (6, 2):
        command = stage.client.execute_command
        pauses.append(
            (
                lambda: command("CLIENT", "PAUSE", 60_000, "WRITE"),
                lambda: command("CLIENT", "UNPAUSE"),
            )
        )
    for pause, resume in pauses:
        told = len(lines(workers[0], DOWN)) + 1
        pause()
        for each in workers:
            says(each, DOWN, told)
        resume()
        for each in workers:
            says(each, UP, told)
    stage.open_gate()
    stage.drained(workers[0])
    assert [each.stop() for each in workers] == [0, 0]
    assert (stage.runs(), stage.stats()) == ({0: 1, 1: 1}, {"done": 2})


def test_after_an_outage_everybody_may_renew_before_anything_falls(
    scene: Callable[..., Scene],
) -> None:
    """The foreman that is back first takes over from none that is not: here one that stands still.

    Its hand stands still as well, so that what is said of Redis is said by the foreman.
    """
    stage = scene()
    stage.push("gate")
    late = stage.worker()
    until(stage.runs, saw=lambda: late)
    standing = descendants(late.pid)
    for pid in standing:
        os.kill(pid, signal.SIGSTOP)
    key, lease = lease_of(stage)
    stage.client.zadd(key, {"1 nobody": 1})
    # Who may not ask for INFO does not know that the server is young, and need not wait for others.
    limited_user(stage.server, "~*", "+@all", "-info")
    with Proxy(stage.server.socket) as proxy:
        first = stage.worker("--lease", 9, REDIS_URL=proxy.url.replace("//", "//some:secret@"))
        until(lambda: stage.client.zscore(key, "1 nobody") is None, saw=lambda: first)
        standing += until(first.children)
        os.kill(standing[-1], signal.SIGSTOP)
        proxy.lose_every(1)
        says(first, DOWN)
        stage.client.zadd(key, {lease: 1})  # it has ended
        proxy.lose_every(0)
        says(first, UP)
        for pid in standing:
            os.kill(pid, signal.SIGCONT)
        stage.open_gate()
        stage.drained(late)
        assert first.stop() == 0 and late.stop() == 0
    assert (stage.runs(), stage.stats()) == ({0: 1}, {"done": 1})


def test_connections_that_are_cut_all_the_time_cost_no_attempt_and_no_second_run(
    scene: Callable[..., Scene],
) -> None:
    """A claim whose reply was lost is found again, a settlement is repeated and is no alarm."""
    stage = scene()
    stage.push("ok", 400)
    stage.push("fails", 20)
    process = stage.worker("--concurrency", 2)

    def cut() -> bool:
        stage.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return not stage.counts()

    until(cut, saw=lambda: (stage.counts(), process))
    assert process.stop() == 0
    assert stage.runs() == {i: 1 if i < 400 else 2 for i in range(420)}
    assert stage.stats() == {"done": 420, "retried": 20}
    assert "refused" not in process.err and "had been taken over" not in process.err


def test_lost_replies_cost_no_attempt_and_no_second_run(scene: Callable[..., Scene]) -> None:
    """The network carries the request and loses the reply: what was asked has happened."""
    stage = scene()
    with Proxy(stage.server.socket) as proxy:
        process = stage.worker(REDIS_URL=proxy.url)
        proxy.lose_every(7)
        stage.push("ok", 40)
        stage.push("fails", 5)
        until(lambda: not stage.counts(), saw=lambda: (stage.counts(), process))
        proxy.lose_every(0)
        assert process.stop() == 0
    assert stage.runs() == {i: 1 if i < 40 else 2 for i in range(45)}
    # A counter may be one short or over: it never decides a fate.
    assert not stage.stats().keys() & {"fallen", "released", "refused", "dead"}
    assert "refused" not in process.err and "had been taken over" not in process.err


def test_a_claim_whose_reply_was_lost_is_given_back_at_a_stop(scene: Callable[..., Scene]) -> None:
    """It has happened, though the hand has not heard of it: released, and no attempt."""
    stage = scene()
    for kind in ("ok", "gate", "ok"):
        stage.push(kind)
    with Proxy(stage.server.socket) as proxy:
        process = stage.worker(REDIS_URL=proxy.url)
        until(lambda: len(stage.runs()) == 2, saw=lambda: process)
        proxy.lose_every(1)
        stage.open_gate()
        until(lambda: stage.counts() == {"running": 1}, saw=lambda: (stage.counts(), process))
        until(lambda: stage.stats() == {"done": 2}, saw=stage.stats)
        process.send_group(signal.SIGTERM)
        proxy.lose_every(0)
        assert process.wait() == 0, process
    assert stage.runs() == {0: 1, 1: 1}
    assert (stage.counts(), stage.stats()) == ({"retry": 1}, {"done": 2, "released": 1})
    assert reasons(stage) == ["released"]


def test_an_idle_hand_whose_claim_was_never_answered_leaves_nothing_running(
    scene: Callable[..., Scene],
) -> None:
    """It may leave at once, for it holds nothing that it knows of; then its foreman looks."""
    stage = scene()
    with Proxy(stage.server.socket) as proxy:
        process = stage.worker("--lease", 1, REDIS_URL=proxy.url)
        [hand] = until(process.children)
        until(lambda: stage.client.info("clients")["blocked_clients"], saw=lambda: process)
        proxy.lose_from(script.CLAIM.sha)
        stage.push()
        until(lambda: stage.counts() == {"running": 1}, saw=lambda: (stage.counts(), process))
        os.kill(hand, signal.SIGSTOP)
        proxy.lose_every(0)
        healed = stage.queue.now_ms()
        until(
            lambda: stage.client.zrange(stage.names.workers, -1, -1, withscores=True)[0][1] > healed
        )
        process.send(signal.SIGTERM)
        os.kill(hand, signal.SIGCONT)
        assert process.wait() == 0, process
    assert not stage.runs()
    assert (stage.counts(), stage.stats()) == ({"retry": 1}, {"released": 1})
    assert reasons(stage) == ["released"]


def reasons(stage: Scene) -> list[str]:
    """What the notes say that nobody has read yet."""
    lines = b"".join(stage.client.hvals(stage.names.notes))
    return [note.reason for note in Note.read(lines)]


def test_forgotten_scripts_are_not_noticed(scene: Callable[..., Scene]) -> None:
    stage = scene()
    stage.push("ok", 300)
    stage.push("fails", 20)
    process = stage.worker("--concurrency", 2)

    def flush() -> bool:
        stage.client.script_flush()
        return not stage.counts()

    until(flush, saw=lambda: (stage.counts(), process))
    assert process.stop() == 0
    assert stage.runs() == {i: 1 if i < 300 else 2 for i in range(320)}
    assert stage.stats() == {"done": 320, "retried": 20}
    assert process.err.endswith(lines(process, START)[0] + "\n")  # nothing after that


REFUSALS = {
    "READONLY": (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")),
    "MASTERDOWN": (
        ("CONFIG", "SET", "replica-serve-stale-data", "no"),
        ("REPLICAOF", "127.0.0.1", 1),
        ("REPLICAOF", "NO", "ONE"),
    ),
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", 1),
        ("CONFIG", "SET", "min-replicas-to-write", 0),
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_server_that_refuses_to_write_is_waited_for(
    scene: Callable[..., Scene], fault: str
) -> None:
    """Idle, in mid-run and at the start: one line says why, one that it is over."""
    *breaks, heals = REFUSALS[fault]
    stage = scene()
    if fault == "NOREPLICAS" and stage.client.info("server")["redis_version"] < "7":
        pytest.skip("before 7, Redis lets scripts write without replicas")
    stage.push("gate")
    busy, idle = stage.worker("--lease", 1), stage.worker("--lease", 1)
    until(stage.runs, saw=lambda: busy)
    for command in breaks:
        stage.client.execute_command(*command)
    stage.open_gate()
    late = stage.start()
    for process in (busy, idle, late):
        says(process, DOWN)
    stage.client.execute_command(*heals)
    for process in (busy, idle, late):
        says(process, UP)
    stage.push("ok", 10)
    stage.drained(busy)
    for process in (busy, idle, late):
        assert process.stop() == 0
        assert len(lines(process, DOWN)) == len(lines(process, UP)) == 1
    assert stage.runs() == dict.fromkeys(range(11), 1)
    assert stage.stats() == {"done": 11}


def test_a_server_that_is_busy_with_a_script_is_waited_for(scene: Callable[..., Scene]) -> None:
    """BUSY: somebody's script runs on and on, until it is killed."""
    stage = scene()
    stage.push("gate")
    process = stage.worker("--lease", 1)
    until(stage.runs, saw=lambda: process)
    stage.client.config_set("lua-time-limit", 10)
    with stage.server.client(socket_timeout=60) as other:
        connection = other.connection_pool.make_connection()
        connection.send_command("EVAL", "while true do end", 0)
        stage.open_gate()
        says(process, DOWN)
        assert "BUSY" in lines(process, DOWN)[0]
        stage.client.script_kill()
        connection.disconnect()
    says(process, UP)
    stage.drained(process)
    assert process.stop() == 0
    assert (stage.runs(), stage.stats()) == ({0: 1}, {"done": 1})


def test_a_server_with_too_many_clients_is_waited_for(scene: Callable[..., Scene]) -> None:
    stage = scene()
    stage.push()
    stage.client.config_set("maxclients", 2)
    process = stage.start()
    says(process, DOWN)
    stage.client.config_set("maxclients", 100)
    says(process, UP)
    stage.drained(process)
    assert process.stop() == 0
    assert stage.runs() == {0: 1}


def test_a_server_that_loads_its_data_is_waited_for(scene: Callable[..., Scene]) -> None:
    """LOADING, by a snapshot that takes a second or two."""
    if version(find_server()) < (7,):
        pytest.skip("before 7, Redis cannot be told to load slowly")
    stage = scene(
        options={"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
    )
    stage.client.mset({f"other:{i}": "x" for i in range(1500)})
    stage.push("ok", 20)
    stage.client.save()
    stage.server.kill()
    thread = threading.Thread(target=stage.server.start)
    thread.start()
    process = stage.start("--burst")
    assert process.wait() == 0, process
    thread.join()
    assert stage.runs() == dict.fromkeys(range(20), 1)


def test_a_cluster_that_is_down_is_waited_for(scene: Callable[..., Scene]) -> None:
    """CLUSTERDOWN; and a name in braces keeps a queue in one slot."""
    options = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}
    cluster = scene(port=free_port(0), options=options)
    stage = cluster.beside("{q:tasks}")
    process = stage.start()
    says(process, DOWN)
    assert "slot not served" in lines(process, DOWN)[0]
    stage.client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
    says(process, UP)
    stage.push("ok", 10)
    stage.push("fails", 2)
    stage.drained(process)
    assert process.stop() == 0
    assert stage.stats() == {"done": 12, "retried": 2}
    stage.close()


def test_a_server_that_cannot_save_is_waited_for(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    """MISCONF, because the folder of the snapshots is gone."""
    folder = tmp_path / "snapshots"
    folder.mkdir()
    stage = scene(options={"dir": str(folder)})
    stage.client.config_set("save", "3600 1000000")
    stage.push("gate")
    process = stage.worker("--lease", 1)
    until(stage.runs, saw=lambda: process)
    shutil.rmtree(folder)
    stage.client.bgsave()
    until(lambda: stage.client.info("persistence")["rdb_last_bgsave_status"] == "err")
    stage.open_gate()
    says(process, DOWN)
    assert "MISCONF" in lines(process, DOWN)[0]
    stage.client.config_set("save", "")
    stage.drained(process)
    says(process, UP)
    assert process.stop() == 0
    assert (stage.runs(), stage.stats()) == ({0: 1}, {"done": 1})


def test_a_full_redis_is_drained(scene: Callable[..., Scene]) -> None:
    """By a worker that ran before and by one that starts now; retries and deaths included."""
    stage = scene(options={"maxmemory-policy": "noeviction"})
    stage.push("gate")
    before = stage.worker("--max-attempts", 2)
    until(stage.runs, saw=lambda: before)
    for kind in ("ok", "fails", "dies"):
        stage.push(kind, 20)
    stage.client.config_set("maxmemory", "1")
    with pytest.raises(redis.ResponseError, match=r"OOM|maxmemory"):
        stage.push("ok")
    after = stage.worker("--max-attempts", 2)
    until(lambda: stage.counts() == {"running": 1, "dlq": 20}, saw=lambda: (stage.counts(), after))
    stage.open_gate()
    until(lambda: stage.counts() == {"dlq": 20}, saw=lambda: (stage.counts(), before))
    stage.client.config_set("maxmemory", "0")
    stage.push("ok", 5)
    until(lambda: stage.counts() == {"dlq": 20}, saw=lambda: (stage.counts(), before, after))
    assert before.stop() == 0 and after.stop() == 0
    assert DOWN not in before.err + after.err


def test_a_black_hole_in_the_network_is_left_by_itself(scene: Callable[..., Scene]) -> None:
    """No end of file, no reset: only the own timeouts help, for the hand and for the foreman."""
    stage = scene()
    with Proxy(stage.server.socket) as proxy:
        stage.push("gate")
        busy = stage.worker("--lease", 1, REDIS_URL=proxy.url)
        until(stage.runs, saw=lambda: busy)
        idle = stage.worker("--lease", 1, REDIS_URL=proxy.url)
        proxy.swallow()
        for process in (busy, idle):
            says(process, DOWN)
        stage.open_gate()
        # In the hole, until the lease has ended for all to see.
        until(lambda: stage.queue.now_ms() > stage.client.zscore(*lease_of(stage)) + 100)
        proxy.heal()
        stage.push()
        stage.drained(idle)
        assert busy.stop() == 0 and idle.stop() == 0
    assert stage.runs() == {0: 1, 1: 1}
    assert stage.stats() == {"done": 2}


def lease_of(stage: Scene) -> tuple[str, bytes]:
    [lease] = stage.client.zrange(stage.names.leases, 0, -1)
    return stage.names.leases, lease


def test_a_worker_may_be_started_before_redis(scene: Callable[..., Scene]) -> None:
    stage = scene()
    stage.server.stop()
    process = stage.start("--burst")
    says(process, DOWN)
    stage.server.start()
    stage.push()
    assert process.wait() == 0
    assert len(lines(process, DOWN)) == len(lines(process, UP)) == 1


def test_an_outage_is_two_lines_however_many_hands_wait(scene: Callable[..., Scene]) -> None:
    stage = scene()
    process = stage.worker("--concurrency", 4)
    stage.server.kill()
    says(process, DOWN)
    time.sleep(0.8)  # enough for every hand and the foreman to try again, and to keep silent
    stage.server.start()
    says(process, UP)
    stage.push("ok", 20)
    stage.drained(process)
    assert process.stop() == 0
    assert len(process.err.splitlines()) == len(lines(process, START)) + 4


def test_a_worker_that_is_stopped_while_redis_is_away_says_so(scene: Callable[..., Scene]) -> None:
    stage = scene()
    process = stage.worker()
    stage.server.kill()
    says(process, DOWN)
    assert process.stop() == 0
    assert len(lines(process, "worker: leaving without Redis")) == 1


def test_a_worker_whose_connections_were_cut_says_goodbye_all_the_same(
    scene: Callable[..., Scene],
) -> None:
    """Its foreman may not have spoken with Redis since the last outage when it is told to stop."""
    stage = scene()
    process = stage.worker()
    until(lambda: stage.client.zcard("q:tasks:workers") > 0, saw=lambda: process)
    stage.client.client_kill_filter(_type="normal", skipme=True)
    assert process.stop() == 0
    assert "leaving without Redis" not in process.err
    assert stage.client.zcard("q:tasks:workers") == 0


def test_a_server_that_closes_idle_connections_keeps_no_run_from_being_taken_over(
    scene: Callable[..., Scene],
) -> None:
    """Closed before each beat of the foreman: that is no outage, and nobody hears of it."""
    stage = scene()
    # Who may not ask for INFO does not know that the server is young, and need not wait for others.
    url = limited_user(stage.server, "~*", "+@all", "-info")
    process = stage.worker("--lease", 7.5, "--base", 0.01, REDIS_URL=url)  # a beat each 2.5 s

    def connections() -> int:
        return int(stage.client.info("clients")["connected_clients"])

    until(lambda: connections() == 3, saw=lambda: process)  # the foreman, its hand, and we
    stage.client.config_set("timeout", 1)
    until(lambda: connections() == 2, saw=lambda: process)
    stage.client.hset(stage.names.running, "7", '{"id": 0, "kind": "ok"}')
    stage.client.zadd(stage.names.leases, {"7 gone": 1})
    until(lambda: stage.stats().get("fallen"), saw=lambda: process)
    until(lambda: stage.stats().get("done"), saw=lambda: process)
    assert process.stop() == 0
    assert stage.stats() == {"fallen": 1, "retried": 1, "done": 1}
    assert DOWN not in process.err


def test_strangers_keys_are_left_alone(scene: Callable[..., Scene]) -> None:
    """B65: no KEYS, no SCAN, no FLUSH, and no key but the queue's, however alike its name is."""
    stage = scene()
    strangers = {"q:task": "x", "q:tasks2": "x", "q:tasks:dlq2": "x", "other": "x"}
    stage.client.mset(strangers)
    for kind in ("ok", "fails", "dies"):
        stage.push(kind, 5)
    with stage.server.client() as other, other.monitor() as monitor:
        process = stage.worker("--burst", "--max-attempts", 2)
        assert process.wait() == 0, process
        stage.client.echo("end")
        commands = []
        for event in monitor.listen():
            commands.append(event["command"].split())
            if commands[-1][0].upper() == "ECHO":
                break
    used = {words[0].upper() for words in commands}
    assert {"EVALSHA", "BRPOPLPUSH"} <= used
    assert not used & {"KEYS", "SCAN", "FLUSHALL", "FLUSHDB", "RANDOMKEY", "SORT", "UNLINK"}
    named = {word for words in commands for word in words if word.startswith(("q:task", "other"))}
    assert named <= {*vars(stage.names).values()}
    assert {key: stage.client.get(key).decode() for key in strangers} == strangers


# --- Faults that need a person --------------------------------------------------------------------

WRONG = {
    role: "hash" if kind == "string" else "string"
    for role, (_, kind) in script.KEYS.items()
    if role != "probe"
}


def spoil(stage: Scene, role: str) -> str:
    """Puts something of another type where a key of the queue was, which is put aside."""
    key: str = getattr(stage.names, role)
    if stage.client.exists(key):
        stage.client.rename(key, f"{key} aside")
    stage.client.set(key, "x") if WRONG[role] == "string" else stage.client.hset(key, "x", "y")
    return key


def repair(stage: Scene, key: str) -> None:
    stage.client.delete(key)
    if stage.client.exists(f"{key} aside"):
        stage.client.rename(f"{key} aside", key)


@pytest.fixture
def queues(scene: Callable[..., Scene]) -> Iterator[dict[str, Scene]]:
    """A queue for each of the keys that a queue has, all on one server."""
    stage = scene()
    made = {role: stage.beside(role) for role in WRONG}
    yield made
    for each in made.values():
        each.close()


def test_a_key_of_the_wrong_type_is_named_at_the_start(queues: dict[str, Scene]) -> None:
    """Exit code 2, nothing claimed; and after the repair all is as before."""
    keys = {}
    for role, stage in queues.items():
        stage.push()
        keys[role] = spoil(stage, role)
    workers = {role: stage.start() for role, stage in queues.items()}
    for role, process in workers.items():
        assert process.wait() == 2, process
        [line] = process.err.splitlines()
        assert f"key {keys[role]} is a {WRONG[role]}" in line and "nothing claimed" in line
        repair(queues[role], keys[role])
        assert queues[role].counts() == {"waiting": 1}
    workers = {role: stage.start("--burst") for role, stage in queues.items()}
    assert {process.wait() for process in workers.values()} == {0}
    assert all(stage.runs() == {0: 1} for stage in queues.values())


def test_a_key_that_is_spoiled_under_load_loses_nothing(queues: dict[str, Scene]) -> None:
    """B61, B82: the worker leaves with the key's name; or does not care, if it is a counter."""
    # The worker that leaves may cost a message one run, so there are two.
    flags = ("--lease", 1, "--grace", 0.5, "--max-attempts", 2)
    for stage in queues.values():
        stage.push("gate")
        stage.push("dies")
    workers = {role: stage.start(*flags) for role, stage in queues.items()}
    keys = {}
    for role, stage in queues.items():
        until(stage.runs, saw=lambda: workers)
        keys[role] = spoil(stage, role)
        stage.open_gate()
    for role, process in workers.items():
        stage = queues[role]
        if role == "stats":
            until(lambda stage=stage: stage.counts() == {"dlq": 1}, saw=lambda: workers)
            assert process.stop() == 0
        elif role == "pause":  # whatever it holds: while it is there, nothing is claimed
            says(process, "paused")
            assert process.stop() == 0
            assert "waiting" in stage.counts()
        else:
            assert process.wait() == 2, process
            assert len(lines(process, f"key {keys[role]} is a {WRONG[role]}")) == 1, process
        assert "Traceback" not in process.err
        repair(stage, keys[role])
    workers = {role: stage.start("--burst", *flags) for role, stage in queues.items()}
    for role, process in workers.items():
        assert process.wait() == 0, process
        assert set(queues[role].runs()) == {0, 1}, role
        assert queues[role].counts() == {"dlq": 1}, role
        [letter] = map(json.loads, queues[role].client.lrange(queues[role].names.dlq, 0, -1))
        assert (letter["payload"]["id"], letter["attempts"]) == (1, 2), role


SOURCE = (PROJECT / "worker.py").read_text()
COMMANDS = sorted(
    {"EVALSHA", "EVAL"}
    | {*re.findall(r"redis\.p?call\('(\w+)'", SOURCE)}
    | {*re.findall(r"command\(\s*\"(\w+)\"", SOURCE)} - {"INFO", "PING"}
)


def limited_user(server: Server, *rules: str) -> str:
    """The URL of a user who has the given rights, on top of none."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "some", "reset", "on", ">secret", *rules)
    return f"unix://some:secret@{server.socket}?db=0"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_the_user_may_not_run_is_found_at_the_start(
    server: Server, redis_client: redis.Redis, queue: Queue, command: str
) -> None:
    """The look that a worker takes before it claims anything finds each of them by name."""
    redis_client.script_flush()
    limited = Queue(limited_user(server, "~*", "+@all", f"-{command}"))
    try:
        refusal, _, _ = script.inspect_server(limited)
    except redis.RedisError as error:
        assert not script.passing(error)
        refusal = script.explain(limited, error)
    limited.close()
    redis_client.execute_command("ACL", "DELUSER", "some")
    assert re.search(rf"\b{command}\b", refusal.upper())
    assert not redis_client.exists(queue.names.probe)


def test_a_user_who_may_not_run_a_command_is_told_so(scene: Callable[..., Scene]) -> None:
    """Exit code 2, one line, nothing claimed; be it a command of a script or a plain one."""
    stage = scene()
    stage.push()
    for command in ("zadd", "evalsha"):
        url = limited_user(stage.server, "~*", "+@all", f"-{command}")
        process = stage.start(REDIS_URL=url)
        assert process.wait() == 2, process
        [line] = process.err.splitlines()
        assert command in line.lower()
        assert "secret" not in process.err + process.out
    assert stage.counts() == {"waiting": 1}
    assert not stage.runs()


def test_a_user_who_may_not_ask_for_info_can_work(scene: Callable[..., Scene]) -> None:
    """The keys of the queue and no dangerous command, as hosts grant it."""
    stage = scene()
    stage.push()
    rules = (f"~{stage.names.waiting}*", "+@all", "-info", "-@dangerous")
    process = stage.worker("--burst", REDIS_URL=limited_user(stage.server, *rules))
    assert process.wait() == 0, process
    assert stage.runs() == {0: 1}


def test_a_right_that_is_taken_away_ends_the_worker_and_loses_nothing(
    scene: Callable[..., Scene],
) -> None:
    stage = scene()
    stage.push("gate", 2)
    url = limited_user(stage.server, "~*", "+@all")
    process = stage.worker("--lease", 1, "--grace", 0.5, REDIS_URL=url)
    until(stage.runs, saw=lambda: process)
    stage.client.execute_command("ACL", "SETUSER", "some", "-evalsha")
    stage.open_gate()
    assert process.wait() == 2, process
    assert len(lines(process, "Redis refuses: ")) == 1, process
    assert stage.worker("--burst", "--lease", 1).wait() == 0
    assert set(stage.runs()) == {0, 1} and not stage.counts()


SECRET = "s3cr3t:/@ %päß"


def test_the_password_is_never_shown(scene: Callable[..., Scene], tmp_path: Path) -> None:
    """B83: refused, forbidden, wrong, unreachable, misspelt; raw, encoded, or in a dead letter."""
    stage = scene()
    stage.push("dies")
    stage.client.execute_command("ACL", "SETUSER", "w", "on", f">{SECRET}", "~*", "+@all")
    stage.client.execute_command("ACL", "SETUSER", "default", ">other")
    place, coded = stage.server.socket, quote(SECRET, safe="")
    wrong = {
        "wrong user": f"unix://x:{coded}@{place}?db=0",
        "wrong password": f"unix://w:{coded}x@{place}?db=0",
        "no login": f"unix://{place}?db=0",
        "not encoded": f"redis://w:{SECRET}@127.0.0.1:1/0",
        "bad port": f"redis://w:{coded}@127.0.0.1:99999999/0",
        "bad scheme": f"http://w:{coded}@127.0.0.1:1/0",
    }
    processes = {name: stage.start(REDIS_URL=url) for name, url in wrong.items()}
    unreachable = stage.start(REDIS_URL=f"redis://w:{coded}@127.0.0.1:1/0")
    good = stage.start("--burst", "--max-attempts", 1, REDIS_URL=f"unix://w:{coded}@{place}?db=0")
    says(unreachable, DOWN)
    assert unreachable.stop() == 0
    assert good.wait() == 0, good
    for name, process in processes.items():
        assert process.wait() == 2, (name, process)
        assert "Traceback" not in process.err, (name, process)
    with redis.Redis.from_url(f"unix://w:{coded}@{place}?db=0") as client:
        [letter] = client.lrange(stage.names.dlq, 0, -1)
    shown = [repr(each) for each in (*processes.values(), unreachable, good)] + [letter.decode()]
    for spelling in ("s3cr3t", SECRET, coded):
        assert not [text for text in shown if spelling in text]


# --- What a worker says at its start --------------------------------------------------------------


def test_the_start_is_one_line_each_about_server_and_handler(scene: Callable[..., Scene]) -> None:
    stage = scene(append_only=True)
    process = stage.worker("--burst")
    assert process.wait() == 0
    server, file = process.err.splitlines()
    info = stage.client.info("server")
    number = info.get("valkey_version", info["redis_version"])
    assert f" {number} at " in server and str(stage.server.socket) in server
    assert "queue q:tasks" in server
    assert file.startswith("worker: handler /") and file.endswith("/app/taskproc.py:process")


def test_a_server_that_may_evict_or_keeps_nothing_is_warned_of(
    scene: Callable[..., Scene],
) -> None:
    stage = scene(options={"maxmemory-policy": "allkeys-lru"})
    process = stage.worker("--burst")
    assert process.wait() == 0
    assert len(lines(process, "warning: maxmemory-policy allkeys-lru")) == 1
    assert len(lines(process, "warning: appendonly is off")) == 1


def test_a_server_that_is_too_old_is_refused(scene: Callable[..., Scene]) -> None:
    """A real server, whose version the network tells wrongly: nobody has a Redis 5 at hand."""
    stage = scene()
    stage.push()
    with Proxy(stage.server.socket) as proxy:
        proxy.lie(rb"redis_version:\d", b"redis_version:5")
        process = stage.start(REDIS_URL=proxy.url)
        assert process.wait() == 2, process
    [line] = process.err.splitlines()
    assert line.startswith("worker: Redis 5.") and line.endswith("nothing claimed")
    assert stage.counts() == {"waiting": 1}


# --- Settings -------------------------------------------------------------------------------------

BAD = ("", "abc", "-1", "0", "nan", "inf", "-inf", "1e999", " ", "1 2", "0x10")
# A key, a class or a command may have such a name.
FINE = {
    "queue": {*BAD} - {""},
    "permanent": {"abc", "nan", "inf"},
}


# Every option that has a value, and the variable that does the same.
OPTIONS = {option.name: option.variable for option in script.OPTIONS if option.metavar}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_setting_that_makes_no_sense_is_named(
    option: str, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the message names the option or the variable, whichever was used."""
    for text in sorted(set(BAD) - FINE.get(option, set())):
        name, argv = OPTIONS[option], []
        if by == "flag":
            name, argv = f"--{option}", [f"--{option}={text}"]
        else:
            monkeypatch.setenv(name, text)
        with pytest.raises(SystemExit) as left:
            script.read_settings(argv)
        assert left.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert name in error and "needed" in error, (text, error)


def test_a_bad_setting_ends_the_worker_before_anything_is_claimed(
    scene: Callable[..., Scene],
) -> None:
    stage = scene()
    stage.push()
    processes = [
        stage.start(*flags, **environment)
        for flags, environment in [
            (["--lease", "nan"], {}),
            (["--concurrency", "-1"], {}),
            ([], {"QR_TIME_LIMIT": ""}),
            ([], {"QR_GRACE": "1e999"}),
            ([], {"QR_DIR": ""}),
            (["--no-such-option"], {}),
            (["--queu", "q:tasks"], {}),
        ]
    ]
    for process in processes:
        assert process.wait() == 2, process
        assert "Traceback" not in process.err
    assert stage.counts() == {"waiting": 1}


# --- Output that fails ----------------------------------------------------------------------------

STREAMS = {
    "full_disk": "fds = [os.open('/dev/full', os.O_WRONLY)] * 2",
    "closed": "fds = []",
    "closed_stdout": "fds = [None, os.dup(2)]",
    "closed_stderr": "fds = [os.dup(1), None]",
    "closed_pipe": "r, w = os.pipe(); os.close(r); fds = [w, w]",
    "stopped_reader": """
r, w = os.pipe()
os.set_blocking(w, False)
with contextlib.suppress(BlockingIOError):
    while True: os.write(w, b'x')
os.read(r, 6000)  # room for a line or two, not for many
os.set_blocking(w, True)
os.set_inheritable(r, True)
fds = [w, w]""",
}

LAUNCHER = """
import contextlib, os, sys
{streams}
for number, fd in zip((1, 2), [*fds, None, None]):
    if fd is None: os.close(number)
    else: os.dup2(fd, number, inheritable=True)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_output_that_cannot_be_written_costs_no_message(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    """B86: messages still complete, are retried and die; the lines are what is lost."""
    first = scene()
    stages = {name: first.beside(name) for name in STREAMS}
    if not Path("/dev/full").exists():  # macOS
        del stages["full_disk"]
    workers = {}
    flags = [PROJECT / "worker.py", "--burst", "--max-attempts", 3]
    for name, stage in stages.items():
        for kind in ("ok", "fails", "dies"):
            stage.push(kind, 10)
        launcher = tmp_path / f"{name}.py"
        launcher.write_text(LAUNCHER.format(streams=STREAMS[name]))
        workers[name] = stage.start(*flags, script=launcher)
    for name, process in workers.items():
        assert process.wait() == 0, (name, process)
        assert stages[name].counts() == {"dlq": 10}, name
        assert stages[name].stats() == {"done": 20, "retried": 30, "dead": 10}, name
        stages[name].close()


def test_one_event_is_one_line_whatever_a_message_contains(
    scene: Callable[..., Scene], handler: Callable[[str], Path]
) -> None:
    """B85: in the log, on stdout and in requeue.out; nothing a terminal would obey gets out."""
    handler("def process(msg): raise ValueError(msg['kind'])")
    stage = scene()
    evil = ["a\nworker: dead", "\r\x1b[2J", "\x85x\u2028y\u2029", "\u202eabc", "\x00", "\ud800",
            '" error="', "\x9b31m", "e\u0301" * 300, "\U000e0001" * 300]  # fmt: skip
    texts = [json.dumps({"id": i, "kind": kind}) for i, kind in enumerate(evil)]
    stage.client.lpush(stage.names.waiting, *texts)
    process = stage.worker("--burst", "--max-attempts", 2)
    assert process.wait() == 0, process
    written = (stage.folder / "requeue.out").read_text()
    assert process.out == written
    assert len(written.splitlines()) == len(evil)
    assert all(line.startswith("attempts=1 kind=") for line in written.splitlines())
    assert all(line.startswith("worker: ") for line in process.err.splitlines())
    assert len(lines(process, "worker: dead attempts=2")) == len(evil)
    assert all(len(line.encode()) < 4000 for line in (written + process.err).splitlines())
    for text in (written, process.err):
        assert not [c for c in text.replace("\n", "") if not c.isprintable()]


def test_no_key_and_no_option_of_the_worker_is_forgotten_here() -> None:
    assert {*vars(Names())} - {"probe"} == WRONG.keys()
    assert len(OPTIONS) == 14 and FINE.keys() < OPTIONS.keys()
