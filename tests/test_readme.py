"""What README says is what the scripts do: commands, options, keys, members, steps, links."""

from __future__ import annotations

import ast
import json
import os
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
from replay import REASONS
from worker import KEPT, KEYS, OPTIONS, RESERVED, Foreman, Names, read_settings

README = (PROJECT / "README.md").read_text()
RECIPES = (PROJECT / "docs" / "recipes.md").read_text()
MAKEFILE = (PROJECT / "Makefile").read_text()
SCRIPTS = ("worker.py", "replay.py", "backoff.py")
SOURCES = {name: (PROJECT / name).read_text() for name in SCRIPTS}
# Options of docker, pip and unshare that the recipes name.
FOREIGN = {
    *("--detach", "--name", "--stop-timeout", "--env", "--init", "--interval", "--timeout"),
    *("--no-cache-dir", "--mount-proc"),
}


def help_of(script: str) -> str:
    command = [sys.executable, str(PROJECT / script), "--help"]
    environment = clean_environment({"COLUMNS": "100"})
    return subprocess.run(command, capture_output=True, text=True, env=environment).stdout


def block(command: str, text: str = README) -> str:
    """What the terminal in the text shows below a command, up to the next one."""
    found = re.search(rf"^\$ {re.escape(command)}\n(.*?)(?=\n```|\n\n\$ )", text, re.M | re.S)
    assert found, f"README does not show: {command}"
    return found[1]


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = README.split(heading, 1)[1]
    table = re.search(r"^\|.*\n\|[ |-]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table, f"no table below {heading!r}"
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[1].splitlines()]
    return [[cell.strip() for cell in row] for row in cells]


def words(cell: str) -> list[str]:
    """What is in backquotes, in order."""
    return re.findall(r"`([^`]+)`", cell)


# --- What a reader types --------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_in_the_readme_is_the_help_of_the_script(script: str) -> None:
    """All of it. Python versions wrap differently, so white space does not count."""
    told, real = block(f"python {script} --help"), help_of(script)
    assert re.sub(r"\s+", "", told) == re.sub(r"\s+", "", real)


def test_every_option_that_is_named_exists() -> None:
    known = set(re.findall(r"--[a-z][a-z-]*", " ".join(map(help_of, SCRIPTS))))
    for text, more in ((README, set()), (RECIPES, FOREIGN)):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert named <= known | more, named - known - more


@pytest.mark.parametrize("option", [x for x in OPTIONS if x.metavar], ids=lambda x: x.name)
def test_every_option_of_the_worker_has_the_variable_that_the_help_promises(
    option: worker_module.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QR_A_B for --a-b: set to the default's text, it is accepted; set to nothing, refused."""
    variable = "REDIS_URL" if option.name == "redis" else f"QR_{option.attribute.upper()}"
    if option.default:
        monkeypatch.setenv(variable, option.default)
        assert getattr(read_settings([]), option.attribute) == option.parse(option.default)
    monkeypatch.setenv(variable, "")
    with pytest.raises(SystemExit) as stop:
        read_settings([])
    assert stop.value.code == 2


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ |^)make ([a-z]+)", README, re.MULTILINE))
    assert named <= targets, named - targets
    assert {"lab", "redis", "worker", "grade", "naive", "spread", "soak", "check"} <= named


def test_the_first_command_comes_within_two_minutes_of_reading() -> None:
    """At 200 words a minute; and the order of the chapters is that of a reader."""
    before = README.split("make lab\n```", 1)[0]
    assert len(before.split()) < 400
    order = [
        "Two commands", "The life of a message", "The exercise", "The handler",
        "The dead letter desk", "Running it for real", "What it promises", "Reference",
    ]  # fmt: skip
    chapters = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert [chapter for chapter in chapters if chapter in order] == order


def slug(heading: str) -> str:
    """The anchor that a heading has on GitHub."""
    plain = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return plain.replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "docs/recipes.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    page = PROJECT / name
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{name}: {target}"
        if anchor:
            text = re.sub(r"^```.*?^```", "", other.read_text(), flags=re.MULTILINE | re.DOTALL)
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert anchor in map(slug, headings), f"{name}: {target}"


# --- The exercise ---------------------------------------------------------------------------------


def source_of(script: str, where: str) -> str:
    """The source of a function, a method (`Hand.work`) or a constant (`RETRY`)."""
    body: list[ast.stmt] = ast.parse(SOURCES[script]).body
    for name in where.split("."):
        for node in body:
            target = node.targets[0] if isinstance(node, ast.Assign) else node
            if getattr(target, "name", getattr(target, "id", None)) == name:
                break
        else:
            raise AssertionError(f"{script} has no {where}")
        body = getattr(node, "body", [])
    return ast.get_source_segment(SOURCES[script], node) or ""


@pytest.mark.parametrize("row", rows("The eight steps"), ids=lambda row: row[0])
def test_each_step_of_the_exercise_is_where_the_table_says(row: list[str]) -> None:
    _, script, where, line = row
    [[script], [where], [line]] = map(words, (script, where, line))
    segment = source_of(script, where)
    assert line in segment, f"{script}, {where} has no line: {line}"
    assert SOURCES[script].count(line) <= 2, "a search for it finds too much"


def test_the_table_of_steps_has_all_eight() -> None:
    assert sorted({row[0].split(",")[0] for row in rows("The eight steps")}) == list("12345678")


def test_the_index_of_worker_py_names_what_exists() -> None:
    """Each name of the docstring's index, and of its steps, is defined in one of the scripts."""
    told = (ast.get_docstring(ast.parse(SOURCES["worker.py"])) or "").split("rule lives:")[1]
    told = told.split("Signals:")[0]
    named = set(re.findall(r"\b(?:[A-Z][a-z]+\.[a-z_]+|[A-Z]{4,}(?:_[A-Z]+)*)\b", told))
    for name in sorted(named - {"SIGTERM", "QUEUE"}):
        assert any(defined(script, name) for script in SCRIPTS), f"there is no {name}"
    [loop] = re.findall(r"the while loop: ([\w.]+)\.", told)
    assert "while last or not self.leaving" in source_of("worker.py", loop)


def defined(script: str, where: str) -> bool:
    try:
        return bool(source_of(script, where))
    except AssertionError:
        return False


def test_the_numbers_of_the_storm_are_those_of_the_simulation() -> None:
    command = [sys.executable, str(PROJECT / "backoff.py"), "--simulate"]
    environment = clean_environment({"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"})
    said = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    said = " ".join(said.split())
    assert "9,900 come in one tick" in said and "up to 9,900 of them" in README
    assert "Exponential + cap: 47.5 min" in said and "for 47 minutes" in README
    assert "Full jitter: 34.3 s" in said and "within 34 s" in README
    assert "1,024 s, 17 minutes" in said and "1,024 s" in README
    assert "failed 258 times within the hour" in said and "fails 258 times" in README


def test_the_example_with_the_bad_message_is_what_happens(
    worker: Callable[..., Process], redis_client: redis.Redis
) -> None:
    """The README's first terminal: four retries, one dead letter, one warning; in that order."""
    process = worker("--base", 0.02)
    until(lambda: "the example" in process.err, saw=lambda: process)
    redis_client.lpush("q:tasks", '{"kind": "bad"}')
    until(lambda: "dead letters in" in process.err, saw=lambda: process)
    assert process.stop() == 0
    told = [re.sub(r"(wait|of|token)=[\d.]+", r"\1", x) for x in block("make worker").splitlines()]
    real = [re.sub(r"(wait|of|token)=[\d.]+", r"\1", x) for x in process.out.splitlines()]
    log = [re.sub(r"(wait|of|token)=[\d.]+", r"\1", x) for x in process.err.splitlines()]
    assert [line for line in told if line.startswith("attempts=")] == real
    assert told[2] in log and told[-2:] == [x for x in log if "dead" in x and "example" not in x]


# --- The reference --------------------------------------------------------------------------------


def test_the_key_table_is_the_truth() -> None:
    """Every key with its type, and no other; the probe's is gone as soon as it is there."""
    told = {words(key)[0]: kind for key, kind, _ in rows("### Keys")}
    names = Names()
    assert told == {
        getattr(names, role): kind for role, (_, kind) in KEYS.items() if kind != "none"
    }


def test_the_counters_are_those_that_the_scripts_count() -> None:
    source = SOURCES["worker.py"]
    counted = set(re.findall(r"HINCRBY', stats, '(\w+)'|settle\('(\w+)'\)", source))
    counted = {one or other for one, other in counted}
    counted |= set(*re.findall(r"'\^(released)'\) or '(fallen)'", source))
    counted |= set(re.findall(r'"HINCRBY", self.queue.names.stats, "(\w+)"', source))
    [cells] = [row for row in rows("### Keys") if row[0] == "`q:tasks:stats`"]
    assert set(words(cells[2])) == counted
    assert {"done", "retried", "dead", "fallen", "released", "refused", "replayed"} <= counted


def test_the_reserved_members_are_those_of_the_readme() -> None:
    table = rows("Three names in it are reserved")
    assert [words(row[0])[0] for row in table] == list(RESERVED)
    assert set(words(table[2][1])) == set(KEPT)


def test_an_envelope_has_the_members_of_the_readme_in_that_order(
    worker: Callable[..., Process],
    handler: Callable[[str], Path],
    redis_client: redis.Redis,
) -> None:
    handler("def process(msg, run):\n    run.checkpoint('half way')\n    raise ValueError('no')\n")
    kept = {"released": 1, "replays": 1, "earlier_attempts": 5}
    redis_client.lpush("q:tasks", json.dumps({"kind": "x", "_retry": kept}))
    assert worker("--burst", "--max-attempts", 2, "--base", 0.01).wait() == 0
    envelope = json.loads(redis_client.lindex("q:tasks:dlq", 0))
    table = rows("### Dead letters")
    assert list(envelope) == [name for row in table for name in words(row[0])]
    [history] = [row for row in table if row[0] == "`history`"]
    assert list(envelope["history"][0]) == words(history[1])[0].strip("{}").split(", ")
    [reason] = [row for row in table if row[0] == "`reason`"]
    assert tuple(words(reason[1])) == REASONS


def test_the_exit_codes_are_told_as_the_help_tells_them() -> None:
    told = {row[0]: row[1] for row in rows("with `| tee`, use another name")}
    assert list(told) == ["0", "1", "2", "3"]
    line = " ".join(help_of("worker.py").split("exit codes:")[1].split())
    assert line == (
        "0 stopped or drained; 1 a bug; 2 a setting or Redis needs a person; 3 the handler cannot "
        "be loaded."
    )


def test_the_signals_are_those_that_the_foreman_knows() -> None:
    section = README.split("| Signal |")[1]
    stops, _, ignored = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)[1:4]
    assert set(words(stops)) == {number.name for number in Foreman.STOPS}
    assert set(words(ignored)) == {number.name for number in Foreman.IGNORED}


def test_the_ledger_has_the_rows_of_the_soak() -> None:
    source = (PROJECT / "tests" / "soak.py").read_text()
    kept = re.findall(r'^        \("([a-z ,]+)", ', source.split("rows = [")[1], re.MULTILINE)
    shown = re.findall(r"^ +([a-z][a-z ,]+?) +\d+(?:   .*)?$", block("make soak"), re.MULTILINE)
    assert shown == kept
    figures = dict(re.findall(r"^ +([a-z]+) +(\d+)", block("make soak"), re.MULTILINE))
    assert int(figures["done"]) + int(figures["dead"]) == int(figures["pushed"])


# --- Permissions ----------------------------------------------------------------------------------


def permissions() -> set[str]:
    found = re.search(r"ACL SETUSER worker on '>PASSWORD' '~q:tasks\*' (.*?)```", README, re.DOTALL)
    assert found
    return {word[1:].upper() for word in found[1].replace("\\\n", " ").split()}


@pytest.fixture
def small_user(start_server: Callable[..., Server]) -> tuple[Server, str]:
    """A server with a user who may do what the README says, and nothing else."""
    server = start_server()
    with server.client() as client:
        allowed = [f"+{command.lower()}" for command in permissions()]
        rule = ["on", ">secret", "~q:tasks*", *allowed]
        client.execute_command("ACL", "SETUSER", "small", *rule)
    return server, server.url.replace("unix://", "unix://small:secret@")


def test_the_permissions_are_the_commands_that_the_scripts_name(server: Server) -> None:
    """None is missing and none is too many: each command of the server that stands in a script."""
    text = SOURCES["worker.py"] + SOURCES["replay.py"]
    quoted = re.findall(r'"([A-Z]{3,})(?: [^"]*)?"', text)
    called = re.findall(r"p?call\('([A-Z]+)'", text)
    with server.client() as client:
        known = {name.upper() for name in client.command()}
    assert permissions() == (set(quoted) | set(called)) & known


def test_the_permissions_in_the_readme_are_enough(
    small_user: tuple[Server, str],
    worker: Callable[..., Process],
    run: Callable[..., Process],
    handler: Callable[[str], Path],
) -> None:
    """Work, retry, death, fall, adoption, replay and every look, by a user who may do no more."""
    server, url = small_user
    handler("def process(msg):\n    if msg['kind'] == 'bad': raise ValueError('no')\n")
    with server.client() as client:
        client.lpush("q:tasks", *['{"kind": "ok"}'] * 3, *['{"kind": "bad"}'] * 4)
        client.hset("q:tasks:running", mapping={"7": '{"kind": "ok"}', "8": '{"kind": "ok"}'})
        client.zadd("q:tasks:leases", {"7 gone": 1})
        flags = ("--base", 0.01, "--lease", 1, "--max-attempts", 2)
        process = worker(*flags, REDIS_URL=url)
        until(lambda: client.hget("q:tasks:stats", "done") == b"4", saw=lambda: process)
        until(lambda: client.llen("q:tasks:dlq") == 4, saw=lambda: process)
        until(lambda: client.zcard("q:tasks:leases") == 1, saw=lambda: process)
        assert "had no lease" in process.err
        client.delete("q:tasks:running", "q:tasks:leases")
        assert process.stop() == 0, process
        assert client.llen("q:tasks:dlq") == 4
        [example] = {json.loads(x)["reason"] for x in client.lrange("q:tasks:dlq", 0, -1)}
        assert example == "exhausted"
        for command in (
            ["--list"], ["--show"], ["--group"], ["--status"], ["--prometheus"], ["--check"],
            ["--health"], ["--kind", "bad", "--dry-run"], [], ["--limit", 1],
            ["--discard", "--limit", 1, "--yes", "--file", "f"], ["--restore", "f"],
            ["--pause"], ["--resume"], ["--kind", "bad", "--limit", 1], ["--cancel", 1],
        ):  # fmt: skip
            process = run("replay.py", *command, REDIS_URL=url)
            code = process.wait()
            expected = 1 if command[0:1] in (["--check"], ["--health"], ["--cancel"]) else 0
            assert code in (0, expected) and "NOPERM" not in process.err, (command, process)
        assert client.llen("q:tasks:dlq") == 1
        assert client.llen("q:tasks") == 3
        refused = client.execute_command("ACL", "LOG")
        assert refused == []


def test_a_permission_that_is_missing_is_named_at_the_start(
    small_user: tuple[Server, str], worker: Callable[..., Process]
) -> None:
    server, url = small_user
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "small", "-zadd")
    process = worker("--burst", REDIS_URL=url)
    assert process.wait() == 2
    assert "zadd" in process.err.lower()


# --- Figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["storm.svg", "spread.svg"])
def test_each_figure_is_shown_small_and_for_light_and_dark_pages(name: str) -> None:
    assert f"](docs/{name})" in README
    text = (PROJECT / "docs" / name).read_text()
    assert text.startswith("<svg ") and text.endswith("</svg>\n")
    assert "prefers-color-scheme: dark" in text and "<title>" in text
    assert os.path.getsize(PROJECT / "docs" / name) < 50_000
