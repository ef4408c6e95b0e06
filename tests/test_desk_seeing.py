"""What the desk shows on a real terminal of 80 columns and 24 lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from letters import DLQ, desk, envelope
from processes import PROJECT, Process
from server import Server
from test_desk import on_terminal

import replay
from worker import VERSION, Queue

STYLE = re.compile("\x1b\\[[0-9;]*m")


def screen(shown: str) -> list[str]:
    """The lines that are left on a terminal that knows carriage return and "clear to the end"."""
    lines, at = [""], 0
    for part in re.findall("\x1b\\[K|\r|\n|.", STYLE.sub("", shown)):
        if part == "\x1b[K":
            lines[-1] = lines[-1][:at]
        elif part == "\r":
            at = 0
        elif part == "\n":
            lines.append("")
            at = 0
        else:
            lines[-1] = lines[-1][:at] + part + lines[-1][at + 1 :]
            at += 1
    return lines if lines[-1] else lines[:-1]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("abc", 3),
        ("翻訳", 4),
        ("\uff46\uff55\uff4c\uff4c", 8),
        ("e\u0301té", 3),
        ("👍", 2),
        ("❤\ufe0f", 2),
        ("⌚\ufe0f", 2),
        ("🇩🇪", 2),
        ("한국", 4),
        ("ไทย", 3),
        ("नमस्ते", 4),
        ("", 0),
    ],
)
def test_a_text_is_as_wide_as_a_terminal_shows_it(text: str, columns: int) -> None:
    assert replay.width(text) == columns


def test_tables_are_aligned_and_no_row_wraps_whatever_the_script(
    server: Server, redis_client: redis.Redis
) -> None:
    kinds = ["翻訳", "cafe\u0301", "👍👍", "ไทย", "plain"]
    for kind in kinds:
        redis_client.lpush(DLQ, envelope({"kind": kind}, error=f"E: {kind * 60}"))
    for look in ("--list", "--group"):
        shown, code = on_terminal(server, look)
        head, *rows = [line for line in screen(shown) if not line.startswith("replay: ")]
        assert code == 0 and len(rows) == 5
        assert max(map(replay.width, rows)) <= 80
        assert all(row.endswith("…") for row in rows if "plain" not in row)
        at = head.index("ERROR")
        for row in rows:
            [error] = re.findall(" E: .*", row)
            assert replay.width(row.removesuffix(error)) + 1 == at, row


def test_what_escapes_mean_is_shown_and_commands_nothing(
    server: Server, redis_client: redis.Redis
) -> None:
    payload = (
        '{"a": "\\u7ffb\\u8a33", "b": "\\ud83d\\udc4d", "c": "x\\u202ey\\u001b[31m\\u0007\\n",'
        ' "d": "\\\\u7ffb", "e": "\\u0022\\u005c", "f": "\\ud83d", "g": ["\\u00e9", 1.10]}'
    )
    redis_client.lpush(DLQ, envelope(payload, stage={"at": "翻訳 \u202e"}))
    lines = [line.strip() for line in desk(server, "--show").out.splitlines()]
    for line in (
        'a: "翻訳"',
        'b: "👍"',
        r'c: "x\u202ey\u001b[31m\u0007\n"',
        r'd: "\\u7ffb"',
        r'e: "\u0022\u005c"',
        r'f: "\ud83d"',
        'g: ["é", 1.10]',
    ):
        assert line in lines, line
    assert any(line.startswith("stage ") and r"翻訳 \u202e" in line for line in lines)


def test_the_watched_status_fits_the_screen_with_the_counts_on_it(
    server: Server, redis_client: redis.Redis, queue: Queue
) -> None:
    """One line per worker, however many hands; what does not fit is counted."""
    now = queue.now_ms()
    for worker in range(12):
        loops = ("foreman", *(f"hand{n}" for n in range(40)))
        moved = {f"host:{worker}:abcdef0123456789/{loop}": now for loop in loops}
        redis_client.zadd("q:tasks:workers", moved)
    for n in range(30):
        redis_client.hset("q:tasks:running", str(now * 1000 + n), '{"kind": "' + "翻" * 60 + '"}')
        redis_client.zadd("q:tasks:leases", {f"{now * 1000 + n} host:1:abcdef0123456789/7": now})
    redis_client.hset("q:tasks:stats", mapping={"done": 7, "retried": 3})
    shown, code = on_terminal(server, "--status", "--watch", "0.05", enough="(STATE.*){3}")
    frames = shown.split("\x1b[H\x1b[2J")[1:]
    assert code == 0 and len(frames) >= 3
    for frame in map(screen, frames[:3]):
        assert 20 < len(frame) <= 23 and max(map(replay.width, frame)) <= 80
        text = "\n".join(frame)
        assert re.search(r"^running +30 ", text, re.M) and re.search(r"^done +7 ", text, re.M)
        assert re.search(r"^host:11:abcdef0123456789 +40 ", text, re.M)
        assert re.fullmatch(r"… \d+ more lines: without --watch", frame[-1])
    whole, code = on_terminal(server, "--status")
    assert code == 0 and len(screen(whole)) > 24 and "more lines" not in whole


def test_progress_is_gone_before_the_receipt(server: Server, redis_client: redis.Redis) -> None:
    """On the terminal; a pipe sees none of it."""
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(40)), "junk")
    shown, code = on_terminal(server, "--all", "--rate", "30")
    assert " moved" in shown and code == 1
    first, receipt = screen(shown)
    assert first.startswith("replay: ") and "stays where it is" in first
    assert receipt.startswith("replayed 40; 1 left in place")


@pytest.mark.parametrize("there", [1, 20, 21, 1234])
def test_a_list_says_how_many_there_are(
    server: Server, redis_client: redis.Redis, there: int
) -> None:
    redis_client.lpush(DLQ, *(envelope({"n": n}) for n in range(there)))
    said = desk(server, "--list")
    assert f"letters in all: {there:,}" in said.err
    assert ("--page 2" in said.err) == (there > 20)
    assert desk(server, "--list", "--json").err == ""


def test_metrics_are_written_to_a_file_all_at_once(
    server: Server, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """What stood there stays until the new text is complete, and nothing else is left."""
    folder = tmp_path / "textfile"
    folder.mkdir()
    path = folder / "qr.prom"
    path.write_text("old")
    before = path.stat().st_ino
    assert desk(server, "--prometheus", "--file", path) == (0, "", "")
    assert path.stat().st_ino != before and path.stat().st_mode & 0o444 == 0o444
    assert path.read_text() == desk(server, "--prometheus").out
    assert list(folder.iterdir()) == [path]
    said = desk(server, "--prometheus", "--file", folder / "none" / "qr.prom")
    assert said.code == 2 and said.err.count("\n") == 1


def test_the_version_is_that_of_the_project(run: Callable[..., Process]) -> None:
    process = run("replay.py", "--version")
    assert process.wait() == 0 and process.out == f"replay.py {VERSION}\n"
    assert json.dumps(VERSION) in (PROJECT / "pyproject.toml").read_text()
