"""What the lab, the grade and the comparison print fits the terminal, narrow ones too."""

from __future__ import annotations

import grade
import pytest
from compare import WIDTHS as COMPARED
from lab import WIDTHS, fitted, row

LONG = 'attempts=2 kind=bad token=1796102735268655 error="ValueError: bad message (taskproc.py:55)"'


@pytest.mark.parametrize("widths", [WIDTHS, grade.WIDTHS, COMPARED])
@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_row_fits_the_terminal(
    widths: tuple[int, ...],
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is cut: all the words are there, whichever the width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    row("2", LONG, LONG, "pass", widths=widths)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    left = slice(widths[0] + 2, widths[0] + 2 + fitted(widths)[1])
    assert "".join(line[left] for line in lines).replace(" ", "") == LONG.replace(" ", "")


def test_a_wide_terminal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert fitted(WIDTHS) == WIDTHS
