#!/usr/bin/env python3
"""Draws a real run: when 1,000 messages that failed together are due again, in docs/spread.svg.

    make spread

A private Redis, worker.py with four hands, and 1,000 messages that have failed three times already
(a producer may say so): their next wait is at most 8 s. The handler raises. Redis's MONITOR shows
each `ZADD q:tasks:retry <due>` and when it came: that is the figure.

"Without jitter" is the same worker with a handler of one line more, which replaces the draw by its
ceiling; there is no option for that, since nobody should want it. Nothing else is altered and
nothing is simulated, so each drawing differs a little from the last.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from processes import PROJECT, Process, until
from server import Server

sys.path.insert(0, str(PROJECT))
from backoff import STYLE

MESSAGES = 1_000
FAILED = 3  # times before
HANDLER = 'def process(msg):\n    raise ConnectionError("the server is down")\n'
CEILING = "import backoff\nbackoff.draw = lambda n, base, cap, rng: backoff.ceiling(n, base, cap)\n"
HANDLERS = {"without jitter": CEILING + HANDLER, "full jitter": HANDLER}
COLUMN = 0.2  # seconds


class Run(NamedTuple):
    """When each message failed and when it is due, in seconds after the first failure."""

    failed: list[float]
    due: list[float]


def fail_together(handler: str, messages: int = MESSAGES) -> Run:
    """Lets all messages fail once more, for real."""
    seen: list[tuple[int, int]] = []  # ms, the server's clock
    with tempfile.TemporaryDirectory(prefix="qr-spread-") as name:
        folder = Path(name)
        (folder / "taskproc.py").write_text(handler)
        with Server(folder / "server") as server, server.client() as client:
            for n in range(messages):
                client.lpush("q:tasks", json.dumps({"kind": "mail", "n": n, "attempts": FAILED}))
            environment = {"REDIS_URL": server.url, "QR_APP_DIR": folder, "QR_DIR": folder}
            command = [PROJECT / "worker.py", "--concurrency", 4]
            with client.monitor() as monitor:
                worker = Process(command, folder / "streams", environment)
                try:
                    again = f"attempts={FAILED + 1} "
                    until(lambda: worker.out.count(again) >= messages, saw=lambda: worker)
                    for said in monitor.listen():  # only now: reading it costs more than the run
                        added = re.match(r"ZADD q:tasks:retry (\d+) (.*)", said["command"])
                        if added and f'"attempts": {FAILED + 1}' in added[2].replace("\\", ""):
                            seen.append((int(said["time"] * 1000), int(added[1])))
                        if len(seen) == messages:
                            break
                finally:
                    worker.end()
    start = min(at for at, _ in seen)
    return Run([(at - start) / 1000 for at, _ in seen], [(due - start) / 1000 for _, due in seen])


def columns(moments: Sequence[float]) -> Counter[int]:
    """How many there are in each column, by the column's number."""
    return Counter(int(moment / COLUMN) for moment in moments)


# --- The drawing: each column's height is a number of messages, on one linear scale ---------------

LEFT, WIDE, TOP, PANEL, HIGH = 220, 72, 96, 170, 140  # pixels; a second is 72 wide
SECONDS = 10


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}" class="{kind}"/>'


def bars(moments: Sequence[float], floor: float, most: int, kind: str) -> str:
    """One path: a bar for each column that has any."""
    parts = []
    for number, count in sorted(columns(moments).items()):
        x, height = LEFT + number * COLUMN * WIDE, max(2.0, HIGH * count / most)
        parts.append(f"M{x:.1f} {floor:.1f}v-{height:.1f}h{COLUMN * WIDE - 2:.1f}v{height:.1f}z")
    return f'<path d="{"".join(parts)}" class="{kind}"/>'


def figure(runs: dict[str, Run]) -> list[str]:
    """The runs as an SVG document, for light and dark pages."""
    bottom, right = TOP + PANEL * len(runs), LEFT + WIDE * SECONDS
    most = max(max(columns(run.due + run.failed).values()) for run in runs.values())
    count = len(runs["full jitter"].due)
    title = f"{count:,} messages fail together: when they are due again"
    told = (
        f"A real run of worker.py; each was its failure number {FAILED + 1}: the wait is at most "
        f"{2**FAILED} s. Height: messages per {COLUMN:g} s."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 {bottom + 40}" role="img">',
        f"<title>{title}, with jitter and without</title>",
        f"<style>\n{STYLE}\n</style>",
        '<rect width="100%" height="100%" rx="8" class="paper"/>',
        text(24, 40, title, "strong large"),
        text(24, 64, told),
        f'<rect x="{right - 132}" y="55" width="10" height="10" class="refused"/>',
        text(right - 117, 64, "fail"),
        f'<rect x="{right - 78}" y="55" width="10" height="10" class="served"/>',
        text(right - 63, 64, "due again"),
    ]
    for second in range(SECONDS + 1):
        x = LEFT + WIDE * second
        parts += [line(x, TOP, x, bottom, "line"), text(x, bottom + 18, f"{second} s", "mid")]
    for number, (name, run) in enumerate(runs.items(), 1):
        floor, fullest = TOP + PANEL * number - 6, max(columns(run.due).values())
        parts += [
            text(24, floor - 64, name, "strong"),
            text(24, floor - 44, f"in the fullest {COLUMN:g} s: {fullest}"),
            text(LEFT - 6, floor - HIGH + 4, f"{most}", "end small"),
            line(LEFT, floor, right, floor, "line"),
            line(LEFT, floor - HIGH, right, floor - HIGH, "limit"),
            bars(run.failed, floor, most, "refused"),
            bars(run.due, floor, most, "served"),
        ]
    return [*parts, "</svg>"]


def main() -> int:
    runs = {name: fail_together(handler) for name, handler in HANDLERS.items()}
    file = PROJECT / "docs" / "spread.svg"
    file.write_text("\n".join(figure(runs)) + "\n")
    for name, run in runs.items():
        fullest = max(columns(run.due).values())
        print(
            f"{name + ':':16}failed within {max(run.failed):.1f} s, due within "
            f"{min(run.due):.1f} to {max(run.due):.1f} s, {fullest} in the fullest {COLUMN:g} s"
        )
    print(f"wrote {file.relative_to(PROJECT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
