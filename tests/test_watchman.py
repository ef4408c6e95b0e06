"""Dead letters are never forgotten: the worker warns of them, and can run a command for each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from conftest import Conservation
from processes import Process, until
from server import Server

import worker as worker_module
from worker import Queue, Settings, Watchman, read_settings

BAD = "def process(msg): raise ValueError(msg['id'])"


def watchman(*flags: str) -> Watchman:
    return Watchman(read_settings([*flags]))


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """The log lines since the last look."""
    yield lambda: capfd.readouterr().err.splitlines()


def test_it_warns_at_the_threshold_and_at_each_doubling(
    queue: Queue, lines: Callable[[], list[str]]
) -> None:
    """Once for each of 3, 6, 12, …; a depth that was reported is not reported again."""
    man = watchman("--dlq-alert", "3")
    warned = []
    for depth in range(1, 25):
        man.warn(queue, depth)
        warned += [depth for line in lines() if f"q:tasks:dlq: {depth};" in line]
    assert warned == [3, 6, 12, 24]


def test_it_warns_anew_after_the_queue_was_emptied(
    queue: Queue, lines: Callable[[], list[str]]
) -> None:
    man = watchman()
    for depth in (1, 1, 0, 1):
        man.warn(queue, depth)
    assert len(lines()) == 2


def test_a_jump_over_several_doublings_is_one_warning(
    queue: Queue, lines: Callable[[], list[str]]
) -> None:
    man = watchman()
    for depth in (1000, 1001, 1023, 1024):
        man.warn(queue, depth)
    assert [line.split(": ")[3].split(";")[0] for line in lines()] == ["1000", "1024"]


@pytest.mark.parametrize(
    "oldest",
    [
        *(None, "garbage", "{}", '{"failed_at": 7}', '{"failed_at": "yesterday"}'),
        '{"failed_at": "2026-11-30T12:00:00"}',  # where?
        '{"failed_at": "0001-01-01T00:00:00+23:59"}',
        '{"failed_at": "9999-12-31T23:59:59-23:59"}',
    ],
)
def test_an_oldest_entry_without_a_date_is_no_reason_to_keep_silent(
    queue: Queue, redis_client: redis.Redis, lines: Callable[[], list[str]], oldest: str | None
) -> None:
    if oldest is not None:
        redis_client.lpush("q:tasks:dlq", oldest)
    watchman().warn(queue, 1)
    assert lines() == [
        "worker: warning: dead letters in q:tasks:dlq: 1; see python replay.py --list"
    ]


def test_the_age_is_that_of_the_oldest_by_the_clock_of_the_server(
    queue: Queue, redis_client: redis.Redis, lines: Callable[[], list[str]]
) -> None:
    for hours in (50, 3, 1):  # the newest is pushed last
        at = worker_module.iso(queue.now_ms() - hours * 3_600_000)
        redis_client.lpush("q:tasks:dlq", json.dumps({"payload": {}, "failed_at": at}))
    watchman().warn(queue, 3)
    assert "the oldest for 2.1 d" in lines()[0]


def test_a_date_in_the_future_is_no_negative_age(
    queue: Queue, redis_client: redis.Redis, lines: Callable[[], list[str]]
) -> None:
    for at in (worker_module.iso(queue.now_ms() + 3_600_000), "9998-12-31T23:59:59-23:59"):
        redis_client.rpush("q:tasks:dlq", json.dumps({"payload": {}, "failed_at": at}))
        watchman().warn(queue, 1)
        assert "the oldest for 0 s;" in lines()[0]


@pytest.mark.parametrize(
    ("name", "look"), [("q:tasks", "--list"), ("q:my mail", "--queue 'q:my mail' --list")]
)
def test_the_command_that_it_names_can_be_pasted(
    server: Server,
    redis_client: redis.Redis,
    lines: Callable[[], list[str]],
    name: str,
    look: str,
) -> None:
    """It looks at the queue that the warning is about."""
    other = Queue(server.url, name)
    watchman().warn(other, 1)
    other.close()
    assert lines()[0].endswith(f"dead letters in {name}:dlq: 1; see python replay.py {look}")


def test_a_worker_warns_of_what_it_buried(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
) -> None:
    handler(BAD)
    conservation.push('{"id": 1}', '{"id": 2}')
    process = worker("--burst", "--max-attempts", 1)
    assert process.wait() == 0
    assert "dead letters in q:tasks:dlq: 2" in process.err


# ── The command ────────────────────────────────────────────────────────────────────────────────


def test_the_command_gets_each_envelope_on_its_stdin(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    """Every dead letter once, byte for byte; --burst waits for the last one."""
    handler(BAD)
    conservation.push(*(json.dumps({"id": i, "pad": "x" * 100_000}) for i in range(5)))
    out = tmp_path / "seen"
    flags = ("--max-attempts", 1, "--on-dead-letter", f"cat >> '{out}'")
    assert worker("--burst", "--concurrency", 2, *flags).wait() == 0
    dead = redis_client.lrange("q:tasks:dlq", 0, -1)
    assert sorted(out.read_bytes().splitlines()) == sorted(dead)


def test_a_command_that_fails_is_logged_and_touches_nothing(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    redis_client: redis.Redis,
) -> None:
    handler(BAD)
    conservation.push('{"id": 1}')
    process = worker("--burst", "--max-attempts", 1, "--on-dead-letter", "exit 7")
    assert process.wait() == 0
    assert "--on-dead-letter exited with 7" in process.err
    assert redis_client.llen("q:tasks:dlq") == 1


def settings(command: str) -> Settings:
    return read_settings(["--on-dead-letter", command])


def test_a_command_that_hangs_is_killed_with_all_that_it_started(
    queue: Queue,
    lines: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "HOOK_LIMIT", 0.2)
    pids = tmp_path / "pids"
    man = Watchman(settings(f"sleep 600 & echo $! >> '{pids}'; sleep 600"))
    man.start(b"{}")
    until(lambda: not (man.tend(queue), man.busy())[1])
    assert any("killed" in line for line in lines())
    child = int(pids.read_text())
    until(lambda: not is_alive(child))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def test_a_flood_is_bounded_and_said(queue: Queue, lines: Callable[[], list[str]]) -> None:
    """At most HOOK_BACKLOG wait for the command; the newest are kept."""
    man = Watchman(settings("cat"))
    tokens = range(1, worker_module.HOOK_BACKLOG + 51)
    man.note(b"".join(token.to_bytes(8, "little") for token in tokens))
    assert man.tokens == list(tokens)[50:]
    assert any("not run for 50 dead letters" in line for line in lines())


def test_a_letter_that_was_replayed_meanwhile_is_passed_over(queue: Queue) -> None:
    man = Watchman(settings("cat"))
    man.note((17).to_bytes(8, "little"))
    man.tend(queue)
    assert not man.busy()


def pages_read(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return int(stats["cmdstat_lrange"]["calls"]) if "cmdstat_lrange" in stats else 0


def test_a_command_that_falls_behind_does_not_keep_the_foreman_from_its_leases(
    queue: Queue, redis_client: redis.Redis
) -> None:
    """One look for one letter at a time; the next as soon as the foreman has done the rest."""
    man = Watchman(settings("cat"))
    man.note(b"".join(token.to_bytes(8, "little") for token in range(50)))
    for left in (49, 48, 47):
        redis_client.config_resetstat()
        man.tend(queue)
        assert (len(man.tokens), man.eager()) == (left, True)
        assert pages_read(redis_client) == 1


def test_a_look_for_a_letter_ends_after_so_many_letters_or_bytes(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    man = Watchman(settings("cat"))
    letter = b'{"payload": {}, "token": 17, "x": "%b"}'
    redis_client.rpush("q:tasks:dlq", *[letter % (b"x" * 1000)] * 200)
    redis_client.rpush("q:tasks:dlq", b'{"payload": {}, "token": 18, "x": ""}')
    assert man.find(queue, 18) is not None
    for limit, most, pages in (("HOOK_BYTES", 50_000, 5), ("HOOK_BACKLOG", 100, 10)):
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, limit, most)
            redis_client.config_resetstat()
            assert man.find(queue, 18) is None
            assert pages_read(redis_client) == pages


def test_a_stop_does_not_wait_for_the_command_beyond_the_grace(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    conservation: Conservation,
    tmp_path: Path,
) -> None:
    handler(BAD)
    conservation.push('{"id": 1}')
    began = tmp_path / "began"
    hook = f"touch '{began}'; sleep 600"
    process = worker("--grace", 0.3, "--max-attempts", 1, "--on-dead-letter", hook)
    until(began.exists)
    assert process.stop() == 0
