"""What the README says is what the scripts do: commands, options, keys, members, permissions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from processes import PROJECT, Process, clean_environment, until
from server import Server

import worker as worker_module
from worker import RESERVED, TYPES, Names, Settings, read_settings

README = (PROJECT / "README.md").read_text()
MAKEFILE = (PROJECT / "Makefile").read_text()
SCRIPTS = ("worker.py", "replay.py", "backoff.py", "taskproc.py")


def help_of(script: str) -> str:
    command = [sys.executable, str(PROJECT / script), "--help"]
    environment = clean_environment({"COLUMNS": "100"})
    return subprocess.run(command, capture_output=True, text=True, env=environment).stdout


def rows(heading: str) -> dict[str, list[str]]:
    """The first table below a heading: first cell (without backquotes) → the other cells."""
    section = README.split(heading, 1)[1]
    table = re.search(r"^\|.*\n\|[ |-]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table, f"no table below {heading!r}"
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[1].splitlines()]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in cells}


@pytest.mark.parametrize("script", ["worker.py", "replay.py"])
def test_the_help_in_the_readme_is_the_help_of_the_script(script: str) -> None:
    """Python versions wrap and head differently, so words are compared, and not lines."""
    text = re.search(rf"\$ python {script} --help\n(.*?)\n```", README, re.DOTALL)
    assert text
    told, real = (re.sub(r"\s+", " ", part).strip() for part in (text[1], help_of(script)))
    assert told.split(" options: ", 1)[1] == real.split(" options: ", 1)[1]


def test_every_option_that_the_readme_names_exists() -> None:
    known = set(re.findall(r"--[a-z][a-z-]*", " ".join(map(help_of, SCRIPTS[:3]))))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README))
    assert named <= known, named - known


def test_every_option_of_the_worker_has_the_variable_that_the_readme_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """QR_A_B for --a-b: set to the default's text, it is accepted; set to nothing, refused."""
    for name, field in Settings.__dataclass_fields__.items():
        if not field.metadata or name == "redis":
            continue
        monkeypatch.setenv("QR_" + name.upper(), "")
        with pytest.raises(SystemExit) as stop:
            read_settings([])
        assert stop.value.code == 2
        monkeypatch.delenv("QR_" + name.upper())


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)`|\$ make ([a-z]+)", README))
    assert {a or b for a, b in named} <= targets
    assert {"lab", "test"} <= {a or b for a, b in named}


def test_the_key_table_is_the_truth() -> None:
    """Every key with its type, and no other."""
    names = Names()
    assert {key: cells[0] for key, cells in rows("is taken for yours and left alone.").items()} == {
        getattr(names, role): kind for role, kind in TYPES.items()
    }


def test_the_counters_are_those_that_the_scripts_count() -> None:
    source = (PROJECT / "worker.py").read_text()
    counted = set(re.findall(r"HINCRBY', stats, '(\w+)'", source)) | {"refused"}
    [line] = [line for line in README.splitlines() if line.startswith("| `q:tasks:stats`")]
    assert set(re.findall(r"`(\w+)`", line)) - {"q"} == counted


def test_the_reserved_members_are_those_of_the_readme() -> None:
    assert set(rows("Three names in it are reserved")) == set(RESERVED)


def test_an_envelope_has_the_members_of_the_readme_in_that_order(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    redis_client: redis.Redis,
) -> None:
    handler(
        "def process(msg, run):\n    run.checkpoint('half way')\n    raise ValueError('no')\n"
    )
    redis_client.lpush("q:tasks", '{"kind": "x", "_retry": {"replays": 1, "earlier_attempts": 5}}')
    assert worker("--burst", "--max-attempts", 1).wait() == 0
    envelope = json.loads(redis_client.lindex("q:tasks:dlq", 0))
    table = re.findall(r"\w+", " ".join(rows("A dead letter is an envelope")))
    assert list(envelope) == [name for name in table if name in envelope]
    assert set(envelope) == set(table)


def test_the_exit_codes_are_told() -> None:
    told = rows("### Exit codes of the worker")
    assert list(told) == ["0", "1", "2", "3"]


def permissions() -> str:
    found = re.search(r"ACL SETUSER worker on '>PASSWORD' (.*?)```", README, re.DOTALL)
    assert found
    return " ".join(found[1].replace("\\\n", " ").replace("'", "").split())


@pytest.fixture
def small_user(start_server: Callable[..., Server]) -> tuple[Server, str]:
    """A server with a user who may do what the README says, and nothing else."""
    server = start_server()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "on", ">secret", *permissions().split())
    return server, server.url.replace("unix://", "unix://small:secret@")


def test_the_permissions_in_the_readme_are_enough(
    small_user: tuple[Server, str],
    worker: Callable[..., Process],
    run: Callable[..., Process],
    handler: Callable[[str], Path],
) -> None:
    """Work, retry, death, takeover, replay and every look, by a user who may do no more."""
    server, url = small_user
    handler("def process(msg):\n    if msg['kind'] == 'bad': raise ValueError('no')\n")
    with server.client() as client:
        client.lpush("q:tasks", *['{"kind": "ok"}'] * 3, *['{"kind": "bad"}'] * 4)
        client.hset("q:tasks:running", "7", 'gone 1 {"kind": "ok"}')
        client.hset("q:tasks:running", "8", 'gone 1 {"kind": "ok"}')
        client.zadd("q:tasks:leases", {"7": 1})
        flags = ("--burst", "--base", 0.01, "--lease", 1, "--max-attempts", 2)
        process = worker(*flags, REDIS_URL=url)
        assert process.wait() == 0, process
        assert client.llen("q:tasks:dlq") == 4
        for command in (
            ["--list"], ["--show"], ["--group"], ["--status"], ["--prometheus"], ["--check"],
            [], ["--limit", 1], ["--discard", "--limit", 1, "--yes", "--file", "f"],
            ["--restore", "f"],
        ):  # fmt: skip
            process = run("replay.py", *command, REDIS_URL=url)
            code = process.wait()
            assert code == (1 if command == ["--check"] else 0), (command, process)
        assert client.llen("q:tasks:dlq") == 2
        assert client.llen("q:tasks") == 2


def test_no_permission_in_the_readme_is_too_many(
    small_user: tuple[Server, str], worker: Callable[..., Process]
) -> None:
    """Each of the worker's permissions, taken away, is missed at start, by name, with exit 2."""
    server, url = small_user
    needed = {word[1:] for word in permissions().split() if word.startswith("+")}
    probed = set(re.findall(r"\{'([A-Z]+)'", worker_module.PROBE.source.decode()))
    assert {name.lower() for name in probed} <= needed
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "-zadd")
    process = worker("--burst", REDIS_URL=url)
    assert process.wait() == 2
    assert "zadd" in process.err.lower()


def test_the_example_with_the_bad_message_is_what_happens(
    worker: Callable[..., Process], redis_client: redis.Redis, qr_dir: Path, app_dir: Path
) -> None:
    """The README's terminal: four retries, one dead letter, one warning."""
    (app_dir / "taskproc.py").write_text((PROJECT / "taskproc.py").read_text())
    redis_client.lpush("q:tasks", '{"kind": "bad"}')
    process = worker("--base", 0.02)
    until(lambda: "dead letters in" in process.err, saw=lambda: process)
    assert process.stop() == 0
    shown = re.search(r"\$ make worker\n(.*?)```", README, re.DOTALL)
    assert shown
    told = [re.sub(r"(wait|token)=[\d.]+", "", line) for line in shown[1].splitlines()]
    real = [re.sub(r"(wait|token)=[\d.]+", "", line) for line in process.out.splitlines()]
    assert [line for line in told if line.startswith("attempts=")] == real
