"""`replay.py --prometheus` is read by the parser of the Prometheus project itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

from server import Server  # noqa: E402  it lies beside the main suite


@pytest.fixture
def server(tmp_path: Path) -> object:
    with Server(tmp_path / "server") as server:
        yield server


def test_the_official_parser_reads_every_sample(server: Server) -> None:
    """Each state, counter and loop arrives with its number, names and labels escaped."""
    queue = 'q"\\:tasks'
    with server.client() as client:
        client.lpush(queue, *['{"kind": "ok"}'] * 3)
        client.lpush(queue + ":dlq", '{"payload": {}}', "garbage")
        client.hset(queue + ":stats", mapping={"done": 7, "dead": 2})
        client.zadd(queue + ":workers", {"host:1:ab/foreman": 1, 'ho"st:2:cd/hand1': 2})
    environment = {**os.environ, "REDIS_URL": server.url, "QR_QUEUE": queue}
    command = [sys.executable, str(PROJECT / "replay.py"), "--prometheus"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    families = {family.name: family for family in text_string_to_metric_families(text.stdout)}
    values = {
        name: {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}
        for name, family in families.items()
    }
    assert all(family.documentation for family in families.values())
    assert {family.type for family in families.values()} == {"gauge", "counter"}

    def value(family: str, **labels: str) -> float:
        return values[family][tuple(sorted({"queue": queue, **labels}.items()))]

    assert value("qr_messages", state="waiting") == 3
    assert value("qr_messages", state="dead") == 2
    assert value("qr_transitions", transition="done") == 7
    assert value("qr_loop_idle_seconds", worker='ho"st:2:cd', loop="hand1") > 0
