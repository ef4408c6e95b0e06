"""The desk acts: new payloads, runs cancelled, the queue paused, letters followed as they come."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from letters import DLQ, SEEN, desk, envelope
from processes import PROJECT, Process, clean_environment, until
from server import Server
from test_desk import HOSTILE

import replay
from worker import Message, Queue

Run = Callable[..., Process]


def printed(process: Process) -> list[dict[str, Any]]:
    """The letters that --follow --json has printed so far."""
    return [json.loads(line) for line in process.out.splitlines() if line.endswith("}")]


# ── A new payload ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("payload", ['"no json \\udcff"', '"{\\"a\\": 1}"', "7", '{"old": 1}'])
def test_a_payload_is_replaced_and_all_else_is_kept(
    server: Server, redis_client: redis.Redis, tmp_path: Path, payload: str
) -> None:
    """What no --set can repair, too; the new one keeps its own bytes."""
    text = '{ "kind" : "pay", "n": 1.10, "big": 1e400 }'
    (tmp_path / "new.json").write_text(f"\n{text}\n")
    redis_client.lpush(DLQ, envelope(payload, replays=1), envelope({"other": 1}))
    shown = desk(server, "--payload", tmp_path / "new.json", "--dry-run").out.splitlines()
    assert shown[0].startswith("- ") and shown[1].endswith(f"payload: {text}")
    said = desk(server, "--payload", tmp_path / "new.json")
    assert said.code == 0 and "1 left" in said.out
    message = Message.parse(redis_client.lindex("q:tasks", 0))
    assert message.own.decode() == text
    assert (message.attempts, message.first_seen_at, message.kept["replays"]) == (0, SEEN, 2)


def test_a_payload_comes_from_a_pipe_and_can_be_set_on(
    server: Server, redis_client: redis.Redis
) -> None:
    raw = envelope('"junk"')
    redis_client.lpush(DLQ, raw, envelope({"other": 1}))
    done = subprocess.run(
        [sys.executable, PROJECT / "replay.py", replay.Letter(raw).id, "--payload", "-",
         "--set", "b.0=2"],
        input='{"b": [1]}', capture_output=True, text=True, timeout=60,
        env=clean_environment({"REDIS_URL": server.url}),
    )  # fmt: skip
    assert done.returncode == 0, done
    assert Message.parse(redis_client.lindex("q:tasks", 0)).own == b'{"b": [2]}'


@pytest.mark.parametrize("content", ["", "[1]", "junk", '{"a": 1} {}', None])
def test_what_is_no_payload_is_refused_before_anything_moves(
    server: Server, redis_client: redis.Redis, tmp_path: Path, content: str | None
) -> None:
    redis_client.lpush(DLQ, envelope())
    if content is not None:
        (tmp_path / "new").write_text(content)
    said = desk(server, "--payload", tmp_path / "new")
    assert said.code == 2 and "--payload" in said.err and redis_client.llen(DLQ) == 1


@pytest.mark.parametrize("others", [["--all"], ["--kind", "x"], ["ab", "cd"], ["--like", "ab"]])
def test_one_payload_is_not_for_many_letters(
    server: Server, redis_client: redis.Redis, tmp_path: Path, others: list[str]
) -> None:
    (tmp_path / "new").write_text("{}")
    said = desk(server, *others, "--payload", tmp_path / "new")
    assert said.code == 2 and "one letter" in said.err


# ── Discarded and restored ────────────────────────────────────────────────────────────────────


def test_what_was_discarded_is_for_its_owner_and_restored_once(
    server: Server, redis_client: redis.Redis, tmp_path: Path
) -> None:
    file = tmp_path / "f"
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(3)))
    assert desk(server, "--discard", "--all", "--yes", "--file", file).code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert desk(server, "--restore", file).code == 0
    assert not file.exists() and (tmp_path / "f.restored").exists()
    assert redis_client.llen(DLQ) == 3


@pytest.mark.parametrize("fence", [None, "1", "junk"])
def test_what_was_restored_into_another_redis_is_visible_there(
    server: Server, redis_client: redis.Redis, tmp_path: Path, queue: Queue, fence: str | None
) -> None:
    """Three letters restored are three listed, replayed once, never six."""
    file, token = tmp_path / "f", queue.now_ms() * 1000 - 5_000_000
    redis_client.lpush(DLQ, *(envelope({"n": n}, token=token + n) for n in range(3)))
    assert desk(server, "--discard", "--all", "--yes", "--file", file).code == 0
    redis_client.flushall()
    if fence:
        redis_client.set("q:tasks:fence", fence)
    assert desk(server, "--restore", file).out == "restored 3\n"
    assert desk(server, "--list", "--json").out.count("\n") == 3
    assert desk(server, "--restore", f"{file}.restored").out.startswith("restored 0; 3 were there")
    assert desk(server, "--all").out == "replayed 3\n"
    assert redis_client.llen("q:tasks") == 3


# ── Cancel ────────────────────────────────────────────────────────────────────────────────────

SLEEPER = """
import time
def process(msg):
    if msg["kind"] != "sleep":
        return
    try:
        time.sleep(60)
    except BaseException as error:
        print("interrupted by", type(error).__name__, flush=True)
        raise
"""


def test_a_cancelled_run_is_dead_and_its_handler_interrupted(
    server: Server,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    handler(SLEEPER)
    text = '{"kind": "sleep", "n": 1.10}'
    redis_client.lpush("q:tasks", text, '{"kind": "ok"}')
    process = worker("--lease", 1)
    [token] = until(lambda: redis_client.hkeys("q:tasks:running"), saw=lambda: process)
    said = desk(server, "--cancel", token.decode())
    assert said.code == 0 and f"cancelled {token.decode()}, kind sleep" in said.out
    raw = redis_client.lindex(DLQ, 0)
    letter = json.loads(raw)
    assert letter["reason"] == "cancelled" and letter["error"].startswith("Cancelled: ")
    assert (letter["attempts"], letter["token"]) == (0, int(token))
    assert Message.parse(replay.revive(raw)).own.decode() == text
    assert letter["first_seen_at"] <= letter["failed_at"] and len(letter["history"]) == 1
    until(lambda: "interrupted by LeaseLost" in process.out, saw=lambda: process)
    until(lambda: redis_client.hget("q:tasks:stats", "done") == b"1", saw=lambda: process)
    assert redis_client.llen(DLQ) == 1 and process.stop() == 0
    said = desk(server, "--list", "--reason", "cancelled")
    assert said.code == 0 and "Cancelled" in said.out


@pytest.mark.parametrize("text", [b"{}", b"\xff no json", b'{"a": NaN}', b"[" * 100_000])
def test_any_run_can_be_cancelled_whoever_has_it(
    server: Server, redis_client: redis.Redis, text: bytes
) -> None:
    """Notes of runs that nobody settled are charged; a lease is not needed."""
    redis_client.hset("q:tasks:running", "41", text)
    redis_client.hset("q:tasks:notes", "41", "1 me worker_died WorkerDied: gone\n")
    assert desk(server, "--cancel", 41).code == 0
    [raw] = redis_client.lrange(DLQ, 0, -1)
    assert not redis_client.exists("q:tasks:running", "q:tasks:notes")
    assert replay.revive(raw).startswith(text[:1])
    letter = json.loads(raw)
    assert letter["history"][0]["error"] == "WorkerDied: gone"
    said = desk(server, "--cancel", 41)
    assert said.code == 1 and "no message runs under 41" in said.err
    assert redis_client.llen(DLQ) == 1


# ── Pause ─────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_claimed_in_a_pause_and_every_look_says_so(
    server: Server,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    handler("def process(msg): pass")
    said = desk(server, "--pause")
    assert said.code == 0 and said.out.startswith("paused: ")
    redis_client.lpush("q:tasks", "{}")
    process = worker()
    until(lambda: redis_client.zcard("q:tasks:workers") == 2, saw=lambda: process)
    for look in ("--status", "--health", "--check"):
        assert "paused since 20" in desk(server, look).out, look
    assert json.loads(desk(server, "--status", "--json").out)["paused"].startswith("since 20")
    assert 'qr_paused{queue="q:tasks"} 1' in desk(server, "--prometheus").out
    again = desk(server, "--pause")
    assert again.code == 0 and "paused already, since 20" in again.out
    assert redis_client.llen("q:tasks") + redis_client.llen("q:tasks:next") == 1
    assert desk(server, "--resume").out == "q:tasks goes on\n"
    until(lambda: redis_client.hget("q:tasks:stats", "done") == b"1", saw=lambda: process)
    assert desk(server, "--resume").out == "q:tasks was not paused\n"
    assert "paused" not in desk(server, "--status").out + desk(server, "--check").out


def test_a_pause_made_by_hand_is_one_and_commands_no_terminal(
    server: Server, redis_client: redis.Redis
) -> None:
    redis_client.set("q:tasks:pause", HOSTILE)
    for look in ("--status", "--health", "--check", "--pause"):
        out = desk(server, look).out
        assert "paused" in out and {c for c in out if not c.isprintable()} == {"\n"}
    redis_client.set("q:tasks:pause", "")
    assert "paused by somebody" in desk(server, "--status").out


# ── Follow ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def follow(run: Run, tmp_path: Path) -> Callable[..., Process]:
    """--follow --json that looks every 10 ms instead of twice a second, once it has begun."""
    script = tmp_path / "follow.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        "import replay\n"
        "replay.LOOK_EVERY = 0.01\n"
        "at_the_end = replay.Desk.at_the_end\n"
        "def begun(desk):\n"
        "    found = at_the_end(desk)\n"
        "    print('begun', file=sys.stderr, flush=True)\n"
        "    return found\n"
        "replay.Desk.at_the_end = begun\n"
        "sys.exit(replay.main(sys.argv[1:]))\n"
    )

    def start(*flags: object, shape: str = "--json", **environment: object) -> Process:
        process = run(script, "--follow", shape, *flags, **environment)
        until(lambda: "begun" in process.err, saw=lambda: process)
        return process

    return start


def test_letters_are_printed_as_they_come_and_filters_apply(
    run: Run, redis_client: redis.Redis, follow: Callable[..., Process]
) -> None:
    redis_client.lpush(DLQ, envelope({"kind": "pay", "n": 0}))
    process = follow("--kind", "pay", "--error", "/b.d/")
    plain = follow(shape="--follow")
    for n in range(1, 4):
        redis_client.lpush(DLQ, envelope({"kind": "pay", "n": n}, traceback="here"))
        redis_client.lpush(DLQ, envelope({"kind": "mail", "n": n}))
    redis_client.lpush(DLQ, b"junk", envelope({"kind": "pay", "n": 4}, error=f"bad {HOSTILE}"))
    until(lambda: len(printed(process)) == 4, saw=lambda: process)
    assert [letter["payload"]["n"] for letter in printed(process)] == [1, 2, 3, 4]
    assert printed(process)[0]["traceback"] == "here" and printed(process)[0]["reason"]
    redis_client.lpush(DLQ, envelope({"kind": "pay", "n": 5}, error=f"bad {HOSTILE}"))
    until(lambda: plain.out.count("bad") > 1, saw=lambda: plain)
    assert {c for c in plain.out if not c.isprintable()} == {"\n"}
    assert process.stop(signal.SIGINT) == 0 and plain.stop(signal.SIGINT) == 0
    assert "Traceback" not in process.err + plain.err


@pytest.mark.parametrize("seed", range(4))
def test_follow_misses_none_and_repeats_none(
    redis_client: redis.Redis, follow: Callable[..., Process], queue: Queue, seed: int
) -> None:
    """Letters come one by one and in crowds; meanwhile those that have been printed, and older
    ones, are taken out anywhere, or all at once, and others are put back at the oldest end. (These
    are new if it saw the list empty before.)
    """
    rng, alive, n = random.Random(seed), dict[int, bytes](), 0
    old = [envelope({"n": -k}, token=k) for k in range(1, rng.choice((2, 900)))]
    redis_client.lpush(DLQ, *old)
    process = follow()

    def come(crowd: int) -> None:
        date = replay.iso(queue.now_ms() + 1000)
        new = {k: envelope({"n": k}, token=1000 + k, failed_at=date) for k in range(n, n + crowd)}
        redis_client.lpush(DLQ, *new.values())
        alive.update(new)

    def caught_up() -> bool:
        return f'"payload": {{"n": {n - 1}}}' in process.out

    for _ in range(200):
        crowd = rng.choice((1, 2, 30, 700)) if rng.random() < 0.3 else 1
        come(crowd)
        n += crowd
        seen = re.findall(r'"payload": {"n": (\d+)}', process.out)[-1:]
        known = [k for k in alive if seen and k <= int(seen[0])]
        taken = known if rng.random() < 0.1 else rng.sample(known, min(len(known), crowd))
        with redis_client.pipeline(transaction=rng.random() < 0.5) as pipe:
            for k in taken:
                pipe.lrem(DLQ, 1, alive.pop(k))
            for raw in rng.sample(old, min(len(old), rng.choice((0, 0, 5)))):
                pipe.lrem(DLQ, 1, raw)
            if rng.random() < 0.05:
                pipe.rpush(DLQ, *(envelope({"n": -10_000 - n - k}) for k in range(20)))
            pipe.execute()
        if rng.random() < 0.3:
            until(caught_up, saw=lambda: printed(process)[-5:])
    until(caught_up, saw=lambda: printed(process)[-5:])
    numbers = [letter["payload"]["n"] for letter in printed(process)]
    assert [number for number in numbers if number >= 0] == list(range(n))
    assert len(set(numbers)) == len(numbers) and not any(-1000 < number < 0 for number in numbers)


@pytest.mark.parametrize("seed", range(30))
def test_a_cursor_misses_none_and_repeats_none_whatever_happens_between_two_commands(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """New letters come; what it has seen, and what is older, is taken; old ones are restored."""
    rng = random.Random(seed)
    monkeypatch.setattr(replay, "PAGE", rng.choice((3, 10, 500)))
    seen, n, restored = list[int](), 0, 0
    old = [b"{-%d}" % k for k in range(1, rng.choice((2, 4, 50)))]
    redis_client.lpush(DLQ, *old)
    cursor = replay.Cursor(queue)
    cursor.at, cursor.size = len(old), rng.choice((2, 5, 20))
    cursor.seen, cursor.last = [hash(raw) for raw in old[-30:]], old[-1]
    read, calm = replay.read, False

    def meanwhile(queue: Queue, low: int, high: int) -> list[bytes]:
        nonlocal n, restored
        if not calm and rng.random() < 0.5:
            crowd = rng.choice((1, 1, 2, 5, 40))
            redis_client.lpush(DLQ, *(b"{%d}" % k for k in range(n, n + crowd)))
            n += crowd
            known = [*(b"{%d}" % k for k in seen), *old]
            taken = known if rng.random() < 0.1 else rng.sample(known, min(len(known), crowd))
            for raw in taken:
                redis_client.lrem(DLQ, 1, raw)
            if rng.random() < 0.1:
                restored += 20
                redis_client.rpush(DLQ, *(b"{r%d}" % k for k in range(restored - 20, restored)))
        return read(queue, low, high)

    def page() -> int:
        letters = cursor.page()
        for raw in letters:
            assert raw not in old or cursor.lost, "an old one that it knows"
            if raw[1:-1].isdigit():
                seen.append(int(raw[1:-1]))
            cursor.saw(raw)
        return len(letters)

    monkeypatch.setattr(replay, "read", meanwhile)
    for _ in range(60):
        page()
    calm = True
    while page():
        pass
    assert seen == list(range(n))


def test_equal_letters_are_each_printed(
    redis_client: redis.Redis, follow: Callable[..., Process]
) -> None:
    """Nothing tells them apart but their number."""
    redis_client.lpush(DLQ, *[b'{"payload": {}}'] * 3)
    process = follow()
    for n in range(1, 6):
        redis_client.lpush(DLQ, *[b'{"payload": {}}'] * n)
    until(lambda: len(printed(process)) >= 15, saw=lambda: process)
    redis_client.lpush(DLQ, envelope({"last": 1}))
    until(lambda: "last" in process.out, saw=lambda: process)
    assert len(printed(process)) == 16


def test_follow_waits_for_redis_and_repeats_nothing(
    start_server: Callable[..., Server], follow: Callable[..., Process]
) -> None:
    server = start_server(append_only=True, options={"appendfsync": "always"})
    with server.client() as client:
        client.lpush(DLQ, envelope({"n": -1}))
        process = follow(REDIS_URL=server.url)
        client.lpush(DLQ, envelope({"n": 0}))
        until(lambda: len(printed(process)) == 1, saw=lambda: process)
    server.kill()
    until(lambda: "waiting for Redis" in process.err, saw=lambda: process)
    server.start()
    with server.client() as client:
        client.lpush(DLQ, envelope({"n": 1}))
    until(lambda: len(printed(process)) >= 2, saw=lambda: process)
    assert [letter["payload"]["n"] for letter in printed(process)] == [0, 1]
    assert "Redis answers again" in process.err and process.running()


def test_when_all_that_it_knew_is_gone_the_date_decides(
    redis_client: redis.Redis, queue: Queue, follow: Callable[..., Process]
) -> None:
    """Below what it knows lie letters that it has never read: they are not taken for new ones."""
    deep = [envelope({"n": -n}, token=n) for n in range(1, 3000)]
    redis_client.lpush(DLQ, *deep)
    process = follow()
    future = replay.iso(queue.now_ms() + 3_600_000)
    with redis_client.pipeline(transaction=True) as pipe:
        pipe.ltrim(DLQ, 1500, -1)
        pipe.lpush(DLQ, envelope({"n": 1}, token=10**6, failed_at=future))
        pipe.execute()
    until(lambda: len(printed(process)) >= 1, saw=lambda: process)
    redis_client.lpush(DLQ, envelope({"n": 2}, token=10**6 + 1, failed_at=future))
    until(lambda: len(printed(process)) >= 2, saw=lambda: process)
    assert [letter["payload"]["n"] for letter in printed(process)] == [1, 2]


def test_the_end_of_the_reader_ends_it_quietly(server: Server, redis_client: redis.Redis) -> None:
    command = ["bash", "-c", '"$0" "$1" --follow --json | head -1; exit ${PIPESTATUS[0]}',
               sys.executable, str(PROJECT / "replay.py")]  # fmt: skip
    reader = subprocess.Popen(
        command, env=clean_environment({"REDIS_URL": server.url}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    n = 0
    while reader.poll() is None:
        n += 1
        redis_client.lpush(DLQ, envelope({"n": n}))
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(0.05)
        assert n < 1200
    out, err = reader.communicate()
    assert (reader.returncode, err, out.count("\n")) == (0, "", 1)
