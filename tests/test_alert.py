"""Dead letters are never forgotten: the worker says how many there are, and where to look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from conftest import Conservation
from processes import Process, until

from worker import Foreman, read_settings

BAD = "def process(msg): raise ValueError(msg['id'])"

Warned = Callable[..., list[str]]


@pytest.fixture
def warned(capfd: pytest.CaptureFixture[str]) -> Warned:
    """What a foreman with these flags says when it meets these depths, one after the other."""

    def meet(depths: list[int], *flags: str) -> list[str]:
        foreman = Foreman(read_settings([*flags]))
        capfd.readouterr()
        for depth in depths:
            foreman.warn(depth)
        return capfd.readouterr().err.splitlines()

    return meet


def line(depth: int, name: str = "q:tasks", look: str = "--list") -> str:
    return f"worker: warning: dead letters in {name}:dlq: {depth}; see python replay.py {look}"


def test_it_warns_at_the_threshold_and_at_each_doubling(warned: Warned) -> None:
    """Once for each of 3, 6, 12, …; a depth that was reported is not reported again."""
    depths = [depth for depth in range(25) for _ in range(2)]
    assert warned(depths, "--dlq-alert", "3") == [line(depth) for depth in (3, 6, 12, 24)]


def test_it_warns_of_the_first_dead_letter_unless_told_otherwise(warned: Warned) -> None:
    assert warned([0, 1]) == [line(1)]
    assert warned([99], "--dlq-alert", "100") == []


def test_it_warns_anew_after_there_were_fewer_than_the_threshold(warned: Warned) -> None:
    assert warned([5, 4, 5, 9, 4, 3, 5], "--dlq-alert", "4") == [line(5), line(9), line(5)]


def test_a_jump_over_several_doublings_is_one_warning(warned: Warned) -> None:
    """And the next is due at the next power of two above it."""
    assert warned([1000, 1001, 1023, 1024, 2047, 2048]) == [line(1000), line(1024), line(2048)]


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("q:tasks", "--list"),
        ("q:my mail", "--queue 'q:my mail' --list"),
        ("{q:tasks}", "--queue '{q:tasks}' --list"),
        ("it's", """--queue 'it'"'"'s' --list"""),
    ],
)
def test_the_command_that_it_names_can_be_pasted(warned: Warned, name: str, look: str) -> None:
    """It looks at the queue that the warning is about."""
    assert warned([1], "--queue", name) == [line(1, name, look)]


def test_a_worker_warns_of_what_it_buried(
    worker: Callable[..., Process], handler: Callable[[str], Path], conservation: Conservation
) -> None:
    """Also if it leaves before its next beat."""
    handler(BAD)
    conservation.push('{"id": 1}', '{"id": 2}')
    process = worker("--burst", "--max-attempts", 1)
    assert process.wait() == 0
    assert process.err.splitlines().count(line(2)) == 1


def test_a_worker_warns_of_what_others_buried_while_it_runs(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    redis_client: redis.Redis,
) -> None:
    handler(BAD)
    redis_client.rpush("q:tasks:dlq", "{}", "{}")
    process = worker("--lease", 1, "--dlq-alert", 2)
    until(lambda: line(2) in process.err, saw=lambda: process)
    redis_client.rpush("q:tasks:dlq", "{}", "{}", "{}")
    until(lambda: line(5) in process.err, saw=lambda: process)
    assert process.stop() == 0
    assert process.err.count("warning: dead letters") == 2
