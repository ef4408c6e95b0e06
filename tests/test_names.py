"""Before backoff.py has any work: an old Python is told so, in a process of its own."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backoff

SCRIPT = Path(backoff.__file__)


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
