"""Two things that happen before backoff.py has any work: an old Python is told so, and the package
of the same name from PyPI is found although this file hides it. Each in a process of its own."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backoff

SCRIPT = Path(backoff.__file__)

# The shape of PyPI's package: its own modules imported by absolute names, siblings from the package
# while that is still being imported, a module that nobody imports unasked.
PACKAGE = {
    "__init__.py": """\
print("their __init__ runs")
from backoff._decorator import on_exception
from backoff._wait import expo, full_jitter
__all__ = ["on_exception", "expo", "full_jitter"]
__version__ = "2.2.1"
draw = PermanentError = "theirs"
""",
    "_decorator.py": "from backoff import _sync\ndef on_exception(): return _sync.retry()\n",
    "_sync.py": "from backoff._wait import expo\ndef retry(): return expo()\n",
    "_wait.py": "def expo(): return 'theirs'\nfull_jitter = expo\n",
    "types.py": "Details = 'theirs'\n",
}


def package(folder: Path, **files: str) -> Path:
    """A folder for sys.path with the package in it."""
    (folder / "backoff").mkdir(parents=True)
    for name, text in (PACKAGE | {f"{name}.py": text for name, text in files.items()}).items():
        (folder / "backoff" / name).write_text(text)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A place like site-packages, with PyPI's backoff in it."""
    return package(tmp_path / "site")


def python(code: str, *path: Path) -> "subprocess.CompletedProcess[str]":
    """Runs code with our folder first on sys.path, as it is for worker.py, then these."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SCRIPT.parent, *path)))},
        check=False,
        timeout=60,
    )


def said(code: str, *path: Path) -> str:
    done = python(code, *path)
    assert done.stderr == ""
    return done.stdout


# ---- The package of the same name ---------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import backoff; print(backoff.on_exception())",
        "import backoff; print(backoff.full_jitter())",
        "from backoff import expo; print(expo())",
        "from backoff import PermanentError, on_exception; print(on_exception())",
        "import backoff; backoff.on_exception; import backoff._sync; print(backoff._sync.retry())",
    ],
)
def test_their_names_are_found_behind_ours(code: str, site: Path) -> None:
    assert said(code, site) == "their __init__ runs\ntheirs\n"


@pytest.mark.parametrize(
    "code",
    [
        "import backoff._decorator; print(backoff._decorator.on_exception())",
        "from backoff._decorator import on_exception; print(on_exception())",
        "from backoff.types import Details; print(Details)",
        "import backoff.types as types; print(types.Details)",
    ],
)
def test_their_modules_are_found_behind_ours(code: str, site: Path) -> None:
    assert said(code, site).splitlines()[-1] == "theirs"


def test_their_version_is_known_and_their_init_runs_once(site: Path) -> None:
    code = "import backoff as b; print(b.__version__, b.expo is b.expo, b.expo is b._wait.expo)"
    assert said(code, site) == "their __init__ runs\n2.2.1 True True\n"


def test_what_both_have_is_ours_and_runs_nothing_of_theirs(site: Path) -> None:
    code = (
        "import sys, backoff; from backoff import PermanentError, Policy, draw; "
        "print(PermanentError.retryable, draw(3) <= 8, Policy.__module__, backoff.__file__); "
        "print([name for name in sys.modules if name.startswith('backoff')])"
    )
    assert said(code, site) == f"False True backoff {SCRIPT}\n['backoff']\n"
    code = "import backoff; backoff.expo; from backoff import PermanentError as p; print(p)"
    assert "class 'backoff.PermanentError'" in said(code, site)


@pytest.mark.parametrize("name", ["__wrapped__", "__all__", "__signature__", "__warningregistry__"])
def test_tools_that_ask_for_special_names_run_nothing_of_theirs(name: str, site: Path) -> None:
    assert said(f"import backoff; print(hasattr(backoff, {name!r}))", site) == "False\n"


def test_a_name_that_nobody_has_is_the_usual_error(site: Path) -> None:
    for path in ([], [site]):
        wrong = python("import backoff; backoff.Polcy", *path)
        assert "\nAttributeError: module 'backoff' has no attribute 'Polcy'" in wrong.stderr
        wrong = python("from backoff import Polcy", *path)
        assert f"ImportError: cannot import name 'Polcy' from 'backoff' ({SCRIPT})" in wrong.stderr
        wrong = python("import backoff.polcy", *path)
        assert "ModuleNotFoundError: No module named 'backoff.polcy'" in wrong.stderr


def test_without_their_package_there_is_only_ours() -> None:
    code = "import backoff; print(hasattr(backoff, '__path__'), hasattr(backoff, 'on_exception'))"
    assert said(code) == "False False\n"
    assert "'backoff' is not a package" in python("import backoff._decorator").stderr


def test_copies_of_ours_and_folders_of_that_name_are_passed_over(
    tmp_path: Path, site: Path
) -> None:
    """Law: only a package is theirs: no file, and no folder that merely has the name."""
    copy, folder = tmp_path / "copy", tmp_path / "folder"
    copy.mkdir()
    (copy / "backoff.py").write_bytes(SCRIPT.read_bytes())
    (folder / "backoff").mkdir(parents=True)
    code = "import backoff; print(backoff.__file__, hasattr(backoff, 'expo'))"
    assert said(code, copy, folder) == f"{SCRIPT} False\n"
    assert said(code, copy, folder, site) == f"their __init__ runs\n{SCRIPT} True\n"


def test_a_package_that_appears_later_on_the_path_is_found(site: Path) -> None:
    code = (
        "import sys, backoff; print(hasattr(backoff, 'expo')); "
        f"sys.path.append({str(site)!r}); print(backoff.expo())"
    )
    assert said(code) == "False\ntheir __init__ runs\ntheirs\n"


def test_a_broken_package_says_what_is_broken_each_time(tmp_path: Path) -> None:
    broken = package(tmp_path / "broken", __init__="import nowhere_to_be_found")
    code = """
import backoff
for _ in range(2):
    try:
        backoff.on_exception
    except ImportError as error:
        print(error)
"""
    assert said(code, broken) == "No module named 'nowhere_to_be_found'\n" * 2


def test_two_threads_that_ask_at_once_both_get_it(tmp_path: Path) -> None:
    slow = "import time; time.sleep(0.2)\n" + PACKAGE["__init__.py"]
    code = """
import backoff, threading
found = []
threads = [threading.Thread(target=lambda: found.append(backoff.expo())) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found)
"""
    expected = f"their __init__ runs\n{['theirs'] * 4}\n"
    assert said(code, package(tmp_path / "slow", __init__=slow)) == expected


def test_another_name_for_our_file_has_nothing_of_theirs(site: Path) -> None:
    """Law: as the script itself, or as part of somebody's package, the file is only ours."""
    code = """
import importlib.util, runpy
for name in ("__main_", "lab.backoff"):
    names = runpy.run_path(FILE, run_name=name)
    try:
        names["__getattr__"]("expo")
    except AttributeError as error:
        print(error)
"""
    printed = said(code.replace("FILE", repr(str(SCRIPT))), site)
    assert printed.splitlines() == [
        "module '__main_' has no attribute 'expo'",
        "module 'lab.backoff' has no attribute 'expo'",
    ]


def test_no_module_of_theirs_has_the_name_of_something_of_ours() -> None:
    """Python sets an imported submodule as an attribute: it would take the place of ours."""
    for name in ("async", "common", "decorator", "jitter", "sync", "typing", "wait_gen"):
        assert f"_{name}" not in vars(backoff)
    assert "types" not in vars(backoff)


# ---- An old Python ----------------------------------------------------------------------------


def test_the_file_can_be_read_by_python_3_8() -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("runpy.run_path(FILE, run_name='__main__')", "backoff.py"),
        ("sys.argv = ['/root/qr/worker.py']; import backoff", "worker.py"),
        ("sys.argv = ['']; import backoff", "backoff.py"),
        ("import backoff", "backoff.py"),
    ],
)
def test_an_old_python_is_told_so_in_one_sentence(way: str, named: str) -> None:
    """Law: by the name of what was started, and before anything else can go wrong."""
    code = (
        "import os, runpy, sys; sys.version_info = (3, 8, 18, 'final', 0); "
        f"sys.modules['argparse'] = None; {way}"
    )
    done = python(code.replace("FILE", repr(str(SCRIPT))))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{named}: Python 3.10 or newer is needed, this is 3.8.18\n"


def test_only_what_every_python_has_is_imported_before_the_check() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    before: list[Any] = []
    for statement in tree.body[1:]:
        if isinstance(statement, ast.If):
            break
        before.append(ast.unparse(statement))
    assert before == ["from __future__ import annotations", "import os", "import sys"]
