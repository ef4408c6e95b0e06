"""Every transition and every refusal, on a real server, with all places looked at after each step.

The law behind all of them: a message is in exactly one place at every instant, and where Redis
refuses a write in the middle, in one place too many rather than in none. Nothing here sleeps: time
is moved by moving a score, and whose turn it is by spending a token.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from conftest import Conservation, payload_text
from processes import Process, until
from server import Server

import worker as worker_module
from backoff import Policy
from worker import (
    END,
    Claim,
    Message,
    Note,
    Pulse,
    Queue,
    Run,
    Script,
    Splice,
    Step,
    conclude,
    unsettled,
)

A, B, C = b'{"kind": "a"}', b'{"kind": "b"}', b'{"kind": "c"}'
ENVELOPE = b'{"payload": {"kind": "a"}, "error": "E: e", "attempts": 5}'
BEFORE, AFTER = b'{"payload": ', b', "error": "E: e", "attempts": 5}'
NEW = b'{"kind": "a", "attempts": 1}'
ATTEMPT = Splice(b"", len(A) - 1, b', "attempts": 1', 1)  # makes NEW of A
AROUND = Splice(BEFORE, END, b"", 0, AFTER)  # makes ENVELOPE of A
LEASE = 30.0  # seconds; no test lives to see one end by itself

SCRIPTS = {name: x for name, x in vars(worker_module).items() if isinstance(x, Script)}
TRANSITIONS = (
    "claim", "done", "retry", "bury", "bury_unread", "fall", "renew", "checkpoint", "replay",
)  # fmt: skip
LONGEST = {"CLAIM": 31}  # lines; others have 25. A retry's way leads through the front of the line


def places(queue: Queue) -> dict[str, list[bytes]]:
    """Every text by place, without the empty places; waiting lists are oldest first.

    A run without a lease is under "bare" instead of "running". A lease without a run is under
    "stray", and so is the token of notes whose message neither runs nor waits for its retry. None
    of these is a thing that a transition may leave.
    """
    names, ask = queue.names, queue.command
    flat = ask("HGETALL", names.running)
    running = dict(zip(flat[::2], flat[1::2], strict=True))
    leases = ask("ZRANGE", names.leases, 0, -1)
    leased = [lease.rpartition(b" ")[0] for lease in leases]
    retrying = [member.partition(b":") for member in ask("ZRANGE", names.retry, 0, -1)]
    known = running.keys() | {token for token, _, _ in retrying}
    found = {
        "waiting": ask("LRANGE", names.waiting, 0, -1)[::-1],
        "next": ask("LRANGE", names.next, 0, -1)[::-1],
        "running": [running[token] for token in leased if token in running],
        "bare": [text for token, text in running.items() if token not in leased],
        "retrying": [text for _, _, text in retrying],
        "dead": ask("LRANGE", names.dlq, 0, -1)[::-1],
        "stray": [lease for lease in leases if lease.rpartition(b" ")[0] not in running]
        + [token for token in ask("HKEYS", names.notes) if token not in known],
    }
    return {place: texts for place, texts in found.items() if texts}


def push(queue: Queue, *texts: bytes) -> None:
    queue.command("LPUSH", queue.names.waiting, *texts)


def turn(queue: Queue, whose: str) -> None:
    """Makes the next claim one that prefers a due retry, or one that prefers fresh work."""
    last = int(queue.command("GET", queue.names.fence) or 0)
    if (last % 2 == 1) != (whose == "retry"):
        queue.command("INCR", queue.names.fence)


def idle(queue: Queue) -> Any:
    """The reply of a claim that brings no run."""
    [reply] = queue.do(queue.claim("me", LEASE))
    assert reply[0] != b"run"
    return reply


def claim(queue: Queue, owner: str = "me", whose: str = "") -> Run:
    """The run that a claim brings, its text fetched if that was left out; at `whose` turn."""
    if whose:
        turn(queue, whose)
    [reply] = queue.do(queue.claim(owner, LEASE))
    run = Claim.of(reply, owner).run
    assert run is not None, reply
    return run if run.here else run._replace(raw=queue.text(run.token) or b"")


def running(queue: Queue, text: bytes = A, owner: str = "me") -> Run:
    """The run of `text`, pushed and claimed."""
    push(queue, text)
    run = claim(queue, owner)
    assert run.raw == text
    return run


def retrying(queue: Queue, text: bytes, score: float | str = 1, token: int = 7) -> None:
    """Puts a message into the retry set; with a score of 1 it has been due since 1970."""
    queue.command("ZADD", queue.names.retry, score, b"%d:%b" % (token, text))


def expire(queue: Queue, *runs: Run, deadline_ms: int = 1) -> None:
    """Moves the deadlines into the past."""
    for run in runs:
        queue.command("ZADD", queue.names.leases, "XX", deadline_ms, run.lease)


def deadline(queue: Queue, run: Run) -> float:
    return float(queue.command("ZSCORE", queue.names.leases, run.lease))


def leases_of(*runs: Run) -> list[bytes]:
    return [run.lease.encode() for run in runs]


def fall(
    queue: Queue, *runs: Run, reason: str = "worker_died", wait: float | None = 0.0
) -> list[bytes]:
    """The leases of the runs that fell: of those given, or else of all whose lease has ended."""
    step = queue.fall(reason, "signal SIGKILL", *[run.lease for run in runs], wait=wait)
    [fallen] = queue.do(step)
    return fallen


def take_over(queue: Queue, run: Run, owner: str = "rescuer") -> Run:
    """Somebody else has the run now, as after a lease that ended; returns the new one."""
    expire(queue, run)
    assert fall(queue) == leases_of(run)
    taken = claim(queue, owner, "retry")
    assert taken.raw == run.raw
    return taken


def notes(queue: Queue) -> dict[int, list[tuple[str, str, str]]]:
    """Token → (owner, reason, error) of each of its notes."""
    flat = queue.command("HGETALL", queue.names.notes)
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {int(token): [note[1:] for note in Note.read(lines)] for token, lines in pairs}


# ---- The scripts as they are written -----------------------------------------------------------


def header_of(name: str) -> str:
    """The comment above a script's constant, the script itself left out."""
    source = inspect.getsource(worker_module)
    found = re.search(rf"((?:^#.*\n)+)^{name} = Script\(", source, re.MULTILINE)
    assert found, f"{name} has no header"
    return found[1]


def test_the_scripts_are_the_transitions() -> None:
    """And one that moves no message."""
    assert {script.name for script in SCRIPTS.values()} == {*TRANSITIONS, "beat"}
    for name, script in SCRIPTS.items():
        assert name == script.name.upper()
    for name in TRANSITIONS:
        assert callable(getattr(Queue, name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_its_header_names_what_goes_in_and_out(name: str) -> None:
    """25 lines at most; each KEYS, an ARGV line if it has arguments, every word it returns."""
    script, header = SCRIPTS[name], header_of(name)
    body = script.source.decode().strip()
    assert len(body.splitlines()) <= LONGEST.get(name, 25)
    assert header.startswith(f"# {script.name}: ")
    keys = re.search(r"^# +KEYS +(.*)$", header, re.MULTILINE)
    assert keys, "no KEYS line"
    assert keys[1].split() == script.roles
    assert bool(re.search(r"^# +ARGV +\S", header, re.MULTILINE)) == ("ARGV" in body)
    for returned in re.findall(r"return \{?'(\w+)'", body):
        assert re.search(rf"\b{returned}\b", header), f"the header does not say {returned!r}"
    assert "→" in header


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_uses_every_key_that_it_asks_for(name: str) -> None:
    """A key that it does not need may be the one that a cluster, or a user's rights, refuse."""
    body = SCRIPTS[name].source.decode().partition("unpack(KEYS)")[2]
    for role in SCRIPTS[name].roles:
        assert re.search(rf"\b{role}\b", body), f"{role} is not used"
    assert "KEYS" not in body


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_builds_no_key_reads_no_json_and_walks_nothing(name: str) -> None:
    body = SCRIPTS[name].source.decode()
    assert "q:" not in body
    assert not re.search(r"cjson|cmsgpack|'KEYS'|'H?SCAN'|'SORT'|'FLUSH|while|repeat", body)


def test_every_key_derives_from_the_queue_name() -> None:
    for name in ("q:tasks", "{q:tasks}"):
        keys = vars(worker_module.Names(name)).values()
        assert all(key == name or key.startswith(name + ":") for key in keys)
        assert len(set(keys)) == len(keys)


# ---- claim -------------------------------------------------------------------------------------


def test_a_claim_takes_the_oldest_message_and_gives_it_a_lease(queue: Queue) -> None:
    push(queue, A, B)
    before = queue.now_ms()
    run = claim(queue, "me")
    after = queue.now_ms()
    assert (run.raw, run.owner, run.here, run.notes) == (A, "me", True, ())
    assert places(queue) == {"waiting": [B], "running": [A]}
    assert before <= run.start_ms <= after
    assert queue.command("ZRANGE", queue.names.leases, 0, -1) == [b"%d me" % run.token]
    assert deadline(queue, run) == run.start_ms + LEASE * 1000


def test_a_run_is_a_token_and_a_text_and_the_token_says_when_it_began(queue: Queue) -> None:
    run = running(queue)
    assert queue.command("HGETALL", queue.names.running) == [b"%d" % run.token, A]
    assert queue.command("GET", queue.names.fence) == b"%d" % run.token
    assert abs(run.token / 1000 - run.start_ms) <= 1


def test_a_message_pushed_right_is_taken_too(queue: Queue) -> None:
    push(queue, A)
    queue.command("RPUSH", queue.names.waiting, B)
    assert claim(queue).raw == B
    assert claim(queue).raw == A
    assert places(queue) == {"running": [B, A]}


def test_what_the_doorbell_brought_is_taken_first(queue: Queue) -> None:
    push(queue, A, B)
    assert queue.ring(1)
    assert places(queue) == {"waiting": [B], "next": [A]}
    assert claim(queue).raw == A
    assert claim(queue).raw == B
    assert places(queue) == {"running": [A, B]}


def test_the_doorbell_stays_silent_when_nothing_waits(queue: Queue) -> None:
    assert not queue.ring(0.001)
    assert places(queue) == {}


def test_a_claim_on_an_empty_queue_says_so_and_writes_nothing(queue: Queue) -> None:
    assert idle(queue) == [b"idle", -1, 0]
    assert queue.command("DBSIZE") == 0


def test_an_idle_claim_says_when_the_next_retry_is_due(queue: Queue) -> None:
    queue.do(queue.retry(running(queue), 20, ATTEMPT))
    running(queue, B)
    reply = idle(queue)
    word, wait, left = reply
    assert (word, left) == (b"idle", 2)
    assert 0 < wait <= 20_000
    assert Claim.of(reply, "me") == Claim(None, wait, 2)
    assert places(queue) == {"running": [B], "retrying": [NEW]}


@pytest.mark.parametrize("score", ["inf", 1e300, 9e15])
def test_a_retry_that_is_never_due_is_far_away_and_no_error(queue: Queue, score: object) -> None:
    retrying(queue, A, score)
    assert idle(queue)[1] > 1e12
    assert places(queue) == {"retrying": [A]}


@pytest.mark.parametrize("held", [b"", b"until Monday"])
def test_a_paused_queue_gives_out_nothing_and_takes_everything(queue: Queue, held: bytes) -> None:
    run = running(queue, A)
    push(queue, B)
    retrying(queue, C)
    queue.command("SET", queue.names.pause, held)
    assert [Claim.of(idle(queue), "me") for _ in "12"] == [Claim(paused=True)] * 2
    assert queue.do(queue.done(run)) == [b"ok"]
    assert places(queue) == {"waiting": [B], "retrying": [C]}
    queue.command("DEL", queue.names.pause)
    assert {claim(queue).raw, claim(queue).raw} == {B, C}


def test_a_due_retry_is_taken_without_its_token(queue: Queue) -> None:
    first = running(queue)
    queue.do(queue.retry(first, 20, ATTEMPT))
    retrying(queue, NEW, token=first.token)
    run = claim(queue)
    assert (run.raw, run.here) == (NEW, True)
    assert run.token > first.token
    assert places(queue) == {"running": [NEW]}


def test_a_due_retry_goes_by_way_of_the_front_of_the_line(
    queue: Queue, redis_client: redis.Redis
) -> None:
    """Back on q:tasks with its count, as the exercise says, where MONITOR shows it."""
    push(queue, B)
    retrying(queue, NEW)
    turn(queue, "retry")
    with redis_client.monitor() as monitor:
        assert claim(queue).raw == NEW
        seen = []
        while not seen or not seen[-1].startswith("LTRIM"):
            seen.append(monitor.next_command()["command"])
    assert f"RPUSH q:tasks {NEW.decode()}" in seen
    assert places(queue) == {"waiting": [B], "running": [NEW]}


@pytest.mark.parametrize(("whose", "order"), [("retry", [B, A]), ("fresh", [A, B])])
def test_retries_and_fresh_messages_take_turns(
    queue: Queue, whose: str, order: list[bytes]
) -> None:
    push(queue, *[A] * 5)
    for token in range(5):
        retrying(queue, B, token=token)
    turn(queue, whose)
    assert [claim(queue).raw for _ in range(10)] == order * 5
    assert places(queue) == {"running": order * 5}


@pytest.mark.parametrize("whose", ["retry", "fresh"])
def test_a_turn_that_nobody_needs_goes_to_the_other(queue: Queue, whose: str) -> None:
    push(queue, A)
    assert claim(queue, whose=whose).raw == A
    retrying(queue, B)
    assert claim(queue, whose=whose).raw == B
    retrying(queue, C, "inf")
    push(queue, A)
    assert claim(queue, whose=whose).raw == A


def test_the_turn_is_in_the_token_that_no_poison_can_kill(queue: Queue, server: Server) -> None:
    """Each claim is by a worker of its own, as after a death, and still they take turns."""
    push(queue, *[A] * 3)
    for token in range(3):
        retrying(queue, B, token=token)
    runs = []
    for i in range(6):
        one = Queue(server.url)
        runs.append(claim(one, f"worker {i}"))
        one.close()
    assert [run.token % 2 for run in runs] == [1, 0] * 3  # the first token ever is an odd one
    assert [run.raw for run in runs] == [A, B] * 3


def test_of_the_doorbell_the_line_and_a_due_retry_each_gets_its_turn(queue: Queue) -> None:
    push(queue, A, B)
    assert queue.ring(1)
    retrying(queue, C)
    assert claim(queue, whose="retry").raw == C
    assert places(queue) == {"waiting": [B], "next": [A], "running": [C]}
    assert [claim(queue).raw, claim(queue).raw] == [A, B]


def test_settling_and_claiming_are_one_round_trip(queue: Queue) -> None:
    run = running(queue)
    push(queue, B)
    word, reply = queue.do(queue.done(run), queue.claim("me", LEASE))
    assert (word, reply[0], reply[3]) == (b"ok", b"run", B)
    assert places(queue) == {"running": [B]}


def test_equal_messages_are_as_many_runs(queue: Queue) -> None:
    push(queue, *[A] * 50)
    tokens = [claim(queue).token for _ in range(50)]
    assert len(set(tokens)) == 50
    assert tokens == sorted(tokens)
    assert places(queue) == {"running": [A] * 50}


def reads(client: redis.Redis) -> set[str]:
    """Which commands that read a text have run since the last look."""
    reading = (
        "hget", "hgetall", "hmget", "hvals", "hscan", "lindex", "lrange", "lpos", "zrange",
        "zrangebyscore", "zscan",
    )  # fmt: skip
    found = {name for name in reading if f"cmdstat_{name}" in client.info("commandstats")}
    client.config_resetstat()
    return found


def test_a_claim_reads_no_message_but_the_one_it_takes(
    queue: Queue, redis_client: redis.Redis
) -> None:
    """Else one huge message that waits for its retry would be copied by each claim of another."""
    retrying(queue, C, "inf")
    push(queue, A, B)
    turn(queue, "fresh")
    reads(redis_client)
    assert claim(queue).raw == A
    assert reads(redis_client) == {"lindex"}
    assert claim(queue).raw == B  # a retry's turn, and none is due: the range that it read is empty
    assert reads(redis_client) == {"lindex", "zrangebyscore"}
    retrying(queue, C)
    push(queue, A)
    turn(queue, "retry")
    reads(redis_client)
    assert claim(queue).raw == C
    assert reads(redis_client) == {"zrangebyscore", "hget"}  # the latter of its notes


def test_done_renewing_and_looking_for_ones_own_read_no_text(
    queue: Queue, redis_client: redis.Redis
) -> None:
    """After a blip with 300 messages of 1 MB running, each hand asks what is its own."""
    first, second = running(queue, A), running(queue, B)
    reads(redis_client)
    queue.do(queue.renew(LEASE, first.lease, second.lease))
    assert reads(redis_client) == set()
    queue.do(queue.done(first, C))
    assert reads(redis_client) == set()
    assert queue.held("me") == [second.token]
    assert reads(redis_client) == {"zscan"}  # of the leases
    assert queue.text(second.token) == B
    assert reads(redis_client) == {"hget"}
    assert queue.text(first.token) is None


STRANGE_FENCES = (
    b"", b"garbage", b"0", b"-5", b"17", b"0x10", b"1.5", b"1e15", b"inf", b"-inf", b"nan", b"-nan",
    b"1e300", b"9007199254740991", b"9007199254740993", b"9223372036854775807", b"9" * 400,
    b"\xff", b" 7 ", b"7\n",
)  # fmt: skip


@pytest.mark.parametrize("fence", STRANGE_FENCES)
def test_tokens_rise_whatever_the_fence_key_says(queue: Queue, fence: bytes) -> None:
    """Two runs under one token would be one run, and the other message gone."""
    runs = [running(queue, A)]
    queue.command("SET", queue.names.fence, fence)
    runs += [running(queue, B), running(queue, C)]
    runs.append(take_over(queue, runs[-1]))
    tokens = [run.token for run in runs]
    assert tokens == sorted(set(tokens))
    assert places(queue) == {"running": [A, B, C]}


def test_tokens_rise_after_the_fence_key_is_lost_or_set_back(queue: Queue) -> None:
    first = running(queue, A).token
    saved = queue.command("GET", queue.names.fence)
    second = running(queue, B).token
    queue.command("SET", queue.names.fence, saved)  # a restart that lost the last second
    third = running(queue, C).token
    queue.command("DEL", queue.names.fence)
    fourth = running(queue, A).token
    assert first < second < third < fourth


def test_a_fence_ahead_of_the_clock_still_counts_on(queue: Queue) -> None:
    """The server's clock went back an hour: tokens go on from the last one, not from the clock."""
    ahead = running(queue, A).token + 3_600_000_000
    queue.command("SET", queue.names.fence, ahead)
    assert [running(queue, B).token, running(queue, C).token] == [ahead + 1, ahead + 2]


def test_even_and_odd_tokens_follow_each_other(queue: Queue) -> None:
    push(queue, *[A] * 50)
    tokens = [claim(queue).token % 2 for _ in range(50)]
    assert tokens == [1, 0] * 25


# ---- done, retry, bury -------------------------------------------------------------------------


def test_done_leaves_nothing_but_a_count(queue: Queue) -> None:
    run = running(queue)
    assert queue.do(queue.done(run)) == [b"ok"]
    assert places(queue) == {}
    assert queue.command("HGETALL", queue.names.stats) == [b"done", b"1"]
    assert queue.command("DBSIZE") == 2  # that, and the last token


def test_done_queues_the_follow_ups_in_their_order(queue: Queue) -> None:
    run = running(queue)
    push(queue, A)
    assert queue.do(queue.done(run, B, C)) == [b"ok"]
    assert places(queue) == {"waiting": [A, B, C]}


def test_a_retry_is_due_after_its_wait(queue: Queue) -> None:
    run = running(queue)
    before = queue.now_ms()
    assert queue.do(queue.retry(run, 1.5, ATTEMPT)) == [b"ok"]
    after = queue.now_ms()
    assert places(queue) == {"retrying": [NEW]}
    [member, due] = queue.command("ZRANGE", queue.names.retry, 0, -1, "WITHSCORES")
    assert member == b"%d:%b" % (run.token, NEW)
    assert before + 1500 <= float(due) <= after + 1500


def test_fifty_equal_messages_are_fifty_retries(queue: Queue) -> None:
    push(queue, *[A] * 50)
    runs = [claim(queue) for _ in range(50)]
    assert queue.do(*[queue.retry(run, 5, ATTEMPT) for run in runs]) == [b"ok"] * 50
    assert places(queue) == {"retrying": [NEW] * 50}


def test_the_dead_are_kept_newest_left(queue: Queue) -> None:
    queue.do(queue.bury(running(queue, A), AROUND))
    queue.do(queue.bury(running(queue, B), Splice(b"later")))
    assert queue.command("LRANGE", queue.names.dlq, 0, -1) == [b"later", ENVELOPE]
    assert places(queue) == {"dead": [ENVELOPE, b"later"]}


def test_every_end_is_counted_by_its_name(queue: Queue) -> None:
    queue.do(queue.done(running(queue)))
    queue.do(queue.retry(running(queue), 60, ATTEMPT))
    queue.do(queue.bury(running(queue), AROUND))
    queue.do(queue.bury_unread(running(queue), BEFORE, AFTER))
    queue.do(queue.replay(ENVELOPE, A))
    queue.do(queue.done(claim(queue)))
    fall(queue, running(queue), running(queue), wait=60)
    fall(queue, running(queue), reason="released", wait=60)
    fall(queue)
    flat = queue.command("HGETALL", queue.names.stats)
    assert dict(zip(flat[::2], map(int, flat[1::2]), strict=True)) == {
        b"done": 2, b"retried": 1, b"dead": 2, b"replayed": 1, b"fallen": 2, b"released": 1,
    }  # fmt: skip


BYTES = {
    "empty": b"",
    "a space": b" ",
    "spaces around": b"  {} \n",
    "zero bytes": b"\0a\0",
    "line ends": b'{"a":\r\n1}\r\n',
    "no UTF-8": b"\xff\xfe",
    "quotes and backslashes": rb'"\"\\"\u0000\udcff',
    "looks like a retry member": b"12:34:x",
    "looks like a lease": b"17 me",
    "a Lua pattern": b"%d+ %% %1 %z",
    "every byte": bytes(range(256)),
    "every byte in turn with a percent sign": b"".join(b"%%%c" % byte for byte in range(256)),
    "5 MB": b"a b" * 1_700_000,
}
KEEP = Splice(head=END)


@pytest.mark.parametrize("text", BYTES.values(), ids=BYTES)
def test_bytes_come_through_every_transition(queue: Queue, text: bytes) -> None:
    run = running(queue, text)
    assert fall(queue, run, reason="released", wait=None) == leases_of(run)
    run = claim(queue)
    assert (run.raw, run.here) == (text, False)
    assert queue.do(queue.retry(run, 0, KEEP)) == [b"ok"]
    run = claim(queue)
    assert (run.raw, run.here) == (text, True)
    assert queue.do(queue.checkpoint(run, LEASE, KEEP)) == [b"ok"]
    run = take_over(queue, run)
    assert run.raw == text
    assert places(queue) == {"running": [text]}
    queue.do(queue.bury(run, Splice(BEFORE, END, b"", 0, AFTER)))
    dead = BEFORE + text + AFTER
    assert places(queue) == {"dead": [dead]}
    assert queue.do(queue.replay(dead, text)) == [b"ok"]
    assert places(queue) == {"waiting": [text]}


@pytest.mark.parametrize("text", BYTES.values(), ids=BYTES)
def test_what_nobody_reads_is_buried_as_a_string_of_its_exact_bytes(
    queue: Queue, text: bytes
) -> None:
    """By Redis alone: nobody has to read the message, or to send it."""
    run = running(queue, text)
    step = queue.bury_unread(run, BEFORE, AFTER)
    assert step.size < 100
    assert queue.do(step) == [b"ok"]
    [dead] = places(queue).pop("dead")
    assert dead.startswith(BEFORE) and dead.endswith(AFTER)
    facts = json.loads(dead)
    assert facts["payload"].encode("utf-8", "surrogateescape") == text
    assert dead.isascii()
    assert facts["attempts"] == 5
    assert places(queue).keys() == {"dead"}


@pytest.mark.parametrize("splice", [
    Splice(b"new"), KEEP, Splice(b"<", 3, b"|", 5, b">"), Splice(b"", 5, b"", 7, b""),
    Splice(b"", 0, b"m", 0, b""), Splice(b"", 1, b"", 1, b""), Splice(b"", 10, b"m", 10, b""),
    Splice(b"", 11, b"m", 11, b""), Splice(b"", 9, b"m", 1, b""), Splice(bytes(range(256))),
    Splice(b"%1", 3, b"%%", 6, b"%0"), Splice(b"", END, b"m", 0, b""), Splice(b"", 0, b"m", END),
])  # fmt: skip
def test_redis_joins_a_text_as_we_would(queue: Queue, splice: Splice) -> None:
    old = b"\0\xff%3456789"
    assert len(old) == 10
    new = splice.of(old)
    run = running(queue, old)
    assert queue.do(queue.checkpoint(run, LEASE, splice)) == [b"ok"]
    assert places(queue) == {"running": [new]}
    queue.do(queue.done(run))
    assert queue.do(queue.retry(running(queue, old), 0, splice)) == [b"ok"]
    assert places(queue) == {"retrying": [new]}
    assert queue.do(queue.done(claim(queue))) == [b"ok"]
    assert queue.do(queue.bury(running(queue, old), splice)) == [b"ok"]
    assert places(queue) == {"dead": [new]}


def test_a_splice_takes_the_place_of_what_is_ours_by_then(queue: Queue) -> None:
    """So a checkpoint may be repeated, and a result need not know of the last one."""
    run = running(queue)
    one = Splice(b"", len(A) - 1, b', "attempts": 0, "_retry": {"stage": 1}', 1)
    for _ in range(2):
        assert queue.do(queue.checkpoint(run, LEASE, one)) == [b"ok"]
        assert places(queue) == {"running": [one.of(A)]}
    assert queue.do(queue.retry(run, 0, ATTEMPT)) == [b"ok"]
    assert places(queue) == {"retrying": [NEW]}


# ---- A late worker is refused ------------------------------------------------------------------

STEPS: dict[str, Callable[[Queue, Run], Step]] = {
    "done": lambda queue, run: queue.done(run),
    "done with a follow-up": lambda queue, run: queue.done(run, B),
    "retry": lambda queue, run: queue.retry(run, 0, ATTEMPT),
    "bury": lambda queue, run: queue.bury(run, AROUND),
    "bury_unread": lambda queue, run: queue.bury_unread(run, BEFORE, AFTER),
    "checkpoint": lambda queue, run: queue.checkpoint(run, LEASE, ATTEMPT),
}
ENDS: dict[str, Callable[[Queue, Run], Step]] = {
    **{name: STEPS[name] for name in ("done", "retry", "bury", "bury_unread")},
    "fall": lambda queue, run: queue.fall("worker_died", "", run.lease),
}


@pytest.mark.parametrize("late", STEPS)
@pytest.mark.parametrize("end", ENDS)
def test_a_settled_run_is_refused(queue: Queue, end: str, late: str) -> None:
    run = running(queue)
    assert queue.do(ENDS[end](queue, run)) in ([b"ok"], [leases_of(run)])
    before = places(queue)
    assert queue.do(STEPS[late](queue, run)) == [b"stale"]
    assert queue.do(queue.renew(LEASE, run.lease)) == [leases_of(run)]
    assert places(queue) == before


@pytest.mark.parametrize("end", ENDS)
def test_a_settled_run_falls_no_more(queue: Queue, end: str) -> None:
    """The foreman of a hand that died after its settlement had been sent."""
    run = running(queue)
    queue.do(ENDS[end](queue, run))
    before = places(queue), notes(queue)
    assert fall(queue, run) == []
    assert (places(queue), notes(queue)) == before


@pytest.mark.parametrize("late", STEPS)
def test_a_run_that_was_taken_over_is_refused(queue: Queue, late: str) -> None:
    run = running(queue)
    taken = take_over(queue, run)
    before = notes(queue)
    assert queue.do(STEPS[late](queue, run)) == [b"stale"]
    assert fall(queue, run) == []
    assert queue.do(queue.renew(LEASE, run.lease)) == [leases_of(run)]
    assert places(queue) == {"running": [A]}
    assert notes(queue) == before
    assert queue.do(queue.renew(LEASE, taken.lease)) == [[]]


@pytest.mark.parametrize("late", STEPS)
def test_a_token_that_never_was_is_refused(queue: Queue, late: str) -> None:
    push(queue, A)
    assert queue.do(STEPS[late](queue, Run(17, "me"))) == [b"stale"]
    assert fall(queue, Run(17, "me")) == []
    assert places(queue) == {"waiting": [A]}


@pytest.mark.parametrize("late", STEPS)
def test_an_equal_message_of_somebody_else_is_not_touched(queue: Queue, late: str) -> None:
    mine = running(queue, A)
    other = running(queue, A)
    queue.do(queue.done(mine))
    assert queue.do(STEPS[late](queue, mine)) == [b"stale"]
    assert places(queue) == {"running": [A]}
    assert queue.text(other.token) == A


def test_a_stale_settlement_does_not_hold_up_the_claim_behind_it(queue: Queue) -> None:
    run = running(queue, A)
    take_over(queue, run)
    push(queue, B)
    word, reply = queue.do(queue.done(run), queue.claim("me", LEASE))
    assert (word, reply[0], reply[3]) == (b"stale", b"run", B)
    assert places(queue) == {"running": [A, B]}


def test_the_error_of_one_step_is_its_own(queue: Queue) -> None:
    """The claim behind it has happened, and must not be lost with it."""
    run = running(queue, A)
    push(queue, B)
    queue.command("SET", queue.names.dlq, "of the wrong type")
    error, reply = queue.do(queue.bury(run, AROUND), queue.claim("me", LEASE))
    assert isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error)
    assert (reply[0], reply[3]) == (b"run", B)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        queue.do(queue.bury(run, AROUND))
    queue.command("DEL", queue.names.dlq)
    assert places(queue) == {"running": [A, B]}


# ---- Two steps as one --------------------------------------------------------------------------
# The busy loop settles the last run and claims the next in one call of one script.


@pytest.mark.parametrize("end", [*STEPS])
def test_settling_and_claiming_may_be_one_script(queue: Queue, end: str) -> None:
    run = running(queue)
    step = STEPS[end](queue, run)
    assert queue.do(step) == [b"ok"]
    expected = places(queue)
    queue.command("FLUSHDB")
    run = running(queue)
    push(queue, C)
    turn(queue, "fresh")
    [[word, reply]] = queue.do(queue.both(STEPS[end](queue, run), queue.claim("me", LEASE)))
    taken = Claim.of(reply, "me").run
    assert taken is not None
    assert (word, taken.raw) == (b"ok", C)
    assert taken.token > run.token
    found = places(queue)
    assert found["running"].pop() == C
    assert {place: texts for place, texts in found.items() if texts} == expected


def test_of_two_steps_as_one_the_second_sees_what_the_first_has_done(queue: Queue) -> None:
    run = running(queue)
    turn(queue, "retry")
    step = queue.both(queue.retry(run, 0, ATTEMPT), queue.claim("me", LEASE))
    [[word, reply]] = queue.do(step)
    assert (word, reply[0], reply[3]) == (b"ok", b"run", NEW)
    run = Run(int(reply[2]), "me")
    [[word, reply]] = queue.do(queue.both(queue.retry(run, 9, KEEP), queue.claim("me", LEASE)))
    assert (word, reply[0], reply[2]) == (b"ok", b"idle", 1)
    assert 8_000 < reply[1] <= 9_000
    assert places(queue) == {"retrying": [NEW]}


def test_of_two_steps_as_one_the_second_does_not_happen_if_redis_refuses_the_first(
    queue: Queue,
) -> None:
    run = running(queue, A)
    push(queue, B)
    queue.command("SET", queue.names.dlq, "of the wrong type")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        queue.do(queue.both(queue.bury(run, AROUND), queue.claim("me", LEASE)))
    queue.command("DEL", queue.names.dlq)
    assert places(queue) == {"waiting": [B], "running": [A]}


def test_of_two_steps_as_one_the_first_has_happened_if_redis_refuses_the_second(
    queue: Queue,
) -> None:
    run = running(queue, A)
    push(queue, B)
    queue.command("RENAME", queue.names.fence, "aside")
    queue.command("HSET", queue.names.fence, "of the", "wrong type")
    step = queue.both(queue.bury(run, AROUND), queue.claim("me", LEASE))
    for _ in range(2):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            queue.do(step)
        assert places(queue) == {"waiting": [B], "dead": [ENVELOPE]}
    queue.command("RENAME", "aside", queue.names.fence)
    [[word, reply]] = queue.do(step)
    assert (word, reply[3]) == (b"stale", B)


@pytest.mark.parametrize("known", ["nothing", "the two alone", "the claim", "the two as one"])
def test_a_run_taken_over_and_two_steps_as_one_claim_one_message_that_we_know(
    queue: Queue, known: str
) -> None:
    run = running(queue, A)
    take_over(queue, run)
    step = queue.both(queue.done(run), queue.claim("me", LEASE))
    queue.command("SCRIPT", "FLUSH")
    if known == "the two as one":
        queue.command("SCRIPT", "LOAD", step.script.source)
    if known in ("the claim", "the two alone"):
        queue.command("SCRIPT", "LOAD", worker_module.CLAIM.source)
    if known == "the two alone":
        queue.command("SCRIPT", "LOAD", worker_module.DONE.source)
    push(queue, B, C)
    [[word, reply]] = queue.do(step)
    assert (word, reply[0], reply[3]) == (b"stale", b"run", B)
    assert places(queue) == {"waiting": [C], "running": [A, B]}
    assert queue.held("me") == [int(reply[2])]


# ---- Leases ------------------------------------------------------------------------------------


def test_renewing_moves_the_deadline_of_what_still_runs(queue: Queue) -> None:
    mine, other = running(queue, A), running(queue, B)
    settled = running(queue, C)
    queue.do(queue.done(settled))
    untouched = deadline(queue, other)
    before = queue.now_ms()
    [refused] = queue.do(queue.renew(100, mine.lease, settled.lease, "17 me"))
    assert refused == [*leases_of(settled), b"17 me"]
    assert before + 100_000 <= deadline(queue, mine) <= queue.now_ms() + 100_000
    assert deadline(queue, other) == untouched
    assert places(queue) == {"running": [B, A]}


def test_renewing_nothing_is_no_error(queue: Queue) -> None:
    assert queue.do(queue.renew(LEASE)) == [[]]


def test_a_checkpoint_keeps_the_token_and_renews(queue: Queue) -> None:
    run = running(queue)
    expire(queue, run)
    assert queue.do(queue.checkpoint(run, LEASE, ATTEMPT)) == [b"ok"]
    assert queue.text(run.token) == NEW
    assert deadline(queue, run) > queue.now_ms()
    assert fall(queue) == []
    assert places(queue) == {"running": [NEW]}


def test_a_claim_whose_reply_was_lost_is_found_under_its_owner(queue: Queue) -> None:
    push(queue, A, B)
    run = claim(queue, "me")
    claim(queue, "me/2")
    assert queue.held("me") == [run.token]
    assert queue.text(run.token) == A
    assert queue.held("m") == queue.held("e") == queue.held("nobody") == []
    queue.do(queue.done(run))
    assert queue.held("me") == []


def test_ones_own_are_found_among_thousands(queue: Queue) -> None:
    mine = [running(queue, A, "me/1").token]
    push(queue, *[B] * 3_000)
    queue.do(*[queue.claim("other/1", LEASE)] * 3_000)
    mine.append(running(queue, C, "me/1").token)
    queue.command("ZADD", queue.names.leases, 1, b"\xff me/1", 1, b" me/1", 1, b"me/1")
    assert queue.held("me/1") == mine


# ---- A run that nobody settled -----------------------------------------------------------------


def test_a_live_lease_does_not_fall_unless_it_is_given(queue: Queue) -> None:
    """Whoever knows that a hand is dead need not wait for its lease to end."""
    run = running(queue)
    assert fall(queue) == []
    assert places(queue) == {"running": [A]}
    assert fall(queue, run) == leases_of(run)
    assert places(queue) == {"retrying": [A]}


def test_a_lease_renewed_in_time_does_not_fall(queue: Queue) -> None:
    """The check is at the moment of acting: what was seen expired a moment ago may be renewed."""
    renewed, ended = running(queue, A), running(queue, B)
    expire(queue, renewed, ended)
    queue.do(queue.renew(LEASE, renewed.lease))
    assert fall(queue) == leases_of(ended)
    assert places(queue) == {"running": [A], "retrying": [B]}
    assert queue.do(queue.done(renewed)) == [b"ok"]


def test_what_falls_is_due_now_under_its_old_token(queue: Queue) -> None:
    run = running(queue)
    before = queue.now_ms()
    fall(queue, run)
    [member, due] = queue.command("ZRANGE", queue.names.retry, 0, -1, "WITHSCORES")
    assert member == b"%d:%b" % (run.token, A)
    assert before <= float(due) <= queue.now_ms()
    taken = claim(queue)
    assert taken.raw == A
    assert taken.token > run.token


def test_what_falls_may_have_to_wait(queue: Queue) -> None:
    before = queue.now_ms()
    fall(queue, running(queue), reason="released", wait=20)
    word, wait, _ = idle(queue)
    assert word == b"idle"
    assert before + 20_000 - 1 <= queue.now_ms() + wait <= queue.now_ms() + 20_000
    assert places(queue) == {"retrying": [A]}


def test_what_falls_to_the_front_comes_before_all_that_is_due(queue: Queue) -> None:
    retrying(queue, B)
    run = running(queue, A)
    push(queue, C)
    fall(queue, run, reason="released", wait=None)
    assert [claim(queue, whose="retry").raw for _ in "12"] == [A, B]
    assert places(queue) == {"waiting": [C], "running": [A, B]}


def test_a_fall_leaves_a_note_of_when_whose_and_what(queue: Queue) -> None:
    run = running(queue, A, "host:1:ab/2")
    before = queue.now_ms()
    queue.do(queue.fall("timed_out", "TimeLimitExceeded: 600 s (taskproc.py:3)", run.lease))
    [note] = Note.read(queue.command("HGET", queue.names.notes, run.token))
    assert note[1:] == ("host:1:ab/2", "timed_out", "TimeLimitExceeded: 600 s (taskproc.py:3)")
    assert before <= note.at_ms <= queue.now_ms()
    assert claim(queue).notes == (note,)


@pytest.mark.parametrize("error", ["", "two\nlines", "17 you timed_out\n18 you timed_out x\r", " "])
def test_a_note_is_one_line_whatever_it_says(queue: Queue, error: str) -> None:
    run = running(queue)
    queue.do(queue.fall("worker_died", error, run.lease))
    [(owner, reason, said)] = notes(queue)[run.token]
    assert (owner, reason) == ("me", "worker_died")
    assert "\n" not in said and "\r" not in said


def test_a_message_with_notes_is_claimed_without_its_text(queue: Queue) -> None:
    """What killed a hand that read it is fetched only when somebody knows who holds it."""
    fall(queue, running(queue))
    [reply] = queue.do(queue.claim("me", LEASE))
    run = Claim.of(reply, "me").run
    assert run is not None
    assert (run.here, run.raw, len(run.notes)) == (False, b"", 1)
    assert places(queue) == {"running": [A]}
    assert queue.text(run.token) == A


def test_notes_move_with_their_message_and_add_up(queue: Queue) -> None:
    first = running(queue, A, "one")
    fall(queue, first, reason="worker_died")
    one = ("one", "worker_died", "signal SIGKILL")
    assert notes(queue) == {first.token: [one]}
    second = claim(queue, "two")
    assert notes(queue) == {second.token: [one]}
    fall(queue, second, reason="released")
    third = claim(queue, "three")
    assert notes(queue) == {third.token: [one, ("two", "released", "signal SIGKILL")]}
    assert [note[1:] for note in third.notes] == notes(queue)[third.token]
    assert third.released == 1
    assert places(queue) == {"running": [A]}


def test_each_note_of_a_failed_run_is_charged_and_no_other(queue: Queue) -> None:
    """By whoever claims the message next; what a stop broke off is counted, and not charged."""
    push(queue, NEW)
    for reason in ("worker_died", "released", "timed_out", "released", "released"):
        fall(queue, claim(queue), reason=reason)
    run = claim(queue)
    settlement = conclude(queue, Policy(), run, Message.parse(run.raw), unsettled(run))
    assert queue.do(settlement.step) == [b"ok"]
    [text] = places(queue).pop("retrying")
    message = Message.parse(text)
    assert (message.own, message.attempts, message.kept["released"]) == (A, 1 + 2, 3)
    errors = [entry["error"] for entry in message.kept["history"]]
    assert errors == ["signal SIGKILL"] * 2
    assert notes(queue) == {}


@pytest.mark.parametrize("end", [name for name in ENDS if name != "fall"])
def test_a_settlement_clears_the_notes_of_its_message_alone(queue: Queue, end: str) -> None:
    fallen = running(queue, B)
    fall(queue, fallen, wait=60)
    fall(queue, running(queue, A))
    run = claim(queue, whose="retry")
    assert run.raw == A
    assert queue.do(ENDS[end](queue, run)) == [b"ok"]
    assert notes(queue).keys() == {fallen.token}
    assert "stray" not in places(queue)


@pytest.mark.parametrize("wait", [0.0, 60.0])
def test_a_retry_claimed_without_notes_moves_nobodys(queue: Queue, wait: float) -> None:
    fallen = running(queue, B)
    fall(queue, fallen, wait=60)
    queue.do(queue.retry(running(queue, A), 0, ATTEMPT))
    run = claim(queue, whose="retry")
    assert (run.raw, run.here, run.notes) == (NEW, True, ())
    assert notes(queue).keys() == {fallen.token}


def test_checkpoint_and_renew_leave_the_notes(queue: Queue) -> None:
    fall(queue, running(queue))
    run = claim(queue)
    before = notes(queue)
    assert queue.do(queue.checkpoint(run, LEASE, ATTEMPT)) == [b"ok"]
    assert queue.do(queue.renew(LEASE, run.lease)) == [[]]
    assert notes(queue) == before
    assert before.keys() == {run.token}


@pytest.mark.parametrize("lines", [
    b"", b"\n", b"garbage\n", b"\xff\xfe\n", b"soon me timed_out x\n", b"17 me\n", b"17  \n",
    b"9" * 20 + b" me timed_out x\n",
])  # fmt: skip
def test_notes_that_nobody_can_have_written_say_nothing(lines: bytes) -> None:
    assert Note.read(lines) == ()
    assert Note.read(lines + b"17 me timed_out x y\n") == (Note(17, "me", "timed_out", "x y"),)


def test_a_hand_that_dies_of_what_it_rescued_is_rescued(queue: Queue) -> None:
    second = take_over(queue, running(queue))
    third = take_over(queue, second)
    assert places(queue) == {"running": [A]}
    assert queue.do(queue.retry(second, 0, ATTEMPT)) == [b"stale"]
    assert queue.do(queue.retry(third, 0, ATTEMPT)) == [b"ok"]
    assert places(queue) == {"retrying": [NEW]}


def test_runs_with_one_deadline_all_fall(queue: Queue) -> None:
    runs = [running(queue, text) for text in (A, A, B)]
    expire(queue, *runs, deadline_ms=1_000)
    assert sorted(fall(queue)) == leases_of(*runs)
    assert fall(queue) == []
    taken = [claim(queue) for _ in runs]
    assert sorted(run.raw for run in taken) == [A, A, B]
    assert not {run.token for run in taken} & {run.token for run in runs}
    assert places(queue).keys() == {"running"}


def test_two_foremen_let_a_run_fall_once(queue: Queue, server: Server) -> None:
    other = Queue(server.url)
    run = running(queue)
    expire(queue, run)
    assert [fall(queue), fall(other)] == [leases_of(run), []]
    assert [fall(queue, run), fall(other, run)] == [[], []]
    assert len(notes(queue)[run.token]) == 1
    other.close()


def test_an_abandoned_run_is_found_behind_two_thousand_healthy_ones(queue: Queue) -> None:
    push(queue, *[A] * 2_000, B)
    queue.do(*[queue.claim("busy", LEASE)] * 2_000)
    run = claim(queue, "gone")
    expire(queue, run)
    assert fall(queue) == leases_of(run)
    assert fall(queue) == []
    assert claim(queue).raw == B


def test_a_hundred_fall_in_one_step_and_the_others_in_the_next(queue: Queue) -> None:
    push(queue, *[A] * 250)
    runs = [claim(queue) for _ in range(250)]
    expire(queue, *runs)
    assert [len(fall(queue)) for _ in range(4)] == [100, 100, 50, 0]
    assert places(queue) == {"retrying": [A] * 250}


@pytest.mark.parametrize("given", [False, True])
def test_a_step_does_not_move_a_hundred_megabytes(queue: Queue, given: bool) -> None:
    """Redis serves nobody else meanwhile; what did not fall yet, falls in one of the next steps."""
    make = "for i = 1, 100 do redis.call('LPUSH', KEYS[1], string.rep(i % 10, 1000000)) end"
    queue.command("EVAL", make, 1, queue.names.waiting)
    replies = queue.do(*[queue.claim("me", LEASE)] * 100)
    runs = [Run(int(reply[2]), "me") for reply in replies]
    if not given:
        expire(queue, *runs)
    left, steps = leases_of(*runs), 0
    while left:
        fallen = fall(queue, *runs) if given else fall(queue)
        assert 0 < len(fallen) <= 3
        assert set(fallen) <= set(left)
        left = [lease for lease in left if lease not in fallen]
        steps += 1
    assert steps >= 100 / 3
    assert queue.command("ZCARD", queue.names.retry) == 100


def test_a_message_larger_than_a_step_falls_alone(queue: Queue) -> None:
    runs = [running(queue, bytes([i]) * 5_000_000) for i in range(3)]
    expire(queue, *runs)
    assert [len(fall(queue)) for _ in range(4)] == [1, 1, 1, 0]
    assert len(places(queue).pop("retrying")) == 3


STRAYS = (b"", b" ", b"abc", b"17", b"17 me", b" me", b"\xff\xfe", b"\xff \xfe", b"7 8 9", b"x y z")


def test_leases_without_a_run_are_swept_and_hide_no_expired_one(queue: Queue) -> None:
    run = running(queue)
    strays = [x for i in range(250) for x in (i, f"stray-{i}")]
    strays += [x for stray in STRAYS for x in (5, stray)]
    queue.command("ZADD", queue.names.leases, *strays)
    expire(queue, run, deadline_ms=1_000)
    fallen = [lease for _ in range(4) for lease in fall(queue)]
    assert fallen == leases_of(run)
    assert places(queue) == {"retrying": [A]}
    assert queue.command("HGET", queue.names.stats, "fallen") == b"1"


@pytest.mark.parametrize("stray", STRAYS)
def test_a_lease_that_is_none_is_refused(queue: Queue, stray: bytes) -> None:
    run = running(queue)
    assert queue.do(queue.renew(LEASE, stray, run.lease)) == [[stray]]
    assert queue.do(Step(worker_module.FALL, ("worker_died", 0, stray))) == [[]]
    assert places(queue) == {"running": [A]}


# ---- A run without a lease ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 700])  # one page and several
def test_a_run_without_a_lease_is_adopted(queue: Queue, count: int) -> None:
    """Somebody deleted the leases, or Redis evicted them: the two sizes differ, and that shows."""
    push(queue, *[A] * count, B)
    queue.do(*[queue.claim("gone", LEASE)] * count)
    queue.command("DEL", queue.names.leases)
    claim(queue)
    pulse = Pulse(*queue.do(queue.beat({}))[0])
    assert (pulse.running, pulse.leases) == (count + 1, 1)
    assert queue.adopt(LEASE) == count
    assert len(places(queue)["running"]) == count + 1
    assert fall(queue) == []
    assert queue.adopt(LEASE) == 0
    pulse = Pulse(*queue.do(queue.beat({}))[0])
    assert pulse.running == pulse.leases == count + 1


def test_what_was_adopted_falls_when_its_real_owner_does_not_show_up(queue: Queue) -> None:
    run = running(queue, A, "gone")
    queue.command("DEL", queue.names.leases)
    queue.adopt(LEASE)
    nobody = run._replace(owner="-")
    expire(queue, nobody)
    assert fall(queue) == leases_of(nobody)
    assert places(queue) == {"retrying": [A]}
    assert notes(queue) == {run.token: [("-", "worker_died", "signal SIGKILL")]}


def test_the_real_owner_takes_back_what_was_adopted(queue: Queue) -> None:
    run = running(queue, A)
    queue.command("DEL", queue.names.leases)
    assert queue.adopt(LEASE) == 1
    assert queue.held("me") == []
    assert queue.do(queue.renew(LEASE, run.lease)) == [[]]
    assert queue.command("ZRANGE", queue.names.leases, 0, -1) == leases_of(run)
    assert queue.held("me") == [run.token]
    assert queue.do(queue.done(run)) == [b"ok"]
    assert places(queue) == {}


@pytest.mark.parametrize("end", ENDS)
def test_what_was_adopted_may_be_settled_before_the_next_renewal(queue: Queue, end: str) -> None:
    """The adopted lease is left behind; it gives no run to anybody, and goes when it has ended."""
    run = running(queue, A)
    queue.command("DEL", queue.names.leases)
    queue.adopt(LEASE)
    assert queue.do(ENDS[end](queue, run)) in ([b"ok"], [leases_of(run)])
    left = places(queue)
    assert left.pop("stray", []) in ([], [b"%d -" % run.token])
    expire(queue, run._replace(owner="-"))
    before = notes(queue)
    assert fall(queue) == []
    assert places(queue) == left
    assert notes(queue) == before


@pytest.mark.parametrize("text", [b"", b"x", b"\xff\xfe", A])
@pytest.mark.parametrize("token", [
    b"", b" ", b"-", b"abc", b"7", b"7 8", b"x y z", b"\xff\xfe", b"\xff \xfe", b"1e400",
    b"9" * 400, b"0x7", b"7:8", b"%d", b"\0",
])  # fmt: skip
def test_what_somebody_wrote_into_running_falls_and_is_claimed(
    queue: Queue, token: bytes, text: bytes
) -> None:
    """Whatever it is, it ends as a run under a token of ours, and no script stumbles over it."""
    mine = running(queue, B)
    queue.command("HSET", queue.names.running, token, text)
    assert queue.held("me") == [mine.token]
    assert queue.adopt(LEASE) == 1
    queue.command("ZADD", queue.names.leases, "XX", 1, token + b" -")
    assert fall(queue) == [token + b" -"]
    run = claim(queue)
    assert run.token > mine.token
    assert (token + b":" + text).endswith(run.raw)
    assert run.raw.endswith(text)
    assert run.raw == text or not token.isdigit()
    assert queue.do(queue.bury_unread(run, BEFORE, AFTER)) == [b"ok"]
    assert places(queue)["running"] == [B]
    assert fall(queue) == []


# ---- beat --------------------------------------------------------------------------------------


def test_a_beat_says_how_the_queue_is_and_who_is_alive(queue: Queue) -> None:
    run = running(queue)
    queue.do(queue.bury(run, AROUND))
    running(queue, B)
    before = queue.now_ms()
    [reply] = queue.do(queue.beat({"one/1": 2.5, "one/2": 0.0}))
    pulse = Pulse(*reply)
    assert pulse == (pulse.now_ms, 1, 1, 1, 0)
    assert before <= pulse.now_ms <= queue.now_ms()
    flat = queue.command("ZRANGE", queue.names.workers, 0, -1, "WITHSCORES")
    assert flat == [b"one/1", b"%d" % (pulse.now_ms - 2500), b"one/2", b"%d" % pulse.now_ms]
    queue.command("SET", queue.names.pause, "")
    assert Pulse(*queue.do(queue.beat({}))[0]).paused == 1


def test_a_beat_forgets_who_has_been_silent_for_a_day_and_all_but_ten_thousand(
    queue: Queue,
) -> None:
    day, now = 86_400_000, queue.now_ms()
    queue.command("ZADD", queue.names.workers, now - day - 1, "old", now - day + 60_000, "silent")
    queue.do(queue.beat({"new": 0.0}))
    assert queue.command("ZRANGE", queue.names.workers, 0, -1) == [b"silent", b"new"]
    queue.command("ZADD", queue.names.workers, *[x for i in range(10_005) for x in (now, i)])
    queue.do(queue.beat({"newest": 0.0}))
    assert queue.command("ZCARD", queue.names.workers) == 10_000
    assert queue.command("ZSCORE", queue.names.workers, "newest")
    assert not queue.command("ZSCORE", queue.names.workers, "silent")


# ---- replay ------------------------------------------------------------------------------------


def test_replay_moves_exactly_the_envelope_it_was_given(queue: Queue) -> None:
    for text in (b"one", b"two", b"three"):
        queue.do(queue.bury(running(queue), Splice(text)))
    assert queue.do(queue.replay(b"two", B)) == [b"ok"]
    assert places(queue) == {"waiting": [B], "dead": [b"one", b"three"]}
    assert queue.do(queue.replay(b"two", B)) == [b"gone"]
    assert queue.do(queue.replay(b"thr", B)) == [b"gone"]
    assert places(queue) == {"waiting": [B], "dead": [b"one", b"three"]}


@pytest.mark.parametrize(
    ("end", "left"), [(-1, [b"old", b"x", b"twin"]), (1, [b"old", b"twin", b"x"])]
)
def test_replay_takes_one_of_two_twins(queue: Queue, end: int, left: list[bytes]) -> None:
    for text in (b"old", b"twin", b"x", b"twin"):
        queue.do(queue.bury(running(queue), Splice(text)))
    assert queue.do(queue.replay(b"twin", A, end)) == [b"ok"]
    assert places(queue) == {"waiting": [A], "dead": left}


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 1000])
def test_replay_finds_a_letter_wherever_it_was_last_seen(queue: Queue, place: int) -> None:
    """Its place counted from the oldest can only have become lower since; a wrong one finds nothing
    that is not there, and takes no other.
    """
    for text in (b"one", b"two", b"three"):
        queue.do(queue.bury(running(queue), Splice(text)))
    found = place == 0 or place >= 2
    assert queue.do(queue.replay(b"two", B, -1, place)) == [b"ok" if found else b"gone"]
    left = {"waiting": [B], "dead": [b"one", b"three"]}
    assert places(queue) == (left if found else {"dead": [b"one", b"two", b"three"]})


def test_replay_of_an_empty_desk_finds_nothing(queue: Queue) -> None:
    assert queue.do(queue.replay(ENVELOPE, A)) == [b"gone"]
    assert places(queue) == {}


def test_a_replayed_message_waits_behind_those_already_there(queue: Queue) -> None:
    queue.do(queue.bury(running(queue), AROUND))
    push(queue, B)
    queue.do(queue.replay(ENVELOPE, A))
    assert places(queue) == {"waiting": [B, A]}


# ---- A write refused in the middle -------------------------------------------------------------
# Redis does not roll a script back. So: check, then add, then remove; what a refused write leaves
# behind is a duplicate, which the token lets the next step see, or nothing at all.


class Move(NamedTuple):
    """A transition with message A in front of it: `arrange` returns the step, ready to be sent."""

    script: Script
    arrange: Callable[[Queue], Step]

    def worked(self, reply: Any) -> bool:
        if self.script.name == "claim":
            return bool(reply[0] == b"run")
        if "+" in self.script.name:
            return reply[0] in (b"ok", b"stale") and reply[1][0] == b"run"
        if self.script.name == "fall":
            return len(reply) == 1
        return bool(reply == ([] if self.script.name == "renew" else b"ok"))


def arranged(step: Callable[[Queue, Run], Step]) -> Callable[[Queue], Step]:
    return lambda queue: step(queue, running(queue))


def waiting(queue: Queue) -> Step:
    push(queue, A)
    return queue.claim("me", LEASE)


def rung(queue: Queue) -> Step:
    push(queue, A)
    queue.ring(1)
    return queue.claim("me", LEASE)


def due_retry(queue: Queue) -> Step:
    retrying(queue, A)
    return queue.claim("me", LEASE)


def due_fallen(queue: Queue) -> Step:
    fall(queue, running(queue))
    return queue.claim("me", LEASE)


def expired(queue: Queue) -> Step:
    expire(queue, running(queue))
    return queue.fall("worker_died", "")


def fallen_twice(queue: Queue) -> Step:
    fall(queue, running(queue))
    return queue.fall("released", "", claim(queue).lease, wait=None)


def settled_after_a_fall(queue: Queue) -> Step:
    fall(queue, running(queue))
    return queue.retry(claim(queue), 0, ATTEMPT)


def oldest_dead(queue: Queue) -> Step:
    queue.do(queue.bury(running(queue), AROUND))
    return queue.replay(ENVELOPE, A)


def newer_dead(queue: Queue) -> Step:
    queue.do(queue.bury(running(queue), Splice(b'{"payload": "older"}')))
    return oldest_dead(queue)


def done_and_waiting(queue: Queue) -> Step:
    run = running(queue, B)
    push(queue, A)
    return queue.both(queue.done(run), queue.claim("me", LEASE))


def retried_and_claimed(queue: Queue) -> Step:
    run = running(queue, A)
    turn(queue, "retry")
    return queue.both(queue.retry(run, 0, ATTEMPT), queue.claim("me", LEASE))


DONE_AND_CLAIM = worker_module.both(worker_module.DONE, worker_module.CLAIM)
RETRY_AND_CLAIM = worker_module.both(worker_module.RETRY, worker_module.CLAIM)
MOVES = {
    "claim of a waiting message": Move(worker_module.CLAIM, waiting),
    "claim after the doorbell": Move(worker_module.CLAIM, rung),
    "claim of a due retry": Move(worker_module.CLAIM, due_retry),
    "claim of a due retry with notes": Move(worker_module.CLAIM, due_fallen),
    "done": Move(worker_module.DONE, arranged(lambda queue, run: queue.done(run, A))),
    "retry": Move(worker_module.RETRY, arranged(STEPS["retry"])),
    "retry after a fall": Move(worker_module.RETRY, settled_after_a_fall),
    "bury": Move(worker_module.BURY, arranged(STEPS["bury"])),
    "bury unread": Move(worker_module.BURY_UNREAD, arranged(STEPS["bury_unread"])),
    "done, and a claim": Move(DONE_AND_CLAIM, done_and_waiting),
    "retry, and a claim of it": Move(RETRY_AND_CLAIM, retried_and_claimed),
    "renew": Move(worker_module.RENEW, arranged(lambda queue, run: queue.renew(LEASE, run.lease))),
    "checkpoint": Move(worker_module.CHECKPOINT, arranged(STEPS["checkpoint"])),
    "fall of a dead hand's run": Move(worker_module.FALL, arranged(ENDS["fall"])),
    "fall of what has expired": Move(worker_module.FALL, expired),
    "fall to the front, the second": Move(worker_module.FALL, fallen_twice),
    "replay of the oldest": Move(worker_module.REPLAY, oldest_dead),
    "replay of a newer one": Move(worker_module.REPLAY, newer_dead),
}


def is_a(text: bytes) -> bool:
    """Tells whether this is message A, in whatever form."""
    return re.search(rb'\\?"kind\\?": \\?"a\\?"', text) is not None


def copies(queue: Queue) -> int:
    """How many texts of message A there are, in whatever place."""
    return sum(is_a(text) for texts in places(queue).values() for text in texts)


def commands(script: Script) -> list[str]:
    return sorted(set(re.findall(r"(?:call\(|\{)'([A-Z]+)'", script.source.decode())))


DENIALS = [(name, command) for name in MOVES for command in commands(MOVES[name].script)]


@pytest.fixture
def limited(
    queue: Queue, server: Server, redis_client: redis.Redis
) -> Iterator[Callable[[str], Queue]]:
    """limited("HDEL") is a queue of a user who may do everything but that command."""
    opened: list[Queue] = []

    def limit(command: str) -> Queue:
        rules = ["reset", "on", "nopass", "~*", "+@all", f"-{command.lower()}"]
        redis_client.execute_command("ACL", "SETUSER", "limited", *rules)
        opened.append(Queue(server.url.replace("unix://", "unix://limited:none@")))
        return opened[-1]

    yield limit
    for each in opened:
        each.close()
    redis_client.execute_command("ACL", "DELUSER", "limited")


def drain(queue: Queue) -> list[bytes]:
    """What workers are given from here on if time passes, all of it; each is done at once."""
    queue.adopt(LEASE)
    for lease in queue.command("ZRANGE", queue.names.leases, 0, -1):
        queue.command("ZADD", queue.names.leases, 1, lease)
    while fall(queue):
        pass
    for member in queue.command("ZRANGE", queue.names.retry, 0, -1):
        queue.command("ZADD", queue.names.retry, 1, member)
    texts = []
    for _ in range(100):
        [reply] = queue.do(queue.claim("drain", LEASE))
        run = Claim.of(reply, "drain").run
        if run is None:
            return texts
        texts.append(queue.text(run.token) or b"")
        assert queue.do(queue.done(run)) == [b"ok"]
    raise AssertionError("it never ends")


def assert_reachable(queue: Queue) -> None:
    """Every copy is dead or comes to some worker."""
    there = copies(queue)
    drained = sum(map(is_a, drain(queue)))
    assert drained + copies(queue) == there
    assert places(queue).keys() <= {"dead", "stray"}
    assert all(b" " not in stray for stray in places(queue).get("stray", []))  # no lease is left


@pytest.mark.parametrize(("name", "command"), DENIALS)
def test_a_command_refused_in_the_middle_loses_nothing(
    queue: Queue,
    redis_client: redis.Redis,
    limited: Callable[[str], Queue],
    name: str,
    command: str,
) -> None:
    """Whichever command of a script is refused, the message is somewhere, and the repeat works."""
    move = MOVES[name]
    step = move.arrange(queue)
    held = limited(command)
    try:
        [reply] = held.do(step)
    except redis.ResponseError:
        assert command != "HINCRBY", "a counter decided a fate"
        assert copies(queue) >= 1
        redis_client.execute_command("ACL", "SETUSER", "limited", f"+{command.lower()}")
        [reply] = held.do(step)
        assert move.worked(reply) or reply == b"stale" or move.script.name == "fall"
        assert 1 <= copies(queue) <= 2
    else:  # the command is not needed on this path
        assert move.worked(reply)
        assert copies(queue) == 1
    assert "bare" not in places(queue)
    assert_reachable(queue)


@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for name, move in MOVES.items() for role in move.script.roles]
)
def test_a_key_of_the_wrong_type_loses_nothing(
    queue: Queue, redis_client: redis.Redis, name: str, role: str
) -> None:
    """What was there before somebody wrote over a key counts; a counter stops nothing."""
    move = MOVES[name]
    step = move.arrange(queue)
    key, aside = getattr(queue.names, role), "aside"
    if kept := redis_client.exists(key):
        redis_client.rename(key, aside)
    redis_client.hset(key, "x", "x") if role in ("fence", "dlq") else redis_client.set(key, "x")

    def repair() -> None:
        redis_client.delete(key)
        if kept:
            redis_client.rename(aside, key)

    try:
        [reply] = queue.do(step)
    except redis.ResponseError as error:
        assert "WRONGTYPE" in str(error)
        assert role != "stats", "a counter decided a fate"
        repair()
        assert copies(queue) == 1
        [reply] = queue.do(step)
        assert move.worked(reply) or (role, reply) == ("notes", b"stale")  # they are removed last
    else:  # the key is not needed on this path, or it is the pause, which may hold anything
        repair()
        assert move.worked(reply) or (role == "pause" and b"paused" in (reply[0], *reply[-1]))
    assert copies(queue) == 1
    assert_reachable(queue)


@pytest.fixture
def full(redis_client: redis.Redis) -> Iterator[Callable[[], None]]:
    """full() makes the server refuse every command that may need memory."""
    yield lambda: redis_client.config_set("maxmemory", "1")
    redis_client.config_set("maxmemory", "0")


@pytest.mark.parametrize("name", MOVES)
def test_a_full_redis_can_still_drain(
    queue: Queue, redis_client: redis.Redis, full: Callable[[], None], name: str
) -> None:
    """Producers are refused, workers are not: else what fills Redis could never leave it."""
    move = MOVES[name]
    step = move.arrange(queue)
    full()
    with pytest.raises(redis.OutOfMemoryError):
        redis_client.lpush(queue.names.waiting, B)
    [reply] = queue.do(step)
    assert move.worked(reply)
    assert copies(queue) == 1


# ---- Scripts that Redis has forgotten ----------------------------------------------------------


@pytest.mark.parametrize("name", MOVES)
def test_a_forgotten_script_is_sent_again(queue: Queue, name: str) -> None:
    move = MOVES[name]
    step = move.arrange(queue)
    queue.command("SCRIPT", "FLUSH")
    [reply] = queue.do(step)
    assert move.worked(reply)
    assert copies(queue) == 1


KNOWN: dict[str, Callable[[Queue], Step | None]] = {
    "neither": lambda queue: None,
    "the claim": lambda queue: queue.claim("other", LEASE),
    "the settlement": lambda queue: queue.done(Run(17, "other")),
}


def forget_all_but(queue: Queue, known: str) -> None:
    """Call it while nothing waits: the claim that makes itself known brings nothing."""
    queue.command("SCRIPT", "FLUSH")
    if step := KNOWN[known](queue):
        assert queue.do(step)[0] in (b"stale", [b"idle", -1, 1])


@pytest.mark.parametrize("known", KNOWN)
def test_a_script_forgotten_in_mid_round_trip_runs_once(queue: Queue, known: str) -> None:
    """What was known has happened and is not sent again; what was not has not, and is."""
    run = running(queue, A)
    forget_all_but(queue, known)
    push(queue, B, C)
    word, reply = queue.do(queue.done(run), queue.claim("me", LEASE))
    assert (word, reply[0], reply[3]) == (b"ok", b"run", B)
    assert places(queue) == {"waiting": [C], "running": [B]}
    assert queue.held("me") == [int(reply[2])]


@pytest.mark.parametrize("known", KNOWN)
def test_a_run_taken_over_and_a_forgotten_script_claim_one_message_that_we_know(
    queue: Queue, known: str
) -> None:
    run = running(queue, A)
    taken = take_over(queue, run)
    forget_all_but(queue, known)
    push(queue, B, C)
    word, reply = queue.do(queue.done(run), queue.claim("me", LEASE))
    assert (word, reply[0], reply[3]) == (b"stale", b"run", B)
    assert places(queue) == {"waiting": [C], "running": [A, B]}
    assert queue.held("me") == [int(reply[2])]
    assert queue.held("rescuer") == [taken.token]


# ---- Replies that nobody has read --------------------------------------------------------------


@pytest.mark.parametrize("ask", [
    lambda queue: queue.do(queue.done(Run(17, "me"))),
    lambda queue: queue.do(queue.done(Run(17, "me")), queue.claim("me", LEASE)),
    lambda queue: queue.command("PING"),
], ids=["a step", "two steps", "a command"])  # fmt: skip
def test_a_reply_that_was_not_read_is_not_taken_for_the_next(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Queue], Any]
) -> None:
    """A signal may raise between sending and reading, where the client library does not see it."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    queue.now_ms()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(queue.connection, "read_response", interrupted)
        ask(queue)
    assert queue.command("ECHO", "mine") == b"mine"
    assert queue.do(queue.renew(LEASE)) == [[]]


# ---- With a worker -----------------------------------------------------------------------------


def test_fifty_equal_messages_that_fail_are_fifty_dead_letters(
    conservation: Conservation,
    queue: Queue,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    handler("def process(msg):\n    raise ValueError('no')\n")
    conservation.push(*[A] * 50)
    assert worker("--burst", QR_BASE=0.01).wait() == 0
    dead = places(queue).pop("dead")
    assert [payload_text(envelope) for envelope in dead] == [A] * 50
    assert len(set(dead)) == 50


GARBAGE = (b"", b"7", b"[]", b"null", b'"x"', b"{", b"\xff", b"12:[]", b":")


def test_garbage_among_due_retries_stops_none_of_them(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    handler("def process(msg):\n    pass\n")
    names = queue.names
    redis_client.zadd(names.retry, {b'%d:{"id": %d}' % (i, i): 1 for i in range(100)})
    redis_client.zadd(names.retry, {b'{"id": 100}': 1, b"x:{}": "-inf", b'{"a": 1e400}': 1})
    for i, member in enumerate(GARBAGE):
        redis_client.zadd(names.retry, {member: i % 3 or "-inf"})
    assert worker("--burst").wait() == 0
    dead = places(queue).pop("dead")
    assert len(dead) == len(GARBAGE) + 1  # "x:{}" is no JSON, and had no token before it
    assert redis_client.hget(names.stats, "done") == b"102"
    assert Counter(map(payload_text, dead)) == Counter(
        [re.sub(rb"^\d+:", b"", member) for member in GARBAGE] + [b"x:{}"]
    )


def test_a_retry_that_is_never_due_holds_up_nothing(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    handler("def process(msg):\n    pass\n")
    redis_client.zadd(queue.names.retry, {b"1:" + A: "inf"})
    started = worker()
    for i in (1, 2):
        push(queue, B)
        done = partial(redis_client.hget, queue.names.stats, "done")
        until(lambda count=b"%d" % i, done=done: done() == count, saw=lambda: started)
    assert started.stop() == 0
    assert places(queue) == {"retrying": [A]}


def test_due_retries_take_at_most_every_second_turn_while_others_wait(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    tmp_path: Path,
) -> None:
    """A million retries due at once must not starve fresh work, nor fresh work the retries."""
    ran = tmp_path / "ran"
    handler(f"def process(msg):\n    open({str(ran)!r}, 'a').write(msg['kind'])\n")
    redis_client.zadd(queue.names.retry, {b'%d:{"kind": "r"}' % i: 1 for i in range(60)})
    redis_client.lpush(queue.names.waiting, *[b'{"kind": "f"}'] * 20)
    assert worker("--burst").wait() == 0
    order = ran.read_text()
    assert Counter(order) == {"r": 60, "f": 20}
    while_fresh_waits = order[: order.rindex("f")]
    assert "rr" not in while_fresh_waits
    assert "ff" not in while_fresh_waits


def test_without_a_fault_every_message_runs_exactly_once(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
    tmp_path: Path,
) -> None:
    """Four hands, a look for expired leases every second, a thousand retries due at one instant."""
    ran = tmp_path / "ran"
    handler(f"""
import os

ran = os.open({str(ran)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

def process(msg):
    os.write(ran, b"%d\\n" % msg["id"])
""")
    redis_client.lpush(queue.names.waiting, *[b'{"id": %d}' % i for i in range(2_000)])
    redis_client.zadd(
        queue.names.retry, {b'%d:{"id": %d}' % (i, i): 1 for i in range(2_000, 3_000)}
    )
    workers = [worker("--burst", "--concurrency", 2, "--lease", 3) for _ in range(2)]
    assert [process.wait() for process in workers] == [0, 0]
    assert Counter(map(int, ran.read_text().split())) == Counter(range(3_000))
    assert places(queue) == {}


def test_a_thousand_runs_of_dead_workers_go_on(
    conservation: Conservation,
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    """Each is charged one attempt, and runs again."""
    handler("def process(msg):\n    assert msg['attempts'] == 1\n")
    conservation.push(*[b'{"id": %d}' % i for i in range(1_000)])
    queue.do(*[queue.claim("gone", LEASE)] * 1_000)
    for lease in queue.command("ZRANGE", queue.names.leases, 0, -1):
        queue.command("ZADD", queue.names.leases, 1, lease)
    assert worker("--burst", "--lease", 1, "--base", 0.01).wait() == 0
    assert places(queue) == {}
    assert redis_client.hmget(queue.names.stats, "done", "fallen", "retried") == [b"1000"] * 3
