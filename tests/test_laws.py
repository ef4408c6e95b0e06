"""Laws: what holds for any sequence of transitions and for any text, looked for with hypothesis.

The transitions run on a real server, in random order, by several owners who crash between any two
of them: settlements are never sent, sent late or sent twice, replies to claims are lost, leases end
or are deleted, scripts are forgotten, writes are refused in the middle. After every step all places
are looked at, and must be what the step's own law makes of the look before; each message is in
exactly one place, or done, and after a refused write in one at least; tokens rise; and a message
is charged as many failed runs as it has had.

The examples are the same in every run. To look further, at others each time:

    LAWS_EXAMPLES=2000 python -m pytest tests/test_laws.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import redis
from conftest import identity, payload_text, retrying_text
from endings import envelope_of, retried, run_of, settled, stored
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from letters import SEEN
from server import Server

import worker
from backoff import Policy
from worker import (
    Claim,
    Failure,
    Message,
    Note,
    Queue,
    Run,
    Splice,
    Step,
    Undecodable,
    conclude,
    load,
    revive,
    unsettled,
)

LOOK_FURTHER = int(os.environ.get("LAWS_EXAMPLES", 0))


def effort(examples: int, steps: int = 50) -> settings:
    """How many examples are tried, the same ones each time unless asked to look further."""
    return settings(
        max_examples=LOOK_FURTHER or examples,
        stateful_step_count=steps,
        derandomize=not LOOK_FURTHER,
        database=None,
        deadline=None,  # a busy machine breaks no law
        suppress_health_check=list(HealthCheck),
    )


# ---- All places, and what each transition makes of them ----------------------------------------

LEASE = 10_000.0  # seconds: it ends when a rule says so
FAR = 10_000.0  # seconds that a retry waits until a rule says that it is due


@dataclass
class Places:
    """A look into every place. Lists are as in Redis, left to right; `now` is the server's, ms."""

    waiting: list[bytes]
    next: list[bytes]
    running: dict[int, bytes]
    leases: dict[str, bool]  # "token owner" → it has ended
    retry: dict[int, bytes]
    due: list[int]  # tokens of those retries that are due, in their order
    notes: dict[int, list[tuple[str, ...]]]
    dlq: list[bytes]
    now: int = field(compare=False)

    @classmethod
    def look(cls, queue: Queue, client: redis.Redis) -> Places:
        names = queue.names
        with client.pipeline(transaction=True) as look:
            look.time()
            look.lrange(names.waiting, 0, -1)
            look.lrange(names.next, 0, -1)
            look.hgetall(names.running)
            look.zrange(names.leases, 0, -1, withscores=True)
            look.zrange(names.retry, 0, -1, withscores=True)
            look.hgetall(names.notes)
            look.lrange(names.dlq, 0, -1)
            time, waiting, rung, running, leases, retry, notes, dlq = look.execute()
        now = time[0] * 1000 + time[1] // 1000
        return cls(
            waiting,
            rung,
            {int(token): text for token, text in running.items()},
            {lease.decode(): score <= now for lease, score in leases},
            {int(member.partition(b":")[0]): retrying_text(member) for member, _ in retry},
            [int(member.partition(b":")[0]) for member, score in retry if score <= now],
            {int(token): [x[1:] for x in Note.read(lines)] for token, lines in notes.items()},
            dlq,
            now,
        )

    def copy(self) -> Places:
        return replace(
            self,
            **{name: value.copy() for name, value in vars(self).items() if name != "now"},
        )

    def texts(self) -> list[bytes]:
        """Every message found, a dead one as its payload."""
        alive = [*self.waiting, *self.next, *self.running.values(), *self.retry.values()]
        return alive + [payload_text(envelope) for envelope in self.dlq]

    def found(self) -> Counter[str]:
        return Counter(map(identity, self.texts()))

    # What a transition makes of it: (the reply, the places afterwards). -------------------------

    def settle(self, step: Step) -> tuple[Any, Places]:
        """After done, retry, bury, bury_unread or checkpoint: refused unless the token runs."""
        kind, token, owner = step.script, int(step.args[0]), step.args[1]
        rest: Any = step.args[2:]
        new = self.copy()
        if token not in new.running:
            return b"stale", new
        text = new.running.pop(token)
        if kind is worker.CHECKPOINT:
            new.running[token] = spliced(text, rest[1:])
            new.leases[f"{token} {owner}"] = False
            return b"ok", new
        new.leases.pop(f"{token} {owner}", None)
        new.notes.pop(token, None)
        if kind is worker.DONE:
            new.waiting = [*reversed(rest), *new.waiting]
        elif kind is worker.RETRY:
            new.retry[token] = spliced(text, rest[1:])
            if rest[0] == 0:
                new.due.append(token)
        elif kind is worker.BURY:
            new.dlq.insert(0, spliced(text, rest))
        else:
            assert kind is worker.BURY_UNREAD
            new.dlq.insert(0, rest[0] + b'"' + escaped(text) + b'"' + rest[1])
        return b"ok", new

    def claim(self, reply: Any, owner: str) -> Places:
        """After a claim that replied this; AssertionError if it is not what it must take."""
        new = self.copy()
        fresh = new.next or new.waiting
        claim = Claim.of(reply, owner)
        if claim.run is None:
            assert not claim.paused and not fresh and not new.due
            assert claim.left == len(new.running) + len(new.retry)
            assert (claim.wait_ms == -1) == (not new.retry)
            return new
        token, run = claim.run.token, claim.run
        if new.due and (token % 2 == 0 or not fresh):
            old = new.due.pop(0)
            text = new.retry.pop(old)
            if old in new.notes:
                new.notes[token] = new.notes.pop(old)
        else:
            text = fresh.pop()
        new.running[token] = text
        new.leases[run.lease] = False
        notes = new.notes.get(token, [])
        assert [x[1:] for x in run.notes] == notes
        assert (run.here, run.raw) == ((False, b"") if notes else (True, text))
        return new

    def fall(self, reply: list[bytes], step: Step) -> Places:
        """After a fall: of the leases given, or else of all that have ended, small as they are."""
        word, wait, *known = step.args
        reason, _, error = str(word).partition(" ")
        leases = [str(x) for x in known] or [x for x, ended in self.leases.items() if ended]
        new, fell = self.copy(), []
        for lease in leases:
            token, owner = int(lease.split()[0]), lease.split()[1]
            if token in new.running:
                fell.append(lease)
                new.retry[token] = new.running.pop(token)
                new.notes.setdefault(token, [])
                new.notes[token] = [*new.notes[token], (owner, reason, error)]
                if wait == "front":
                    new.due.insert(0, token)
                elif wait == 0:
                    new.due.append(token)
            new.leases.pop(lease, None)
        assert sorted(x.decode() for x in reply) == sorted(fell)
        return new

    def renew(self, reply: list[bytes], leases: list[str]) -> Places:
        new = self.copy()
        refused = []
        for lease in leases:
            token = int(lease.split()[0])
            if token in new.running:
                new.leases.pop(f"{token} -", None)
                new.leases[lease] = False
            else:
                refused.append(lease)
        assert [x.decode() for x in reply] == refused
        return new


def spliced(old: bytes, args: Any) -> bytes:
    before, head, middle, tail, after = args
    return Splice(before, head, middle, tail, after).of(old)


def escaped(raw: bytes) -> bytes:
    """Any bytes as the inside of a JSON string, as `bury_unread` spells it."""
    special = {ord('"'): b'\\"', ord("\\"): b"\\\\"}
    special |= {byte: b"\\u%04x" % byte for byte in range(32)}
    special |= {byte: b"\\udc%02x" % byte for byte in range(128, 256)}
    return b"".join(special.get(byte, bytes([byte])) for byte in raw)


# ---- Any sequence of transitions ---------------------------------------------------------------

OWNERS = ("host:1:aa/1", "host:1:aa/2", "other:2:bb/1")
POLICY = Policy(max_attempts=3, base=1e-9, cap=1e-9)  # waits are what a rule says
OUTCOMES = st.sampled_from(
    (
        "failed",
        "killed",
        "killed",
        "done",
        "done with follow-ups",
        "stopped",
        "failed for good",
        "not read",
    )
)
TIMES = st.sampled_from((1, 1, 0, 2))
WAITS = st.sampled_from((0.0, FAR))
TWIN, PEST = b'{"twin": [1.10, 1e400]}', b'\xff\0"\\%d\n'
DENIED = sorted(
    {name.split()[0] for name in worker.NEEDED}
    - {"HINCRBY", "LPOS", "ZREMRANGEBYSCORE", "HLEN", "HKEYS", "HSTRLEN", "ZSCAN", "BRPOPLPUSH"}
)
FORMS = ("plain", "plain", "pretty", "with attempts", "twin", "pest")
STEPS = (
    "settling", "settling and claim", "claim", "claim", "renew", "fall", "fall of the ended",
    "replay",
)  # fmt: skip
WHICH = st.integers(0, 9)
FENCES = (b"", b"garbage", b"0", b"-7", b"inf", b"nan", b"1.5", b"9" * 30)


def waiting(step: Step, seconds: float) -> Step:
    """The step, with this wait if it is a retry."""
    if step.script is not worker.RETRY:
        return step
    return Step(step.script, (*step.args[:2], int(seconds * 1000), *step.args[3:]))


class Settling:
    """A settlement on its way; it may be sent never, late, or twice."""

    def __init__(self, step: Step, failed: int = 0, knows: bool = True) -> None:
        self.step, self.token = step, int(step.args[0])
        self.failed = failed  # runs that it charges and that no note speaks of
        self.knows = knows  # what the message says about itself is kept

    def __repr__(self) -> str:
        return f"{self.step.script.name} of {self.token}"


class AnySequence(RuleBasedStateMachine):
    """Owners, their runs and their settlements; the model is a look at Redis before each step."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.client = server.client()
        self.client.flushall()
        self.client.execute_command("ACL", "SETUSER", "lab", "reset", "on", "nopass", "~*", "+@all")
        self.queue = Queue(server.url)
        self.lab = Queue(server.url.replace("unix://", "unix://lab:none@"))
        self.serial = 0
        self.runs: list[Run] = []  # that their owners know of, settled or not
        self.settlings: list[Settling] = []  # made, sent or not
        self.texts: dict[int, bytes] = {}  # token → what its owner has read
        self.last_token = 0
        self.pushed: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # runs that have failed, of messages that say so
        self.released: Counter[str] = Counter()
        self.untold: set[str] = set()  # messages that do not, or not any more
        self.peaceful = True
        self.evicted = self.adopted = self.spoilt = self.fence_is_ours = False
        self.before = self.look()

    def teardown(self) -> None:
        self.client.execute_command("ACL", "DELUSER", "lab")
        for each in (self.queue, self.lab, self.client):
            each.close()

    def look(self) -> Places:
        return Places.look(self.queue, self.client)

    # Laws ----------------------------------------------------------------------------------------

    def must_be(self, expected: Places | None = None) -> None:
        """Looks again: it is what was expected, and no law is broken."""
        now = self.look()
        if expected is not None:
            assert replace(now, due=sorted(now.due)) == replace(expected, due=sorted(expected.due))
        self.before = now
        assert now.found() + self.done == self.pushed, "lost, or in two places"
        leased = {int(lease.split()[0]) for lease in now.leases}
        assert self.evicted or self.spoilt or now.running.keys() <= leased, "without a lease"
        assert self.adopted or self.spoilt or leased <= now.running.keys(), "a stray lease"
        assert self.spoilt or now.notes.keys() <= now.running.keys() | now.retry.keys(), "notes"
        self.must_be_charged(now)

    def must_be_charged(self, now: Places) -> None:
        """Each failed run, and each release, is in the message or in a note, and only once."""
        alive = [*now.running.items(), *now.retry.items()]
        noted = [(text, now.notes.get(token, [])) for token, text in alive]
        for text, notes in noted + [(text, []) for text in now.waiting + now.next]:
            if identity(text) not in self.untold:
                message = Message.parse(text)
                facts = message.kept | {"attempts": message.attempts}
                self.must_tell(identity(text), facts, [reason for _, reason, _ in notes])
        for envelope in now.dlq:
            name = identity(payload_text(envelope))
            if name not in self.untold:
                self.must_tell(name, load(envelope), [])

    def must_tell(self, name: str, facts: dict[str, Any], reasons: list[str]) -> None:
        failed = sum(reason != "released" for reason in reasons)
        told = facts["attempts"] + facts.get("earlier_attempts", 0) + failed
        assert told == self.failed[name], f"{self.failed[name]} runs of {name} have failed"
        told = facts.get("released", 0) + len(reasons) - failed
        assert told == self.released[name], f"{name} was released {self.released[name]} times"

    def must_rise(self, token: int) -> None:
        assert token > self.last_token
        if self.fence_is_ours:
            assert (token - self.last_token) % 2 == 1
        self.last_token, self.fence_is_ours = token, True

    def run(self, which: int) -> Run:
        """One of the runs known to their owners: the newest that go on, then the others."""
        newest = sorted(self.runs[::-1], key=lambda run: run.token not in self.before.running)
        return newest[which % len(newest)]

    def settling(self, which: int) -> Settling:
        newest = sorted(self.settlings[::-1], key=lambda x: x.token not in self.before.running)
        return newest[which % len(newest)]

    def anything(self) -> bool:
        return bool(self.before.next or self.before.waiting or self.before.due)

    # Producers -----------------------------------------------------------------------------------

    @initialize(
        forms=st.lists(st.sampled_from(FORMS), min_size=3, max_size=9),
        peaceful=st.sampled_from((True, True, False)),
    )
    def begin(self, forms: list[str], peaceful: bool) -> None:
        self.peaceful = peaceful  # no write is refused
        for form in forms:
            self.push(form)

    @rule(form=st.sampled_from(FORMS))
    def push(self, form: str) -> None:
        self.serial += 1
        attempts = self.serial % 3
        body = {"id": self.serial, "x": [1.5, "é"]}
        text = {
            "plain": json.dumps(body).encode(),
            "pretty": json.dumps(body | {"attempts": attempts}, indent=2).encode() + b"\n",
            "with attempts": json.dumps({"attempts": attempts} | body, ensure_ascii=False).encode(),
            "twin": TWIN,
            "pest": PEST % self.serial,
        }[form]
        self.known(text)
        self.client.lpush(self.queue.names.waiting, text)
        self.must_be(replace(self.before, waiting=[text, *self.before.waiting]))

    def known(self, text: bytes) -> None:
        name = identity(text)
        self.pushed[name] += 1
        try:
            self.failed[name] = Message.parse(text).attempts
        except Undecodable:
            self.untold.add(name)
        if text == TWIN:
            self.untold.add(name)

    # Owners --------------------------------------------------------------------------------------

    @precondition(anything)
    @rule(owner=st.sampled_from(OWNERS), answered=st.sampled_from((True, True, True, False)))
    def claim(self, owner: str, answered: bool) -> None:
        """Without an answer, its owner does not know of the run."""
        [reply] = self.queue.do(self.queue.claim(owner, LEASE))
        self.claimed(self.before, reply, owner, answered)

    @precondition(lambda self: not self.anything() and self.before.retry and self.before.running)
    @rule()
    def claim_nothing(self) -> None:
        [reply] = self.queue.do(self.queue.claim(OWNERS[0], LEASE))
        self.must_be(self.before.claim(reply, OWNERS[0]))

    def claimed(self, before: Places, reply: Any, owner: str, answered: bool = True) -> None:
        self.must_be(before.claim(reply, owner))
        self.remember(reply, owner, answered)

    def remember(self, reply: Any, owner: str, answered: bool = True) -> None:
        run = Claim.of(reply, owner).run
        if run is not None:
            self.must_rise(run.token)
            self.texts[run.token] = self.before.running[run.token]
            if answered:
                self.runs.append(run)

    @precondition(lambda self: self.before.leases)
    @rule(owner=st.sampled_from(OWNERS))
    def find(self, owner: str) -> None:
        """After a lost answer: what has a lease under one's own name, and still runs."""
        held = self.queue.held(owner)
        mine = [lease for lease in self.before.leases if lease.split()[1] == owner]
        assert held == sorted(int(lease.split()[0]) for lease in mine)
        for token in held:
            run = Run(token, owner, here=False)
            [refused] = self.queue.do(self.queue.renew(LEASE, run.lease))
            self.must_be(self.before.renew(refused, [run.lease]))
            if not refused:
                lines = self.queue.command("HGET", self.queue.names.notes, token) or b""
                self.texts[token] = self.queue.text(token) or b""
                run = run._replace(notes=Note.read(lines), start_ms=self.queue.now_ms())
                self.runs = [x for x in self.runs if x.token != token] + [run]

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, outcome=OUTCOMES, wait=WAITS, times=TIMES)
    def attempt(self, which: int, outcome: str, wait: float, times: int) -> None:
        """The result is sent once, or the hand dies before, or the answer is lost."""
        run = self.run(which)
        if outcome in ("killed", "stopped"):
            reason = "released" if outcome == "stopped" else "worker_died"
            return self.let_fall([run.lease], reason, None if outcome == "stopped" else wait)
        settling = self.result(run, outcome, wait)
        self.settlings.append(settling)
        for _ in range(times):
            self.deliver(settling)

    @precondition(anything)
    @rule(owner=st.sampled_from(OWNERS), outcome=OUTCOMES, wait=WAITS, times=TIMES)
    def work(self, owner: str, outcome: str, wait: float, times: int) -> None:
        self.claim(owner, True)
        self.attempt(0, outcome, wait, times)

    def result(self, run: Run, outcome: str, wait: float) -> Settling:
        """As a hand does it: notes are charged first, and what they do not kill is run."""
        if outcome == "not read":
            after = b', "error": "E: e", "attempts": 3}'
            step = self.queue.bury_unread(run, b'{"payload": ', after)
            return Settling(step, knows=False)
        queue, text = self.queue, self.texts[run.token]
        failures, failed, message = unsettled(run), 0, None
        if len(failures) < POLICY.max_attempts:
            run = run._replace(raw=text, here=True)
            try:
                message = Message.parse(text)
            except Undecodable:
                failures = [Failure("Undecodable: it", "undecodable", True, at_ms=run.start_ms)]
        if message and not failures:
            if outcome == "done":
                return Settling(queue.done(run))
            if outcome == "done with follow-ups":
                self.serial += 1
                two = [b'{"id": %d, "n": %d}' % (self.serial, n) for n in (1, 2)]
                return Settling(queue.done(run, *two))
            fatal = outcome == "failed for good"
            failures, failed = [Failure("E: e", fatal=fatal, at_ms=run.start_ms)], int(not fatal)
        step = waiting(conclude(queue, POLICY, run, message, failures).step, wait)
        return Settling(step, failed, message is not None)

    def sent(self, settling: Settling, reply: bytes, before: Places) -> None:
        """Writes down what a settlement means that has been accepted."""
        if reply != b"ok":
            return
        name = identity(before.running[settling.token])
        self.failed[name] += settling.failed
        if not settling.knows:
            self.untold.add(name)
        notes = before.notes.get(settling.token, [])
        event(f"{settling.step.script.name} with {len(notes)} notes")
        if settling.step.script is worker.DONE:
            self.done[name] += 1
            for text in settling.step.args[2:]:
                assert isinstance(text, bytes)
                self.known(text)

    def deliver(self, settling: Settling) -> None:
        """Whatever checkpoints there have been since it was made."""
        [reply] = self.queue.do(settling.step)
        expected, after = self.before.settle(settling.step)
        assert reply == expected
        self.sent(settling, reply, self.before)
        self.must_be(after)

    @precondition(lambda self: self.settlings)
    @rule(which=WHICH)
    def send_late_or_again(self, which: int) -> None:
        self.deliver(self.settling(which))

    @precondition(lambda self: self.settlings)
    @rule(
        which=WHICH,
        owner=st.sampled_from(OWNERS),
        forgotten=st.sampled_from(("nothing", "all", "the settlement", "the claim")),
        at_once=st.booleans(),
    )
    def send_and_claim(self, which: int, owner: str, forgotten: str, at_once: bool) -> None:
        """In one round trip, as one script or as two. One that Redis has forgotten is sent again:
        then it comes later than the other.
        """
        settling, before = self.settling(which), self.before
        step = waiting(settling.step, FAR)  # else which of two that are due at once comes first?
        claim = self.queue.claim(owner, LEASE)
        if forgotten != "nothing":
            self.client.script_flush()
        if forgotten == "the settlement":
            self.client.script_load(worker.CLAIM.source)
        if forgotten == "the claim":
            self.client.script_load(step.script.source)
        if at_once:
            [[word, reply]] = self.queue.do(self.queue.both(step, claim))
        else:
            word, reply = self.queue.do(step, claim)
        if forgotten == "the settlement" and not at_once:
            expected, after = before.claim(reply, owner).settle(step)
        else:
            expected, after = before.settle(step)
            after = after.claim(reply, owner)
        assert word == expected
        self.sent(settling, word, before)
        self.must_be(after)
        self.remember(reply, owner)

    @precondition(lambda self: self.runs)
    @rule(which=WHICH, stage=st.sampled_from((1, "half", None, {"attempts": 7}, [1.5])))
    def checkpoint(self, which: int, stage: Any) -> None:
        run = self.run(which)
        try:
            message = Message.parse(self.texts[run.token])
        except Undecodable:
            return
        kept, seen = message.kept | {"stage": stage}, message.first_seen_at or SEEN
        step = self.queue.checkpoint(run, LEASE, message.noted(message.attempts, seen, kept))
        [reply] = self.queue.do(step)
        expected, after = self.before.settle(step)
        assert reply == expected
        self.must_be(after)
        if reply == b"ok":
            self.texts[run.token] = self.before.running[run.token]

    @precondition(lambda self: self.runs)
    @rule(some=st.lists(WHICH, min_size=1, max_size=5))
    def renew(self, some: list[int]) -> None:
        leases = [self.run(which).lease for which in some]
        [refused] = self.queue.do(self.queue.renew(LEASE, *leases))
        self.must_be(self.before.renew(refused, leases))

    # Foremen and operators -----------------------------------------------------------------------

    @precondition(lambda self: self.runs)
    @rule(
        some=st.lists(WHICH, min_size=2, max_size=4),
        reason=st.sampled_from(("worker_died", "timed_out", "released")),
        wait=st.sampled_from((None, 0.0, FAR)),
    )
    def fall(self, some: list[int], reason: str, wait: float | None) -> None:
        self.let_fall([self.run(which).lease for which in some], reason, wait)

    @precondition(lambda self: any(self.before.leases.values()))
    @rule()
    def fall_of_what_has_ended(self) -> None:
        self.let_fall([], "worker_died", 0.0)

    def let_fall(self, leases: list[str], reason: str, wait: float | None) -> None:
        step = self.queue.fall(reason, "signal SIGKILL", *leases, wait=wait)
        [reply] = self.queue.do(step)
        self.fell(reply, reason, self.before)
        self.must_be(self.before.fall(reply, step))

    def fell(self, leases: list[bytes], reason: str, before: Places) -> None:
        for lease in leases:
            name = identity(before.running[int(lease.split()[0])])
            (self.released if reason == "released" else self.failed)[name] += 1

    @precondition(lambda self: not all(self.before.leases.values()))
    @rule(which=st.sampled_from(("all", *OWNERS)))
    def leases_end(self, which: str) -> None:
        for lease in self.before.leases:
            if which in ("all", lease.split()[1]):
                self.client.zadd(self.queue.names.leases, {lease: 1}, xx=True)
                self.before.leases[lease] = True
        self.must_be(self.before)

    @precondition(lambda self: len(self.before.due) < len(self.before.retry))
    @rule()
    def retries_are_due(self) -> None:
        for token, text in self.before.retry.items():
            if token not in self.before.due:
                self.client.zadd(self.queue.names.retry, {b"%d:%b" % (token, text): 1}, xx=True)
        self.must_be(replace(self.before, due=list(self.before.retry)))

    @precondition(lambda self: self.before.waiting)
    @rule()
    def ring(self) -> None:
        assert self.queue.ring(1)
        *waiting, last = self.before.waiting
        self.must_be(replace(self.before, waiting=waiting, next=[last, *self.before.next]))

    @precondition(lambda self: self.before.dlq)
    @rule(place=st.integers(0, 5), seen=st.booleans(), end=st.sampled_from((-1, 1)))
    def replay(self, place: int, seen: bool, end: int) -> None:
        """Two operators at once: the second finds it gone, unless there are two of them."""
        oldest_first = self.before.dlq[::-1]
        place %= len(oldest_first)
        envelope = oldest_first[place]
        step = self.queue.replay(envelope, revive(envelope), end, place + 1 if seen else 0)
        for _ in range(2):
            [reply] = self.queue.do(step)
            expected = self.before.copy()
            if envelope not in expected.dlq:
                assert reply == b"gone"
            elif reply == b"ok":
                at = expected.dlq.index(envelope)
                if end == -1:
                    at = len(expected.dlq) - 1 - expected.dlq[::-1].index(envelope)
                del expected.dlq[at]
                expected.waiting.insert(0, revive(envelope))
            else:  # a twin further up
                assert seen and oldest_first.count(envelope) > 1
            self.must_be(expected)

    # Trouble -------------------------------------------------------------------------------------

    @precondition(lambda self: self.fence_is_ours)
    @rule(value=st.none() | st.sampled_from(FENCES))
    def the_fence_is_lost(self, value: bytes | None) -> None:
        self.client.delete(self.queue.names.fence)
        if value is not None:
            self.client.set(self.queue.names.fence, value)
        self.fence_is_ours = False

    @precondition(lambda self: self.before.running and not self.evicted)
    @rule()
    def leases_are_evicted(self) -> None:
        self.client.delete(self.queue.names.leases)
        self.evicted = bool(self.before.running) or self.evicted
        self.must_be(replace(self.before, leases={}))

    @precondition(lambda self: self.evicted)
    @rule()
    def adopt(self) -> None:
        leased = {int(lease.split()[0]) for lease in self.before.leases}
        bare = self.before.running.keys() - leased
        assert self.queue.adopt(LEASE) == len(bare)
        self.evicted, self.adopted = False, True
        found = self.before.leases | {f"{token} -": False for token in bare}
        self.must_be(replace(self.before, leases=found))

    def step(self, kind: str, settling: Settling) -> Step:
        """Something that anybody may do now."""
        lease = self.run(0).lease if self.runs else "17 nobody"
        claim = self.queue.claim(OWNERS[0], LEASE)
        if kind == "claim":
            return claim
        if kind == "settling and claim":
            return self.queue.both(settling.step, claim)
        if kind == "renew":
            return self.queue.renew(LEASE, lease)
        if kind == "fall":
            return self.queue.fall("worker_died", "", lease)
        if kind == "fall of the ended":
            return self.queue.fall("worker_died", "")
        if kind == "replay" and self.before.dlq:
            envelope = self.before.dlq[0]
            return self.queue.replay(envelope, revive(envelope))
        return settling.step

    @precondition(lambda self: self.settlings and not self.peaceful)
    @rule(which=WHICH, kind=st.sampled_from(STEPS), denied=st.sampled_from(DENIED) | WHICH)
    def a_write_is_refused(self, which: int, kind: str, denied: str | int) -> None:
        """To a user who may not run that command; or a key of the step is of another type."""
        step = self.step(kind, self.settling(which))
        try:
            if isinstance(denied, str):
                [reply] = self.without(denied, step)
            else:
                [reply] = self.with_a_wrong_key(denied, step)
        except redis.ResponseError as error:
            reply = error
        self.in_trouble(step, reply)

    def without(self, command: str, step: Step) -> list[Any]:
        self.client.execute_command("ACL", "SETUSER", "lab", f"-{command.lower()}")
        try:
            return self.lab.do(step)
        finally:
            self.client.execute_command("ACL", "SETUSER", "lab", f"+{command.lower()}")

    def with_a_wrong_key(self, which: int, step: Step) -> list[Any]:
        roles = [role for role in step.script.roles if role != "pause"]  # that may be anything
        role = roles[which % len(roles)]
        key = getattr(self.queue.names, role)
        kept = self.client.exists(key) and self.client.rename(key, "aside")
        if worker.KEYS[role][1] == "hash":
            self.client.set(key, "x")
        else:
            self.client.hset(key, "x", "x")
        try:
            return self.queue.do(step)
        finally:
            self.client.delete(key)
            if kept:
                self.client.rename("aside", key)

    def in_trouble(self, step: Step, reply: Any) -> None:
        """Nothing is lost; what a refused write has left twice is two messages from here on."""
        before, now = self.before, self.look()
        gone, follow_ups = Counter[str](), 0
        if step.script.name.startswith("done"):
            args = step.args[1:] if "+" in step.script.name else step.args
            token, follow_ups = int(args[0]), 2
            if token in before.running and token not in now.running:
                gone[identity(before.running[token])] = 1
        assert now.found() + gone >= before.found(), f"lost, after {reply}"
        more = now.found() + gone - before.found()
        assert more.total() <= 1 + follow_ups, f"{more} more, after {reply}"
        event(f"{step.script.name}: {type(reply).__name__}, {more.total()} more")
        self.spoilt = True
        self.untold |= now.found().keys() | before.found().keys()
        self.done += gone
        self.pushed = now.found() + self.done
        self.last_token = max([self.last_token, *now.running])
        self.fence_is_ours = False
        self.must_be()


def test_no_sequence_of_transitions_breaks_a_law(server: Server) -> None:
    run_state_machine_as_test(partial(AnySequence, server), settings=effort(100))


# ---- Any text ----------------------------------------------------------------------------------
# Objects as nobody would write them: any white space, any escapes, equal names, and names of ours
# with values of ours and of others, at the top and further down.

BLANK = st.sampled_from(("", " ", "\n  ", "\t", " \r\n"))
STRINGS = st.text(max_size=8)
NAMES = st.sampled_from(
    ('"attempts"', '"first_seen_at"', '"_retry"', r'"\u0061ttempts"', '"kind"', '"a"', '""')
) | st.builds(json.dumps, STRINGS, ensure_ascii=st.booleans())
OURS = st.sampled_from(
    ("0", "3", "9007199254740991", f'"{SEEN}"', '"2026-11-30T12:00:00Z"', "{}", '{"replays": 2}',
     '{"history": [{}], "stage": {"attempts": 7}}', '{"stage": ", \\"attempts\\": 3"}')
)  # fmt: skip
LEAVES = st.one_of(
    OURS,
    st.sampled_from(
        ("-1", "1.0", "-0", "1e22", "1e400", "NaN", "-Infinity", "true", "null", '"3"', '"}{,:"',
         r'"\""', r'"\\"', r'"\ud800"', r'"\/"', '"\u2028"', "9223372036854775808")
    ),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.builds(json.dumps, STRINGS, ensure_ascii=st.booleans()),
)  # fmt: skip


@st.composite
def listed(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    items = draw(st.lists(inner, max_size=4))
    spaced = [draw(BLANK) + item + draw(BLANK) for item in items]
    return "[" + (",".join(spaced) or draw(BLANK)) + "]"


@st.composite
def objected(draw: st.DrawFn, inner: st.SearchStrategy[str], most: int = 4) -> str:
    pairs = draw(st.lists(st.tuples(NAMES, inner), max_size=most))
    spaced = [
        draw(BLANK) + name + draw(BLANK) + ":" + draw(BLANK) + value + draw(BLANK)
        for name, value in pairs
    ]
    return "{" + (",".join(spaced) or draw(BLANK)) + "}"


VALUES = st.recursive(LEAVES, lambda inner: listed(inner) | objected(inner), max_leaves=6)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Objects, half of which end in members that look as if we had written them."""
    text = draw(objected(VALUES, most=5))
    ours = draw(st.lists(st.tuples(st.sampled_from([*worker.RESERVED]), OURS | LEAVES), max_size=5))
    if ours and draw(st.booleans()):
        tail = ", ".join(f'"{name}": {value}' for name, value in ours)
        text = text[:-1] + ("" if text[1:-1].strip() == "" else ", ") + tail + "}"
    return (draw(BLANK) + text + draw(BLANK)).encode()


OBJECTS = texts()
FACTS = st.tuples(
    st.integers(0, worker.COUNT),
    st.just(SEEN),
    st.fixed_dictionaries(
        {"history": st.lists(st.fixed_dictionaries({"error": STRINGS}), min_size=1, max_size=2)},
        optional={"stage": st.recursive(STRINGS, st.lists, max_leaves=3), "released": st.just(2)},
    ),
)
BYTES = st.binary(max_size=60) | st.lists(
    st.sampled_from(
        (b"\xff", b"\0", b'"', b"\\", b"\n", b"%", b"\x7f", b"\x80", b"a", b"\xc3\xa9", b"{", b"}",
         b"\xed\xb3\xbf", b"\\udcff", b"\x1f")
    )
).map(b"".join)  # fmt: skip


class Pairs(list[Any]):
    """The members of an object in their order, equal names too."""


def plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {name: plain(each) for name, each in value}
    return [plain(each) for each in value] if isinstance(value, list) else value


def members_of(raw: bytes) -> list[tuple[str, Any]]:
    """What the standard library reads at the top level of an object."""
    return [(name, plain(value)) for name, value in json.loads(raw, object_pairs_hook=Pairs)]


def is_ours(member: tuple[str, Any]) -> bool:
    name, value = member
    return name in worker.RESERVED and worker.RESERVED[name](value)


def is_cut_from(part: bytes, whole: bytes) -> bool:
    """Tells whether it is left when something is taken out, and nothing moved or put in."""
    rest = iter(whole)
    return all(byte in rest for byte in part)


@effort(200)
@given(OBJECTS)
def test_what_is_ours_is_cut_out_of_any_object_and_nothing_else(raw: bytes) -> None:
    """Of several equal names the last one counts; an earlier one of ours may stay."""
    message, there = Message.parse(raw), members_of(raw)
    left = members_of(message.own)
    assert is_cut_from(message.own, raw)
    theirs = [member for member in there if not is_ours(member)]
    assert repr([member for member in left if not is_ours(member)]) == repr(theirs)
    names = [name for name, _ in there]
    assert all(names.count(name) > 1 for name, value in left if is_ours((name, value)))
    for name, value in dict(there).items():
        if is_ours((name, value)):
            assert message.ours[name] == value
    if left == there:
        assert message.own == message.raw == raw


@effort(200)
@given(OBJECTS, FACTS, FACTS)
def test_what_is_spliced_onto_any_object_comes_off_again(
    raw: bytes, facts: tuple[Any, ...], later: tuple[Any, ...]
) -> None:
    """And it is what every parser sees, and the second time takes the place of the first."""
    message = Message.parse(raw)
    text = message.noted(*facts).of(raw)
    again = Message.parse(text)
    assert again.own == message.own
    assert (again.attempts, again.first_seen_at, again.kept) == facts
    seen = json.loads(text)
    assert (seen["attempts"], seen["first_seen_at"], seen["_retry"]) == facts
    assert again.noted(*facts).of(text) == text
    assert again.noted(*later).of(text) == message.noted(*later).of(raw)


@effort(150)
@given(OBJECTS, st.integers(0, 3))
def test_any_object_comes_back_from_retries_death_and_replay(raw: bytes, failures: int) -> None:
    own, before = Message.parse(raw).own, Message.parse(raw).attempts
    text = raw
    for n in range(failures):
        text = retried(text)
        assert Message.parse(text).own == own
        assert Message.parse(text).attempts == before + n + 1
    dead = envelope_of(text)
    facts = json.loads(dead, parse_constant=worker.refuse)
    assert facts["attempts"] == before + failures + 1
    payload = facts["payload"]
    assert own in dead if isinstance(payload, dict) else payload.encode() == own
    back = Message.parse(revive(dead))
    assert (back.own, back.attempts) == (own, 0)
    assert back.kept["earlier_attempts"] == min(
        Message.parse(raw).kept.get("earlier_attempts", 0) + facts["attempts"], worker.COUNT
    )
    assert repr(members_of(back.own)) == repr(members_of(own))


@effort(150)
@given(BYTES)
def test_any_bytes_come_back_from_death_and_replay(raw: bytes) -> None:
    dead = envelope_of(raw)
    facts = json.loads(dead, parse_constant=worker.refuse)
    try:
        own = Message.parse(raw).own
    except Undecodable:
        assert facts["payload"].encode("utf-8", "surrogateescape") == raw
        assert revive(dead) == raw
    else:
        assert Message.parse(revive(dead)).own == own


@effort(100)
@given(raw=BYTES | OBJECTS)
def test_redis_makes_a_string_of_any_bytes(queue: Queue, raw: bytes) -> None:
    """The payload of what is buried unread, and what replay makes of it."""
    queue.command("HSET", queue.names.running, 1, raw)
    step = queue.bury_unread(Run(1, "me"), b'{"payload": ', b', "attempts": 5}')
    assert queue.do(step) == [b"ok"]
    dead = queue.command("RPOP", queue.names.dlq)
    payload = json.loads(dead, parse_constant=worker.refuse)["payload"]
    assert payload.encode("utf-8", "surrogateescape") == raw
    try:
        own = Message.parse(raw).own
    except Undecodable:
        assert revive(dead) == raw
    else:
        assert Message.parse(revive(dead)).own == own


SPOTS = st.integers(0, 70) | st.just(worker.END)


@effort(100)
@given(
    old=BYTES | OBJECTS,
    splice=st.builds(Splice, before=BYTES, head=SPOTS, middle=BYTES, tail=SPOTS, after=BYTES),
)
def test_redis_joins_any_text_as_we_do(queue: Queue, old: bytes, splice: Splice) -> None:
    queue.command("HSET", queue.names.running, 1, old)
    assert queue.do(queue.checkpoint(Run(1, "me"), LEASE, splice)) == [b"ok"]
    assert queue.text(1) == splice.of(old)


@effort(100)
@given(raw=BYTES | OBJECTS, max_attempts=st.sampled_from((1, worker.COUNT + 1)))
def test_redis_stores_of_any_failed_message_what_we_think_it_does(
    queue: Queue, raw: bytes, max_attempts: int
) -> None:
    queue.command("HSET", queue.names.running, 1, raw)
    settlement = settled(run_of(raw), max_attempts)
    assert queue.do(settlement.step) == [b"ok"]
    if settlement.step.script is worker.RETRY:
        [member] = queue.command("ZRANGE", queue.names.retry, 0, -1)
        queue.command("DEL", queue.names.retry)
        assert member == b"1:" + stored(settlement)
    else:
        assert queue.command("RPOP", queue.names.dlq) == stored(settlement)


FORGED = st.sampled_from(("\n17 you timed_out x", "\r17 you worker_died\n", "\x8517 you timed_out"))


@effort(100)
@given(
    reason=st.sampled_from(("released", "timed_out")),
    errors=st.lists(st.text(max_size=20) | FORGED, min_size=1, max_size=3),
)
def test_a_note_says_one_thing_about_one_run_whatever_its_error(
    queue: Queue, reason: str, errors: list[str]
) -> None:
    for error in errors:
        queue.command("HSET", queue.names.running, 1, b"{}")
        assert queue.do(queue.fall(reason, error, "1 me")) == [[b"1 me"]]
    lines = queue.command("HGET", queue.names.notes, 1)
    queue.command("DEL", queue.names.notes, queue.names.retry)
    assert [x[1:3] for x in Note.read(lines)] == [("me", reason)] * len(errors)
