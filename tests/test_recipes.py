"""The recipes do what they say, as far as a machine without Docker and Kubernetes can tell."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import redis
from processes import PROJECT, Process, clean_environment, until
from server import Server

from worker import OPTIONS

RECIPES = (PROJECT / "docs" / "recipes.md").read_text()
SCRIPTS = ("worker.py", "replay.py", "backoff.py", "taskproc.py")
GRACE = next(float(option.default or 0) for option in OPTIONS if option.name == "grace")


def recipe(heading: str) -> str:
    """A chapter of the recipes."""
    return re.split(r"^## ", RECIPES.split(f"\n## {heading}\n", 1)[1], flags=re.MULTILINE)[0]


def blocks(heading: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", recipe(heading), re.MULTILINE | re.DOTALL)
    assert found, f"no {language} in {heading}"
    return list(found)


def shell(command: str, folder: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, `python` being ours."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    if not (tools / "python").exists():
        (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tools / "python").chmod(0o755)
    environment = clean_environment(settings)
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )


# --- Supervisors ----------------------------------------------------------------------------------


def test_the_systemd_unit_is_one_and_waits_longer_than_the_grace(tmp_path: Path) -> None:
    [unit] = blocks("systemd", "ini")
    facts = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    assert float(facts["TimeoutStopSec"]) > GRACE + 5
    assert facts["KillMode"] == "mixed"
    assert facts["RestartPreventExitStatus"] == "2 3"
    if shutil.which("systemd-analyze"):
        (tmp_path / "worker.env").touch()
        for old, new in {
            "/srv/app/.venv/bin/python": sys.executable,
            "/srv/app": str(PROJECT),
            "/etc/worker.env": str(tmp_path / "worker.env"),
            "User=worker": "User=root",
        }.items():
            unit = unit.replace(old, new)
        path = tmp_path / "worker.service"
        path.write_text(unit)
        said = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        assert str(path) not in said.stderr, said.stderr


def test_the_container_starts_the_worker_itself_and_not_a_shell() -> None:
    """In brackets, so that the foreman is PID 1 and hears the signal; with files that exist."""
    [dockerfile] = blocks("Docker", "dockerfile")
    assert 'ENTRYPOINT ["python", "worker.py"]' in dockerfile
    [copied] = re.findall(r"^COPY (.*) \./$", dockerfile, re.MULTILINE)
    assert sorted(copied.split()) == sorted(SCRIPTS)
    requirements = (PROJECT / "requirements.txt").read_text()
    [pinned] = re.findall(r"redis==[\d.]+", dockerfile)
    assert pinned in requirements
    [seconds] = re.findall(r"--stop-timeout (\d+)", recipe("Docker"))
    assert float(seconds) > GRACE + 5
    [seconds] = re.findall(r"terminationGracePeriodSeconds: (\d+)", recipe("Kubernetes"))
    assert float(seconds) > GRACE + 5


def test_the_probe_of_docker_and_kubernetes_is_red_only_if_a_loop_stands_still(
    tmp_path: Path, server: Server, redis_client: redis.Redis
) -> None:
    [docker] = re.findall(r"^HEALTHCHECK .* CMD (.*)$", recipe("Docker"), re.MULTILINE)
    [kubernetes] = re.findall(r'command: \[sh, -c, "(.*)"\]', recipe("Kubernetes"))
    assert docker == kubernetes
    for name in SCRIPTS:
        shutil.copy(PROJECT / name, tmp_path)
    assert shell(docker, tmp_path, REDIS_URL=server.url).returncode == 0
    away = shell(docker, tmp_path, REDIS_URL="redis://127.0.0.1:1/0")
    assert "does not answer" in away.stderr and away.returncode == 0
    redis_client.lpush("q:tasks", '{"kind": "ok"}')
    assert shell(docker, tmp_path, REDIS_URL=server.url).returncode == 1


# --- A project of one's own -----------------------------------------------------------------------


def test_the_scripts_work_from_a_folder_of_another_project(
    tmp_path: Path, run: Callable[..., Process], redis_client: redis.Redis
) -> None:
    """What the table says of the names: `worker` is theirs if they have one, `backoff` ours."""
    folder, shop = tmp_path / "queue_scripts", tmp_path / "shop"
    folder.mkdir()
    shop.mkdir()
    for name in ("worker.py", "replay.py", "backoff.py"):
        shutil.copy(PROJECT / name, folder)
    (shop / "jobs.py").write_text(
        "import backoff, worker\n"
        "def handle(msg):\n"
        "    for module in (backoff, worker): print(module.__file__)\n"
    )
    (tmp_path / "worker.py").write_text("")
    redis_client.lpush("q:tasks", '{"kind": "ok"}')
    [command] = [line for line in blocks("In a project of yours", "sh")[0].splitlines()
                 if line.startswith("python ")]  # fmt: skip
    script, *flags = command.split()[1:]
    assert script == "queue_scripts/worker.py"
    process = run(tmp_path / script, *flags, "--burst", cwd=tmp_path, QR_APP_DIR=None)
    assert process.wait() == 0, process
    theirs = str(tmp_path / "worker.py")
    assert process.out.split() == [str(folder / "backoff.py"), theirs]


# --- Pushing, testing -----------------------------------------------------------------------------

MAIL = {"kind": "mail", "to": 42}


def test_the_python_that_pushes_does(
    tmp_path: Path, server: Server, redis_client: redis.Redis
) -> None:
    [source] = blocks("Pushing, from any language", "python")
    (tmp_path / "push.py").write_text(source)
    said = shell("python push.py", tmp_path, REDIS_URL=server.url)
    assert said.returncode == 0, said.stderr
    assert redis_client.lrange("q:tasks", 0, -1) == [b'{"kind": "mail", "to": 42}']


def test_the_tests_of_a_handler_pass_on_the_example(tmp_path: Path) -> None:
    [source] = blocks("Testing a handler", "python")
    (tmp_path / "test_taskproc.py").write_text(source)
    for name in ("taskproc.py", "backoff.py"):
        shutil.copy(PROJECT / name, tmp_path)
    said = shell("python -m pytest -q -p no:valkey -p no:cacheprovider .", tmp_path)
    assert said.returncode == 0, said.stdout
    assert "2 passed" in said.stdout


def test_the_whole_way_of_a_test_ends_by_itself(
    tmp_path: Path, server: Server, redis_client: redis.Redis
) -> None:
    lines = blocks("Testing a handler", "sh")[0].splitlines()
    push, *commands = lines
    assert push.startswith("redis-cli LPUSH q:test ")
    redis_client.lpush("q:test", push.split("'")[1])
    for name in SCRIPTS:
        shutil.copy(PROJECT / name, tmp_path)
    said = [shell(command, tmp_path, REDIS_URL=server.url) for command in commands]
    assert said[0].returncode == 0 and "done kind=flaky" in said[0].stdout, said[0]
    assert said[1].returncode == 0, said[1]
    assert not redis_client.exists("q:test", "q:test:running", "q:test:retry", "q:test:dlq")


def test_log_lines_as_json_have_the_members_that_are_shown(
    worker: Callable[..., Process], redis_client: redis.Redis, qr_dir: Path
) -> None:
    shown = [json.loads(x) for x in blocks("Log lines as JSON", "console")[0].splitlines()[1:]]
    redis_client.lpush("q:tasks", '{"kind": "bad"}')
    process = worker("--log", "json", "--base", 0.01)
    until(lambda: '"dead"' in process.err, saw=lambda: process)
    assert process.stop(signal.SIGTERM) == 0
    retries = [json.loads(line) for line in process.out.splitlines()]
    log = [json.loads(line) for line in process.err.splitlines()]
    [dead] = [line for line in log if line["event"] == "dead"]
    assert list(shown[0]) == list(log[0])
    assert {line["event"] for line in retries} == {"retry"}
    assert all(list(line) == list(shown[2]) for line in retries)
    assert list(shown[3]) == list(dead)
    assert (qr_dir / "requeue.out").read_text().startswith("attempts=1 ")
