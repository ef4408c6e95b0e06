"""Every transition and every refusal, on a real server, with all places looked at after each step.

The law behind all of them: a message is in exactly one place at every instant, and where Redis
refuses a write in the middle, in one place too many rather than in none. Nothing here sleeps: time
is moved by moving a score.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import Conservation, payload_text
from processes import Process, until
from server import Server

import worker as worker_module
from worker import Queue, Script, Step

A, B, C = b'{"kind": "a"}', b'{"kind": "b"}', b'{"kind": "c"}'
ENVELOPE = b'{"payload": {"kind": "a"}, "error": "E: e", "attempts": 5}'
NEW = b'{"kind": "a", "attempts": 1}'
LEASE = 30.0  # seconds; no test lives to see one end by itself

SCRIPTS = {name: x for name, x in vars(worker_module).items() if isinstance(x, Script)}


def places(queue: Queue) -> dict[str, list[bytes]]:
    """Every text by place, without the empty places; waiting lists are oldest first.

    A run without a lease is under "bare" instead of "running"; a lease without a run is a token
    under "stray". Neither is a thing that a transition may leave.
    """
    names, ask = queue.names, queue.command
    flat = ask("HGETALL", names.running)
    running = dict(zip(flat[::2], flat[1::2], strict=True))
    leased = ask("ZRANGE", names.leases, 0, -1)
    found = {
        "waiting": ask("LRANGE", names.waiting, 0, -1)[::-1],
        "next": ask("LRANGE", names.next, 0, -1)[::-1],
        "running": [running[token].split(b" ", 2)[2] for token in leased if token in running],
        "bare": [entry for token, entry in running.items() if token not in leased],
        "stray": [token for token in leased if token not in running],
        "retrying": [text.partition(b":")[2] for text in ask("ZRANGE", names.retry, 0, -1)],
        "dead": ask("LRANGE", names.dlq, 0, -1)[::-1],
    }
    return {place: texts for place, texts in found.items() if texts}


def push(queue: Queue, *texts: bytes) -> None:
    queue.command("LPUSH", queue.names.waiting, *texts)


def claim(queue: Queue, owner: str = "me", prefer: str = "retry", after: int | str = "") -> Any:
    """(token, text) of what a claim brings; its raw reply if that is no run."""
    [reply] = queue.do(queue.claim(owner, LEASE, prefer, after))
    return (int(reply[1]), reply[3]) if reply[0] == b"run" else reply


def running(queue: Queue, text: bytes = A) -> int:
    """The token of `text`, pushed and claimed."""
    push(queue, text)
    token, found = claim(queue)
    assert found == text
    return token


def expire(queue: Queue, *tokens: int | bytes, deadline_ms: int = 1) -> None:
    """Moves the deadlines into the past."""
    for token in tokens:
        queue.command("ZADD", queue.names.leases, "XX", deadline_ms, token)


def deadline(queue: Queue, token: int) -> float:
    return float(queue.command("ZSCORE", queue.names.leases, token))


def reclaim(queue: Queue, owner: str = "rescuer") -> Any:
    [reply] = queue.do(queue.reclaim(owner, LEASE))
    return reply


def take_over(queue: Queue, token: int) -> int:
    """Somebody else has the run now, as after a lease that ended; returns the new token."""
    expire(queue, token)
    word, new, *_ = reclaim(queue)
    assert word == b"run"
    return int(new)


# ---- The scripts as they are written -----------------------------------------------------------


def header_of(name: str) -> str:
    """The comment above a script's constant, the script itself left out."""
    source = inspect.getsource(worker_module)
    found = re.search(rf"((?:^#.*\n)+)^{name} = Script\(", source, re.MULTILINE)
    assert found, f"{name} has no header"
    return found[1]


def test_the_scripts_are_the_transitions() -> None:
    transitions = {"claim", "done", "retry", "bury", "release", "renew", "reclaim", "checkpoint"}
    assert {script.name for script in SCRIPTS.values()} >= transitions | {"replay"}
    for name, script in SCRIPTS.items():
        assert name == script.name.upper()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_its_header_names_what_goes_in_and_out(name: str) -> None:
    """25 lines at most; each KEYS, an ARGV line if it has arguments, every word it returns."""
    script, header = SCRIPTS[name], header_of(name)
    body = script.source.decode().strip()
    assert len(body.splitlines()) <= 25
    assert header.startswith(f"# {script.name}: ")
    keys = re.search(r"^# +KEYS +(.*)$", header, re.MULTILINE)
    assert keys, "no KEYS line"
    assert keys[1].split() == script.roles
    assert bool(re.search(r"^# +ARGV +\S", header, re.MULTILINE)) == ("ARGV" in body)
    for returned in re.findall(r"return \{?'(\w+)'", body):
        assert re.search(rf"\b{returned}\b", header), f"the header does not say {returned!r}"
    assert "→" in header


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
    token, text = claim(queue, "me")
    after = queue.now_ms()
    assert text == A
    assert places(queue) == {"waiting": [B], "running": [A]}
    owner, start, text = queue.command("HGET", queue.names.running, token).split(b" ", 2)
    assert (owner, text) == (b"me", A)
    assert before <= int(start) <= after
    assert deadline(queue, token) == int(start) + LEASE * 1000


def test_a_message_pushed_right_is_taken_too(queue: Queue) -> None:
    push(queue, A)
    queue.command("RPUSH", queue.names.waiting, B)
    assert claim(queue)[1] == B
    assert claim(queue)[1] == A
    assert places(queue) == {"running": [B, A]}


def test_what_the_doorbell_brought_is_taken_first(queue: Queue) -> None:
    push(queue, A, B)
    assert queue.ring(1)
    assert places(queue) == {"waiting": [B], "next": [A]}
    assert claim(queue)[1] == A
    assert claim(queue)[1] == B
    assert places(queue) == {"running": [A, B]}


def test_the_doorbell_stays_silent_when_nothing_waits(queue: Queue) -> None:
    assert not queue.ring(0.001)
    assert places(queue) == {}


def test_a_claim_on_an_empty_queue_says_so_and_writes_nothing(queue: Queue) -> None:
    assert claim(queue) == [b"idle", -1, 0]
    assert queue.command("DBSIZE") == 0


def test_an_idle_claim_says_when_the_next_retry_is_due(queue: Queue) -> None:
    queue.do(queue.retry(running(queue), 20, NEW))
    running(queue, B)
    word, wait, left = claim(queue)
    assert (word, left) == (b"idle", 2)
    assert 0 < wait <= 20_000
    assert places(queue) == {"running": [B], "retrying": [NEW]}


def test_a_due_retry_is_taken_without_its_token(queue: Queue) -> None:
    first = running(queue)
    queue.do(queue.retry(first, 20, NEW))
    queue.command("ZADD", queue.names.retry, 1, b"%d:%b" % (first, NEW))
    token, text = claim(queue)
    assert text == NEW
    assert token > first
    assert places(queue) == {"running": [NEW]}


@pytest.mark.parametrize(("prefer", "first", "second"), [("retry", B, A), ("fresh", A, B)])
def test_a_claim_prefers_what_it_was_told_to(
    queue: Queue, prefer: str, first: bytes, second: bytes
) -> None:
    push(queue, A)
    queue.command("ZADD", queue.names.retry, 1, b"7:" + B)
    assert claim(queue, prefer=prefer)[1] == first
    assert claim(queue, prefer=prefer)[1] == second
    assert places(queue) == {"running": [first, second]}


def test_a_claim_waits_for_the_settlement_before_it(queue: Queue) -> None:
    """Should the first of two steps in one round trip be refused, the second must not run."""
    token = running(queue)
    push(queue, B)
    assert claim(queue, after=token) == [b"unsettled"]
    assert places(queue) == {"waiting": [B], "running": [A]}
    queue.do(queue.done(token))
    assert claim(queue, after=token)[1] == B


def test_settling_and_claiming_are_one_round_trip(queue: Queue) -> None:
    token = running(queue)
    push(queue, B)
    word, reply = queue.do(queue.done(token), queue.claim("me", LEASE, after=token))
    assert (word, reply[0], reply[3]) == (b"ok", b"run", B)
    assert places(queue) == {"running": [B]}


def test_equal_messages_are_as_many_runs(queue: Queue) -> None:
    push(queue, *[A] * 50)
    tokens = [claim(queue)[0] for _ in range(50)]
    assert len(set(tokens)) == 50
    assert tokens == sorted(tokens)
    assert places(queue) == {"running": [A] * 50}


def test_a_claim_reads_no_message_but_the_one_it_takes(
    queue: Queue, redis_client: redis.Redis
) -> None:
    """Else one huge message that waits for its retry would be copied by each claim of another."""

    def reads() -> set[str]:
        found = {f"cmdstat_{name}" for name in ("zrange", "lindex")}
        return found & redis_client.info("commandstats").keys()

    queue.command("ZADD", queue.names.retry, "inf", b"7:" + C)
    push(queue, A, B)
    redis_client.config_resetstat()
    assert [claim(queue, prefer=prefer)[1] for prefer in ("retry", "fresh")] == [A, B]
    assert reads() == {"cmdstat_lindex"}
    queue.command("ZADD", queue.names.retry, 1, b"7:" + C)
    push(queue, A)
    redis_client.config_resetstat()
    assert claim(queue)[1] == C
    assert reads() == {"cmdstat_zrange"}


STRANGE_FENCES = (
    b"", b"garbage", b"0", b"-5", b"17", b"0x10", b"1.5", b"1e15", b"inf", b"-inf", b"nan", b"-nan",
    b"1e300", b"9007199254740991", b"9007199254740993", b"9223372036854775807", b"9" * 400,
    b"\xff", b" 7 ", b"7\n",
)  # fmt: skip


@pytest.mark.parametrize("fence", STRANGE_FENCES)
def test_tokens_rise_whatever_the_fence_key_says(queue: Queue, fence: bytes) -> None:
    """Two runs under one token would be one run, and the other message gone."""
    before = running(queue, A)
    queue.command("SET", queue.names.fence, fence)
    tokens = [before, running(queue, B), running(queue, C)]
    tokens.append(take_over(queue, tokens[-1]))
    assert tokens == sorted(set(tokens))
    assert places(queue) == {"running": [A, B, C]}


def test_tokens_rise_after_the_fence_key_is_lost_or_set_back(queue: Queue) -> None:
    first = running(queue, A)
    saved = queue.command("GET", queue.names.fence)
    second = running(queue, B)
    queue.command("SET", queue.names.fence, saved)  # a restart that lost the last second
    third = running(queue, C)
    queue.command("DEL", queue.names.fence)
    fourth = running(queue, A)
    assert first < second < third < fourth


def test_a_fence_ahead_of_the_clock_still_counts_on(queue: Queue) -> None:
    """The server's clock went back an hour: tokens go on from the last one, not from the clock."""
    ahead = running(queue, A) + 3_600_000_000
    queue.command("SET", queue.names.fence, ahead)
    assert [running(queue, B), running(queue, C)] == [ahead + 1, ahead + 2]


# ---- done, retry, bury, release ----------------------------------------------------------------


def test_done_leaves_nothing_but_a_count(queue: Queue) -> None:
    token = running(queue)
    assert queue.do(queue.done(token)) == [b"ok"]
    assert places(queue) == {}
    assert queue.command("HGETALL", queue.names.stats) == [b"done", b"1"]


def test_done_queues_the_follow_ups_in_their_order(queue: Queue) -> None:
    token = running(queue)
    push(queue, A)
    assert queue.do(queue.done(token, B, C)) == [b"ok"]
    assert places(queue) == {"waiting": [A, B, C]}


def test_a_retry_is_due_after_its_wait(queue: Queue) -> None:
    token = running(queue)
    before = queue.now_ms()
    assert queue.do(queue.retry(token, 1.5, NEW)) == [b"ok"]
    after = queue.now_ms()
    assert places(queue) == {"retrying": [NEW]}
    [member, due] = queue.command("ZRANGE", queue.names.retry, 0, -1, "WITHSCORES")
    assert member == b"%d:%b" % (token, NEW)
    assert before + 1500 <= float(due) <= after + 1500


def test_fifty_equal_messages_are_fifty_retries(queue: Queue) -> None:
    push(queue, *[A] * 50)
    tokens = [claim(queue)[0] for _ in range(50)]
    assert queue.do(*[queue.retry(token, 5, NEW) for token in tokens]) == [b"ok"] * 50
    assert places(queue) == {"retrying": [NEW] * 50}


def test_the_dead_are_kept_newest_left(queue: Queue) -> None:
    queue.do(queue.bury(running(queue, A), ENVELOPE))
    queue.do(queue.bury(running(queue, B), b"later"))
    assert queue.command("LRANGE", queue.names.dlq, 0, -1) == [b"later", ENVELOPE]
    assert places(queue) == {"dead": [ENVELOPE, b"later"]}


def test_a_released_message_is_the_next_one_and_unchanged(queue: Queue) -> None:
    token = running(queue, A)
    push(queue, B)
    assert queue.do(queue.release(token)) == [b"ok"]
    assert places(queue) == {"waiting": [A, B]}
    assert claim(queue)[1] == A


BYTES = {
    "empty": b"",
    "a space": b" ",
    "spaces around": b"  {} \n",
    "zero bytes": b"\0a\0",
    "line ends": b'{"a":\r\n1}\r\n',
    "no UTF-8": b"\xff\xfe",
    "looks like a retry member": b"12:34:x",
    "looks like a run": b"me 17 {}",
    "a Lua pattern": b"%d+ %% %1",
    "every byte": bytes(range(256)),
    "5 MB": b"a b" * 1_700_000,
}


@pytest.mark.parametrize("text", BYTES.values(), ids=BYTES)
def test_bytes_come_through_every_transition(queue: Queue, text: bytes) -> None:
    token = running(queue, text)
    queue.do(queue.release(token))
    token, found = claim(queue)
    assert found == text
    queue.do(queue.retry(token, 0, text))
    token, found = claim(queue)
    assert found == text
    assert queue.do(queue.checkpoint(token, LEASE, text)) == [b"ok"]
    word, _, _, found, *_ = expire(queue, token) or reclaim(queue)
    assert (word, found) == (b"run", text)
    assert places(queue) == {"running": [text]}
    [run] = queue.owned("rescuer")
    assert run.raw == text
    queue.do(queue.bury(run.token, text))
    assert queue.do(queue.replay(text, text)) == [b"ok"]
    assert places(queue) == {"waiting": [text]}


# ---- A late worker is refused ------------------------------------------------------------------

STEPS: dict[str, Callable[[Queue, int], Step]] = {
    "done": lambda queue, token: queue.done(token),
    "done with a follow-up": lambda queue, token: queue.done(token, B),
    "retry": lambda queue, token: queue.retry(token, 0, NEW),
    "bury": lambda queue, token: queue.bury(token, ENVELOPE),
    "release": lambda queue, token: queue.release(token),
    "checkpoint": lambda queue, token: queue.checkpoint(token, LEASE, NEW),
}
ENDS = ("done", "retry", "bury", "release")


@pytest.mark.parametrize("late", STEPS)
@pytest.mark.parametrize("end", ENDS)
def test_a_settled_run_is_refused(queue: Queue, end: str, late: str) -> None:
    token = running(queue)
    assert queue.do(STEPS[end](queue, token)) == [b"ok"]
    before = places(queue)
    assert queue.do(STEPS[late](queue, token)) == [b"stale"]
    assert places(queue) == before


@pytest.mark.parametrize("late", STEPS)
def test_a_run_that_was_taken_over_is_refused(queue: Queue, late: str) -> None:
    token = running(queue)
    take_over(queue, token)
    assert queue.do(STEPS[late](queue, token)) == [b"stale"]
    assert places(queue) == {"running": [A]}


@pytest.mark.parametrize("late", STEPS)
def test_a_token_that_never_was_is_refused(queue: Queue, late: str) -> None:
    push(queue, A)
    assert queue.do(STEPS[late](queue, 17)) == [b"stale"]
    assert places(queue) == {"waiting": [A]}


@pytest.mark.parametrize("late", STEPS)
def test_an_equal_message_of_somebody_else_is_not_touched(queue: Queue, late: str) -> None:
    mine = running(queue, A)
    running(queue, A)
    queue.do(queue.done(mine))
    assert queue.do(STEPS[late](queue, mine)) == [b"stale"]
    assert places(queue) == {"running": [A]}


def test_a_stale_settlement_does_not_hold_up_the_claim_behind_it(queue: Queue) -> None:
    token = running(queue, A)
    take_over(queue, token)
    push(queue, B)
    word, reply = queue.do(queue.done(token), queue.claim("me", LEASE, after=token))
    assert (word, reply[0], reply[3]) == (b"stale", b"run", B)
    assert places(queue) == {"running": [A, B]}


# ---- Leases ------------------------------------------------------------------------------------


def test_renewing_moves_the_deadline_of_what_still_runs(queue: Queue) -> None:
    mine, other = running(queue, A), running(queue, B)
    settled = running(queue, C)
    queue.do(queue.done(settled))
    untouched = deadline(queue, other)
    before = queue.now_ms()
    assert queue.do(queue.renew(100, mine, settled, 17)) == [[b"%d" % settled, b"17"]]
    assert before + 100_000 <= deadline(queue, mine) <= queue.now_ms() + 100_000
    assert deadline(queue, other) == untouched
    assert places(queue) == {"running": [B, A]}


def test_renewing_nothing_is_no_error(queue: Queue) -> None:
    assert queue.do(queue.renew(LEASE)) == [[]]


def test_a_checkpoint_keeps_the_token_and_renews(queue: Queue) -> None:
    token = running(queue)
    expire(queue, token)
    entry = queue.command("HGET", queue.names.running, token)
    assert queue.do(queue.checkpoint(token, LEASE, NEW)) == [b"ok"]
    assert queue.command("HGET", queue.names.running, token) == entry.replace(A, NEW)
    assert deadline(queue, token) > queue.now_ms()
    assert places(queue) == {"running": [NEW]}


def test_a_live_lease_is_not_reclaimed(queue: Queue) -> None:
    running(queue)
    assert reclaim(queue) == [b"none"]
    assert places(queue) == {"running": [A]}


def test_a_lease_renewed_in_time_is_not_reclaimed(queue: Queue) -> None:
    """The check is at the moment of acting: what was seen expired a moment ago may be renewed."""
    token = running(queue)
    expire(queue, token)
    queue.do(queue.renew(LEASE, token))
    assert reclaim(queue) == [b"none"]
    assert queue.do(queue.done(token)) == [b"ok"]


def test_an_expired_run_goes_on_under_a_new_token(queue: Queue) -> None:
    token = running(queue)
    entry = queue.command("HGET", queue.names.running, token)
    start = entry.split(b" ")[1]
    expire(queue, token)
    before = queue.now_ms()
    word, new, now, text, first, owner = reclaim(queue, "rescuer")
    assert (word, text, owner) == (b"run", A, b"me")
    assert int(new) > token
    assert before <= int(now) <= queue.now_ms()
    assert int(first) == int(start)
    assert places(queue) == {"running": [A]}
    assert queue.command("HGET", queue.names.running, new) == b"rescuer %b %b" % (start, A)
    assert deadline(queue, int(new)) == int(now) + LEASE * 1000
    assert reclaim(queue) == [b"none"]


def test_a_rescuer_that_dies_is_rescued(queue: Queue) -> None:
    second = take_over(queue, running(queue))
    third = take_over(queue, second)
    assert places(queue) == {"running": [A]}
    assert queue.do(queue.retry(second, 0, NEW)) == [b"stale"]
    assert queue.do(queue.retry(third, 0, NEW)) == [b"ok"]
    assert places(queue) == {"retrying": [NEW]}


def test_runs_with_one_deadline_are_reclaimed_one_by_one(queue: Queue) -> None:
    tokens = [running(queue, text) for text in (A, A, B)]
    expire(queue, *tokens, deadline_ms=1_000)
    replies = [reclaim(queue) for _ in range(4)]
    assert [reply[0] for reply in replies] == [b"run"] * 3 + [b"none"]
    assert sorted(reply[3] for reply in replies[:3]) == [A, A, B]
    assert not {int(reply[1]) for reply in replies[:3]} & set(tokens)
    assert places(queue) == {"running": [A, A, B]}


def test_two_rescuers_take_a_run_over_once(queue: Queue, server: Server) -> None:
    other = Queue(server.url)
    expire(queue, running(queue))
    assert reclaim(queue)[0] == b"run"
    assert reclaim(other)[0] == b"none"
    other.close()


def test_an_abandoned_run_is_found_behind_two_thousand_healthy_ones(queue: Queue) -> None:
    push(queue, *[A] * 2_000, B)
    queue.do(*[queue.claim("busy", LEASE)] * 2_000)
    token, _ = claim(queue, "gone")
    expire(queue, token)
    assert reclaim(queue)[3] == B
    assert reclaim(queue) == [b"none"]


def test_leases_without_a_run_do_not_hide_an_expired_one(queue: Queue) -> None:
    token = running(queue)
    strays = [x for i in range(250) for x in (i, f"stray-{i}")]
    queue.command("ZADD", queue.names.leases, *strays)
    expire(queue, token, deadline_ms=1_000)
    replies = [reclaim(queue)[0] for _ in range(4)]
    assert b"run" in replies
    assert places(queue) == {"running": [A]}


@pytest.mark.parametrize("count", [1, 700])  # one page and several
def test_a_run_without_a_lease_is_adopted(queue: Queue, count: int) -> None:
    """Somebody deleted the leases, or Redis evicted them: the two sizes differ, and that shows."""
    push(queue, *[A] * count, B)
    for reply in queue.do(*[queue.claim("gone", LEASE)] * count):
        queue.command("ZREM", queue.names.leases, reply[1])
    claim(queue)
    assert reclaim(queue) == [b"drift"]
    assert queue.adopt(LEASE) == count
    assert len(places(queue)["running"]) == count + 1
    assert reclaim(queue) == [b"none"]
    assert queue.adopt(LEASE) == 0


@pytest.mark.parametrize(
    ("token", "entry"),
    [("abc", "x"), ("7", ""), ("7", "no-space"), ("7", "one space"), ("7", "you soon {}"),
     ("7", b"\xff\xfe 1 {}"), ("7", b"\xff\xfe")],
)  # fmt: skip
def test_what_somebody_wrote_into_running_is_taken_over_like_a_run(
    queue: Queue, token: str, entry: str | bytes
) -> None:
    mine = running(queue)
    queue.command("HSET", queue.names.running, token, entry)
    assert [run.token for run in queue.owned("me")] == [mine]
    assert reclaim(queue) == [b"drift"]
    assert queue.adopt(LEASE) == 1
    expire(queue, token.encode())
    assert reclaim(queue)[0] == b"run"
    assert len(places(queue)["running"]) == 2
    assert reclaim(queue) == [b"none"]


# As far as a hand-made entry can be from a date: in the year 10000, and beyond every number.
ABSURD_STARTS = ("253402300800000", "99999999999999999", "9" * 400, "9" * 5_000)


@pytest.mark.parametrize("start", ABSURD_STARTS)
def test_a_run_that_began_in_the_future_began_now(queue: Queue, start: str) -> None:
    queue.command("HSET", queue.names.running, 7, f"who {start} {A.decode()}")
    queue.command("ZADD", queue.names.leases, 1, 7)
    word, _, now, text, first, owner = reclaim(queue)
    assert (word, text, first, owner) == (b"run", A, now, b"who")
    [run] = queue.owned("rescuer")
    assert run.first_ms == int(now)


def test_a_claim_whose_reply_was_lost_is_found_under_its_owner(queue: Queue) -> None:
    push(queue, A, B)
    token, _ = claim(queue, "me")
    claim(queue, "me/2")
    [run] = queue.owned("me")
    assert (run.token, run.raw) == (token, A)
    assert queue.owned("m") == queue.owned("nobody") == []


# ---- replay ------------------------------------------------------------------------------------


def test_replay_moves_exactly_the_envelope_it_was_given(queue: Queue) -> None:
    for text in (b"one", b"two", b"three"):
        queue.do(queue.bury(running(queue), text))
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
        queue.do(queue.bury(running(queue), text))
    assert queue.do(queue.replay(b"twin", A, end)) == [b"ok"]
    assert places(queue) == {"waiting": [A], "dead": left}


def test_replay_of_an_empty_desk_finds_nothing(queue: Queue) -> None:
    assert queue.do(queue.replay(ENVELOPE, A)) == [b"gone"]
    assert places(queue) == {}


def test_a_replayed_message_waits_behind_those_already_there(queue: Queue) -> None:
    queue.do(queue.bury(running(queue), ENVELOPE))
    push(queue, B)
    queue.do(queue.replay(ENVELOPE, A))
    assert places(queue) == {"waiting": [B, A]}


# ---- A write refused in the middle -------------------------------------------------------------
# Redis does not roll a script back. So: check, then add, then remove; what a refused write leaves
# behind is a duplicate, which the token lets the next step see, or nothing at all.


class Move:
    """A transition with a message in front of it: `arrange` returns the step, ready to be sent."""

    def __init__(self, script: Script, arrange: Callable[[Queue], Step]) -> None:
        self.script, self.arrange = script, arrange


def arranged(step: Callable[[Queue, int], Step]) -> Callable[[Queue], Step]:
    return lambda queue: step(queue, running(queue))


def due_retry(queue: Queue) -> Step:
    queue.command("ZADD", queue.names.retry, 1, b"7:" + A)
    return queue.claim("me", LEASE)


def waiting(queue: Queue) -> Step:
    push(queue, A)
    return queue.claim("me", LEASE)


def rung(queue: Queue) -> Step:
    push(queue, A)
    queue.ring(1)
    return queue.claim("me", LEASE)


def expired(queue: Queue) -> Step:
    expire(queue, running(queue))
    return queue.reclaim("rescuer", LEASE)


def oldest_dead(queue: Queue) -> Step:
    queue.do(queue.bury(running(queue), ENVELOPE))
    return queue.replay(ENVELOPE, A)


def newer_dead(queue: Queue) -> Step:
    queue.do(queue.bury(running(queue), b'{"payload": "older"}'))
    return oldest_dead(queue)


MOVES = {
    "claim of a waiting message": Move(worker_module.CLAIM, waiting),
    "claim of a due retry": Move(worker_module.CLAIM, due_retry),
    "claim after the doorbell": Move(worker_module.CLAIM, rung),
    "done": Move(worker_module.DONE, arranged(lambda queue, token: queue.done(token, A))),
    "retry": Move(worker_module.RETRY, arranged(STEPS["retry"])),
    "bury": Move(worker_module.BURY, arranged(STEPS["bury"])),
    "release": Move(worker_module.RELEASE, arranged(STEPS["release"])),
    "renew": Move(worker_module.RENEW, arranged(lambda queue, token: queue.renew(LEASE, token))),
    "checkpoint": Move(worker_module.CHECKPOINT, arranged(STEPS["checkpoint"])),
    "reclaim": Move(worker_module.RECLAIM, expired),
    "replay of the oldest": Move(worker_module.REPLAY, oldest_dead),
    "replay of a newer one": Move(worker_module.REPLAY, newer_dead),
}


def copies(queue: Queue) -> int:
    """How many texts of the message there are, in whatever place and form."""
    return sum(b'"kind": "a"' in text for texts in places(queue).values() for text in texts)


def commands(script: Script) -> list[str]:
    return sorted(set(re.findall(r"redis\.p?call\('(\w+)'", script.source.decode())))


DENIALS = [(name, command) for name in MOVES for command in commands(MOVES[name].script)]


@pytest.fixture
def limited(
    queue: Queue, server: Server, redis_client: redis.Redis
) -> Iterator[Callable[[str], Queue]]:
    """limited("HDEL") is a queue of a user who may do everything but that command."""
    opened: list[Queue] = []

    def limit(command: str) -> Queue:
        rules = ["reset", "on", "nopass", "~*", "&*", "+@all", f"-{command.lower()}"]
        redis_client.execute_command("ACL", "SETUSER", "limited", *rules)
        opened.append(Queue(server.url.replace("unix://", "unix://limited:none@")))
        return opened[-1]

    yield limit
    for each in opened:
        each.close()
    redis_client.execute_command("ACL", "DELUSER", "limited")


@pytest.mark.parametrize(("name", "command"), DENIALS)
def test_a_command_refused_in_the_middle_loses_nothing(
    queue: Queue,
    redis_client: redis.Redis,
    limited: Callable[[str], Queue],
    name: str,
    command: str,
) -> None:
    """Whichever command of a script is refused, the message is somewhere, and the repeat works."""
    step = MOVES[name].arrange(queue)
    held = limited(command)
    try:
        held.do(step)
    except redis.ResponseError:
        assert command != "HINCRBY", "a counter decided a fate"
        assert copies(queue) >= 1
        redis_client.execute_command("ACL", "SETUSER", "limited", f"+{command.lower()}")
        held.do(step)
        assert 1 <= copies(queue) <= 2
    else:  # the command is not needed on this path
        assert copies(queue) == 1
    assert "bare" not in places(queue)


@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for name, move in MOVES.items() for role in move.script.roles]
)
def test_a_key_of_the_wrong_type_loses_nothing(
    queue: Queue, redis_client: redis.Redis, name: str, role: str
) -> None:
    """What was there before somebody wrote over a key counts; a counter stops nothing."""
    step = MOVES[name].arrange(queue)
    key, aside = getattr(queue.names, role), "aside"
    if kept := redis_client.exists(key):
        redis_client.rename(key, aside)
    redis_client.hset(key, "x", "x") if role in ("fence", "dlq") else redis_client.set(key, "x")

    def repair() -> None:
        redis_client.delete(key)
        if kept:
            redis_client.rename(aside, key)

    try:
        queue.do(step)
    except redis.ResponseError as error:
        assert "WRONGTYPE" in str(error)
        assert role != "stats", "a counter decided a fate"
        repair()
        assert copies(queue) == 1
        queue.do(step)
    else:  # the key is not needed on this path
        repair()
    assert copies(queue) == 1


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
    step = MOVES[name].arrange(queue)
    full()
    with pytest.raises(redis.OutOfMemoryError):
        redis_client.lpush(queue.names.waiting, B)
    [reply] = queue.do(step)
    assert not isinstance(reply, Exception)
    assert reply in (b"ok", []) or reply[0] == b"run"
    assert copies(queue) == 1


# ---- Scripts that Redis has forgotten ----------------------------------------------------------


@pytest.mark.parametrize("name", MOVES)
def test_a_forgotten_script_is_sent_again(queue: Queue, name: str) -> None:
    step = MOVES[name].arrange(queue)
    queue.command("SCRIPT", "FLUSH")
    [reply] = queue.do(step)
    assert reply in (b"ok", []) or reply[0] == b"run"
    assert copies(queue) == 1


@pytest.mark.parametrize("known", ["neither", "the claim", "the settlement"])
def test_a_script_forgotten_in_mid_round_trip_runs_once(queue: Queue, known: str) -> None:
    """The claim behind a settlement that must be sent again has been refused, so it may be too."""
    token = running(queue, A)
    push(queue, B, C)
    queue.command("SCRIPT", "FLUSH")
    if known == "the claim":
        queue.do(queue.claim("me", LEASE, after=token))
    elif known == "the settlement":
        queue.do(queue.done(17))
    word, reply = queue.do(queue.done(token), queue.claim("me", LEASE, after=token))
    assert (word, reply[0], reply[3]) == (b"ok", b"run", B)
    assert places(queue) == {"waiting": [C], "running": [B]}


# ---- Replies that nobody has read --------------------------------------------------------------


@pytest.mark.parametrize("ask", [
    lambda queue: queue.do(queue.done(17)),
    lambda queue: queue.do(queue.done(17), queue.claim("me", LEASE)),
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
    replies = queue.do(*[queue.claim("gone", LEASE)] * 1_000)
    expire(queue, *[reply[1] for reply in replies])
    assert worker("--burst", "--lease", 1, "--base", 0.01).wait() == 0
    assert places(queue) == {}
    assert redis_client.hmget(queue.names.stats, "done", "reclaimed", "retried") == [b"1000"] * 3


def test_runs_with_absurd_dates_of_their_start_stop_no_worker(
    queue: Queue,
    redis_client: redis.Redis,
    handler: Callable[[str], Path],
    worker: Callable[..., Process],
) -> None:
    """The foreman that takes them over lives, charges each as a failed run, and all run again."""
    handler("def process(msg):\n    assert msg['attempts'] == 1\n")
    for token, start in enumerate(ABSURD_STARTS):
        entry = f'who {start} {{"id": {token}}}'
        redis_client.hset(queue.names.running, str(token), entry)
        redis_client.zadd(queue.names.leases, {str(token): 1})
    started = worker("--burst", "--lease", 1, "--base", 0.01)
    assert started.wait() == 0, started
    assert "Traceback" not in started.err
    assert places(queue) == {}
    assert redis_client.hget(queue.names.stats, "done") == b"%d" % len(ABSURD_STARTS)
