"""Setting up: the Makefile's targets, finding a server, and `make lab` in every kind of folder.

Each test works in a copy of the project; none makes a virtual environment or needs the network.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import server as server_module
from lab import ENDINGS, PLACES, SCRIPTS
from processes import PROJECT, Process, clean_environment, until
from server import NoServer, Server, find_server

Run = Callable[..., Process]
DISCARD = Path("/dev/null/qr")  # a folder that not even root can make


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project: the four scripts, the Makefile, what is in tests/."""
    copy = tmp_path / "project"
    (copy / "tests").mkdir(parents=True)
    for path in [PROJECT / "Makefile", *(PROJECT / name for name in SCRIPTS)]:
        shutil.copy(path, copy)
    for path in (PROJECT / "tests").glob("*.py"):
        shutil.copy(path, copy / "tests")
    return copy


@pytest.fixture
def lab(run: Run, project: Path) -> Run:
    """A factory of walks in the copy, on a private server of their own but for REDIS_URL."""
    return lambda **settings: run(project / "tests/lab.py", **{"REDIS_URL": None, **settings})


def refused(walk: Process) -> str:
    """What a walk said that did not begin."""
    assert walk.wait() == 1
    assert "Traceback" not in walk.err, str(walk)
    assert "step" not in walk.out, str(walk)
    return walk.err


# --- The Makefile -------------------------------------------------------------------------------


def test_make_help_lists_every_target() -> None:
    """A target that nobody can find is a target that nobody uses."""
    rules = (PROJECT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.*)$", rules, re.M)[0].split()) - {"binary"}
    help_text = make("help", PROJECT).stdout
    assert {line.split()[1] for line in help_text.splitlines()} == phony
    assert make("", PROJECT).stdout == help_text, "plain `make` is the same list"


def test_a_python_that_is_too_old_is_told_so(project: Path, tmp_path: Path) -> None:
    """The first sentence that such a person sees says what to do."""
    old = tmp_path / "python-of-yesterday"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    shutil.copy(PROJECT / "requirements.txt", project)
    refusal = make("lab", project, f"PYTHON={old}")
    assert refusal.returncode == 2
    assert "Python 3.10 or newer is needed" in refusal.stdout


@pytest.mark.parametrize("script", ["worker.py", "replay.py"])
def test_a_python_without_the_package_redis_is_told_so(
    run: Run, tmp_path: Path, script: str
) -> None:
    """Exit code 2 and one sentence; the package is hidden by one that is not there either."""
    missing = "raise ModuleNotFoundError(\"No module named 'redis'\", name='redis')\n"
    (tmp_path / "redis.py").write_text(missing)
    process = run(script, PYTHONPATH=tmp_path)
    assert process.wait() == 2, process
    [line] = process.err.splitlines()
    assert line.startswith(f"{script.removesuffix('.py')}: {sys.executable}")
    assert re.search(r"(no package redis|No module named 'redis').*pip install.* redis", line)


def make(target: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *target.split(), *flags]
    return subprocess.run(
        command, cwd=folder, env=clean_environment({}), capture_output=True, text=True
    )


# --- Servers ------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SERVER", "/no/such/server")
    with pytest.raises(NoServer, match="REDIS_SERVER=/no/such/server"):
        find_server()


def test_without_any_server_one_is_told_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server older than 6.0 is passed over, and said to be."""
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=5.0.14 sha=00000000:0\n")
    old.chmod(0o755)
    monkeypatch.delenv("REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_module, "packaged_server", lambda: None)
    with pytest.raises(NoServer, match=r"(?s)redis-server is older than 6\.0.*brew install redis"):
        find_server()


def test_a_server_keeps_its_data_only_if_asked(start_server: Callable[..., Server]) -> None:
    for append_only, kept in ((True, b"1"), (False, None)):
        server = start_server(append_only=append_only)
        server.client().set("key", 1)
        server.kill()
        server.start()
        assert server.client().get("key") == kept


def test_what_was_started_ends_with_the_process_that_started_it(run: Run, tmp_path: Path) -> None:
    """Even `kill -9` of a test run leaves no server and no worker behind, nor the socket."""
    owner = tmp_path / "owner.py"
    owner.write_text(
        f"import pathlib, signal, sys; sys.path.insert(0, {str(PROJECT / 'tests')!r})\n"
        "from processes import Process; from server import Server\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "server = Server(here / 'data').start()\n"
        "process = Process(['-c', 'import signal; signal.pause()'], here, {})\n"
        "print(server.socket, server.pid, process.pid, flush=True); signal.pause()\n"
    )
    process = run(owner)
    path, *pids = until(lambda: process.out.split(), saw=lambda: process)
    assert Path(path).is_socket() and all(alive(int(pid)) for pid in pids)
    process.end()
    until(lambda: not Path(path).parent.exists() and not any(alive(int(pid)) for pid in pids))


def alive(pid: int) -> bool:
    """A process of that number runs; a dead one that nobody has waited for does not count."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()[:1] not in "Z"


def test_make_redis_leaves_a_taken_port_alone(run: Run, project: Path) -> None:
    """Whoever listens on 6379, it is not ours to disturb; the learner gets another address."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", 6379))
            other.listen()
        except OSError:
            pass  # somebody listens there already, which is the same to us
        ours = run(project / "tests/server.py")
        until(lambda: "export REDIS_URL=" in ours.out, saw=lambda: ours)
        url = re.findall(r"export REDIS_URL=(\S+)", ours.out)[0]
        with redis.Redis.from_url(url) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        second = run(project / "tests/server.py")
        assert second.wait() == 1 and "another `make redis` runs" in second.err
        assert ours.stop() == 0, str(ours)


# --- The lab ------------------------------------------------------------------------------------


def test_the_lab_passes_where_only_its_own_folder_can_be_written(lab: Run, project: Path) -> None:
    """The whole walk, for real, on a machine that allows nothing: ./lab is used, and it says so."""
    walk = lab(QR_DIR=DISCARD, QR_APP_DIR=DISCARD)
    assert walk.wait(180) == 0, str(walk)
    assert f"{DISCARD} cannot be written, so this walk uses {project / 'lab'}" in walk.out
    assert len(re.findall(r"^[1-8] .* pass$", walk.out, re.M)) == 8, str(walk)
    assert len(re.findall(r" pass$", walk.out, re.M)) == 8 + len(ENDINGS), str(walk)
    assert (project / "lab/capped.txt").exists()
    assert not list((project / ".redis").iterdir()), "the private server left something"


def test_the_lab_never_overwrites_a_script_of_somebody_else(lab: Run, qr_dir: Path) -> None:
    """Not even if only one of the four is theirs; and then none of the four is written."""
    (qr_dir / "worker.py").write_text("print('mine')\n")
    assert "worker.py of your own; nothing was changed" in refused(lab())
    assert [path.name for path in qr_dir.iterdir()] == ["worker.py"]
    assert (qr_dir / "worker.py").read_text() == "print('mine')\n"


def test_a_script_of_ours_that_was_edited_is_somebody_elses(
    installed: Callable[[], str], qr_dir: Path, project: Path
) -> None:
    """Ours is what we wrote down that we wrote; a newer version replaces that and nothing else."""
    installed()
    with (project / "worker.py").open("a") as newer:
        newer.write("# a newer version\n")
    installed()
    assert (qr_dir / "worker.py").read_bytes() == (project / "worker.py").read_bytes()
    with (qr_dir / "worker.py").open("a") as edited:
        edited.write("# mine now\n")
    assert "worker.py of your own" in installed()
    assert (qr_dir / "worker.py").read_text().endswith("# mine now\n")


def test_force_replaces_and_keeps_what_was_there(
    installed: Callable[..., str], qr_dir: Path
) -> None:
    for number, text in enumerate(("first", "second")):
        (qr_dir / "worker.py").write_text(text)
        installed(FORCE=1)
        assert (qr_dir / f"worker.py.bak{number or ''}").read_text() == text
    assert (qr_dir / "worker.py").read_bytes() == (PROJECT / "worker.py").read_bytes()


def test_a_checkout_that_is_the_folder_is_left_as_it_is(
    installed: Callable[..., str], project: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in project.glob("*.py")}
    assert "already" in installed(QR_DIR=project)
    assert before == {path: path.stat().st_mtime_ns for path in project.glob("*.py")}


def test_a_handler_that_is_there_is_never_touched(
    installed: Callable[..., str], app_dir: Path
) -> None:
    (app_dir / "taskproc.py").write_text("def process(msg): return 'mine'\n")
    installed(FORCE=1)
    assert (app_dir / "taskproc.py").read_text() == "def process(msg): return 'mine'\n"


def test_a_handler_is_installed_where_none_is(installed: Callable[..., str], app_dir: Path) -> None:
    installed()
    assert (app_dir / "taskproc.py").read_bytes() == (PROJECT / "taskproc.py").read_bytes()


@pytest.mark.parametrize("key", ["q:tasks", "q:tasks:next", "q:tasks:dlq"])
def test_the_lab_does_not_begin_on_a_queue_in_use(
    lab: Run, redis_client: redis.Redis, server: Server, key: str
) -> None:
    """A Redis that was pointed to is somebody's: what is in its queue stays."""
    redis_client.lpush(key, "precious")
    assert f"has something in {key}" in refused(lab(REDIS_URL=server.url))
    assert redis_client.lrange(key, 0, -1) == [b"precious"]


def test_the_lab_takes_back_what_it_pushed(
    lab: Run, redis_client: redis.Redis, server: Server, handler: Callable[[str], Path]
) -> None:
    """After a walk on a Redis and with a handler of yours, nothing of the walk is on the queue."""
    handler("def process(msg):\n    if msg['kind'] == 'bad':\n        raise KeyError('yours')\n")
    walk = lab(REDIS_URL=server.url)
    assert walk.wait(180) == 0, str(walk)
    assert "KeyError: 'yours'" in walk.out and "The second act needs our taskproc.py" in walk.out
    assert set(redis_client.keys()) <= {b"q:tasks:stats", b"q:tasks:fence"}


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_a_walk_that_fails_takes_back_what_it_pushed_all_the_same(
    lab: Run, redis_client: redis.Redis, server: Server, handler: Callable[[str], Path], number: str
) -> None:
    """Its messages are retrying or running, for each stopped or killed its worker in mid-run."""
    handler(
        "import os, signal, time\nforeman = os.getppid()\ndef process(msg):\n"
        f"    os.kill(foreman, signal.{number})\n    time.sleep(0.7)\n"
        f"    os.kill(foreman, signal.{number})\n    time.sleep(600)\n"
    )
    walk = lab(REDIS_URL=server.url)
    until(lambda: redis_client.exists("q:tasks:running", "q:tasks:retry"), saw=lambda: walk)
    assert walk.wait(180) == 1, str(walk)
    assert not redis_client.exists(*PLACES, "q:tasks:notes")


def test_a_redis_that_does_not_answer_is_an_error_without_its_password(lab: Run) -> None:
    said = refused(lab(REDIS_URL="redis://:s3cret@127.0.0.1:1/0"))
    assert "cannot be used" in said and "s3cret" not in said


@pytest.fixture
def installed(lab: Run) -> Callable[..., str]:
    """Installs and goes no further, for the Redis does not answer; returns all that was said."""

    def install(**settings: object) -> str:
        walk = lab(**{"REDIS_URL": "redis://127.0.0.1:1/0", **settings})
        return refused(walk) + walk.out

    return install


def test_no_test_runs_with_the_settings_of_the_developer() -> None:
    """REDIS_URL and QR_* of the terminal that runs the tests reach neither them nor the scripts."""
    seen = subprocess.run(
        [sys.executable, "-c", "import os; print(*os.environ)"],
        env=clean_environment({"QR_DIR": "x"}),
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [name for name in seen if name.startswith(("REDIS_URL", "QR_"))] == ["QR_DIR"]
