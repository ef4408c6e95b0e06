"""The naive queue loses what README says, and worker.py does not; the figure of a real run."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
import spread
from compare import BLOWS, Seen, Side, compare
from processes import PROJECT

README = (PROJECT / "README.md").read_text()


@pytest.mark.parametrize(
    "blow", [strike for _, _, strike in BLOWS], ids=[strike.__name__ for _, _, strike in BLOWS]
)
def test_the_naive_queue_fails_and_this_one_does_not(blow: Callable[[Side], Seen]) -> None:
    naive, ours = compare(blow)
    assert not naive.good, naive
    assert ours.good, ours


def test_the_readme_shows_the_naive_queue_and_what_it_loses() -> None:
    source = (PROJECT / "tests" / "naive.py").read_text()
    assert "```python\n" + source.split('"""\n\n', 1)[1] + "```" in README
    shown = re.search(r"\$ make naive\n(.*?)\n```", README, re.DOTALL)
    assert shown
    lines = [line.split()[0] for line in shown[1].splitlines()[1:] if not line.startswith(" ")]
    assert lines == [line for line, _, _ in BLOWS]
    for line in lines:
        assert line in source


def test_what_fails_together_is_due_together_without_jitter_and_spread_out_with_it() -> None:
    """A real run of fewer messages; and the figure of it is a document that a browser reads."""
    runs = {name: spread.fail_together(source, 200) for name, source in spread.HANDLERS.items()}
    for run in runs.values():
        assert len(run.failed) == len(run.due) == 200
    waits = [due - at for at, due in zip(*runs["without jitter"], strict=True)]
    assert max(waits) <= 8.001 and min(waits) > 7.9
    waits = [due - at for at, due in zip(*runs["full jitter"], strict=True)]
    assert max(waits) <= 8.001
    early = sum(wait < 4 for wait in waits)
    assert 50 < early < 150  # of 200; by chance once in 10**11
    ElementTree.fromstring("\n".join(spread.figure(runs)))


def test_the_figure_in_the_repository_is_one_that_make_spread_draws() -> None:
    """Its form; the numbers are those of one run."""
    root = ElementTree.parse(PROJECT / "docs" / "spread.svg").getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "1,000 messages fail together: when they are due again"
    fullest = [int(text.split(": ")[1]) for text in texts if text and text.startswith("in the")]
    without, jitter = fullest
    assert without > 5 * jitter
