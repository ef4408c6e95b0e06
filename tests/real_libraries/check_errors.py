"""The policy against the real exceptions of real libraries, raised by real calls on loopback.

`backoff.py` recognises errors by their shape and imports no library; this is the proof that the
shapes are right. It needs the libraries in requirements.txt and is no part of the main suite.
"""

import asyncio
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import aiohttp
import botocore.config
import botocore.session
import grpc
import httpx
import jsonschema
import psycopg
import pydantic
import pytest
import redis
import requests
from botocore.exceptions import ClientError, EndpointConnectionError

from backoff import Policy, Verdict

SERVER_TIME = 1_000_000_000  # September 2001: a server whose clock is years behind


class Answers(BaseHTTPRequestHandler):
    """Answers /STATUS/WAIT with that status, and with Retry-After if WAIT is not empty.

    WAIT is a number, "date" (a minute after this server's own Date), or "spent" (a used-up rate
    limit that resets a minute after). AWS calls come as POST / and name status and error code in
    the table that they ask for.
    """

    def do_GET(self) -> None:
        _, status, wait = self.path.split("/")
        fields = {
            "": {},
            "date": {"Retry-After": formatdate(SERVER_TIME + 60, usegmt=True)},
            "spent": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(SERVER_TIME + 60)},
        }.get(wait, {"Retry-After": wait})
        self.answer(int(status), fields, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, code = asked["TableName"].split("-")
        body = json.dumps({"__type": f"com.amazonaws#{code}", "message": "no"}).encode()
        self.answer(int(status), {"Retry-After": "7"} if status == "503" else {}, body)

    def answer(self, status: int, fields: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(SERVER_TIME, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing: the test says it all."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of a server that answers as it is asked to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def closed_port() -> Iterator[int]:
    """A port of loopback that refuses connections: bound, so that nobody takes it, and deaf."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture(scope="module")
def silent_port() -> Iterator[int]:
    """A port of loopback that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is reached without any proxy that the environment may name."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def raised(call: Any, *arguments: Any, **options: Any) -> BaseException:
    """The exception that a call ends with."""
    with pytest.raises(BaseException) as caught:
        call(*arguments, **options)
    return caught.value


def verdict(exc: BaseException) -> Verdict:
    return Policy().verdict(exc)


def gives_up(why: str) -> Verdict:
    return Verdict("give up", why)


# ---- HTTP clients ------------------------------------------------------------------------------


def with_urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=1)


def with_requests(url: str) -> None:
    requests.get(url, timeout=1).raise_for_status()


def with_httpx(url: str) -> None:
    httpx.get(url, timeout=1).raise_for_status()


def with_aiohttp(url: str) -> None:
    async def get() -> None:
        limit = aiohttp.ClientTimeout(total=1)
        async with aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session:
            await session.get(url)

    asyncio.run(get())


clients = pytest.mark.parametrize("get", [with_urllib, with_requests, with_httpx, with_aiohttp])


@clients
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422])
def test_a_client_error_gives_up(get: Any, status: int, site: str) -> None:
    assert verdict(raised(get, f"{site}/{status}/")) == gives_up(f"HTTP {status}")


@clients
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_passing_error_is_retried(get: Any, status: int, site: str) -> None:
    assert verdict(raised(get, f"{site}/{status}/")) == Verdict("retry", f"HTTP {status}", 0.0)


@clients
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("wait", "expected"), [("60", 60), ("date", 60), ("spent", 60), ("86400", 900), ("soon", 0)]
)
def test_the_wait_that_the_server_asks_for_is_kept(
    get: Any, status: int, wait: str, expected: float, site: str
) -> None:
    """Law: also when the server's clock is a quarter of a century behind ours."""
    exc = raised(get, f"{site}/{status}/{wait}")
    assert verdict(exc) == Verdict("retry", f"HTTP {status}", expected)


@clients
def test_a_rate_limit_that_comes_as_403_is_retried(get: Any, site: str) -> None:
    assert verdict(raised(get, f"{site}/403/spent")) == Verdict("retry", "HTTP 403", 60.0)


@clients
def test_a_server_that_refuses_or_is_silent_is_retried(
    get: Any, closed_port: int, silent_port: int
) -> None:
    for port in (closed_port, silent_port):
        exc = raised(get, f"http://127.0.0.1:{port}/200/")
        assert verdict(exc) == Verdict("retry", type(exc).__name__, 0.0)


# ---- AWS ---------------------------------------------------------------------------------------


def describe_table(endpoint: str, table: str) -> None:
    client = botocore.session.Session().create_client(
        "dynamodb",
        region_name="eu-central-1",
        endpoint_url=endpoint,
        aws_access_key_id="nobody",
        aws_secret_access_key="nothing",
        config=botocore.config.Config(retries={"total_max_attempts": 1}, connect_timeout=1),
    )
    client.describe_table(TableName=table)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("400-ResourceNotFoundException", gives_up("HTTP 400")),
        ("400-ValidationException", gives_up("HTTP 400")),
        ("400-ThrottlingException", Verdict("retry", "HTTP 400", 0.0)),
        ("400-ProvisionedThroughputExceededException", Verdict("retry", "HTTP 400", 0.0)),
        ("503-ServiceUnavailable", Verdict("retry", "HTTP 503", 7.0)),
    ],
)
def test_botocore(table: str, expected: Verdict, site: str) -> None:
    exc = raised(describe_table, site, table)
    assert isinstance(exc, ClientError)
    assert verdict(exc) == expected


def test_botocore_without_a_server(closed_port: int) -> None:
    exc = raised(describe_table, f"http://127.0.0.1:{closed_port}", "any")
    assert isinstance(exc, EndpointConnectionError)
    assert verdict(exc).action == "retry"


# ---- gRPC --------------------------------------------------------------------------------------

GRPC_GIVES_UP = {
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
}


@pytest.fixture(scope="module")
def grpc_address() -> Iterator[str]:
    """A gRPC server on loopback that ends each call with the status that the caller names."""

    def fail(name: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode[name.decode()], "as asked")

    handlers = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def call_grpc(address: str, status: str) -> None:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        channel.unary_unary("/Test/Fail")(status.encode(), timeout=10)


def call_grpc_async(address: str, status: str) -> None:
    async def call() -> None:
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await channel.unary_unary("/Test/Fail")(status.encode(), timeout=10)

    asyncio.run(call())


@pytest.mark.parametrize("call", [call_grpc, call_grpc_async])
@pytest.mark.parametrize("status", [code.name for code in grpc.StatusCode if code.name != "OK"])
def test_grpc(call: Any, status: str, grpc_address: str) -> None:
    exc = raised(call, grpc_address, status)
    assert isinstance(exc, grpc.RpcError)
    if status in GRPC_GIVES_UP:
        assert verdict(exc) == gives_up(f"gRPC {status}")
    else:
        assert verdict(exc).action == "retry"


def test_grpc_without_a_server(closed_port: int) -> None:
    assert verdict(raised(call_grpc, f"127.0.0.1:{closed_port}", "any")).action == "retry"


# ---- Data stores -------------------------------------------------------------------------------


def test_redis_errors_are_retried(closed_port: int, silent_port: int) -> None:
    for port in (closed_port, silent_port):
        client = redis.Redis(port=port, socket_timeout=0.2, retry=None, protocol=2)
        assert verdict(raised(client.ping)).action == "retry"
    for kind in vars(redis.exceptions).values():
        if isinstance(kind, type) and issubclass(kind, redis.RedisError):
            assert verdict(kind.__new__(kind)).action == "retry", kind


def test_psycopg_without_a_server_is_retried(closed_port: int) -> None:
    address = f"host=127.0.0.1 port={closed_port} user=nobody dbname=nothing connect_timeout=2"
    exc = raised(psycopg.connect, address)
    assert isinstance(exc, psycopg.OperationalError)
    assert verdict(exc) == Verdict("retry", "OperationalError", 0.0)


@pytest.mark.parametrize(
    ("state", "action"),
    [
        ("22001", "give up"),  # a text too long for its column
        ("22P02", "give up"),  # "abc" for a number
        ("23502", "give up"),  # a null where none may be
        ("23503", "give up"),  # a reference that does not exist
        ("23505", "give up"),  # a key that exists already
        ("40001", "retry"),  # a transaction that lost a race
        ("40P01", "retry"),  # a deadlock
        ("42P01", "retry"),  # no such table: the migration may be on its way
        ("53300", "retry"),  # too many connections
        ("55P03", "retry"),  # a lock that somebody else holds
        ("57014", "retry"),  # a statement over its time limit
        ("57P01", "retry"),  # the server is shutting down
    ],
)
def test_psycopg_errors_by_their_sqlstate(state: str, action: Literal["retry", "give up"]) -> None:
    """Law: the class that psycopg itself finds for the code a server sends carries that code."""
    exc = psycopg.errors.lookup(state)("as a server would say it")
    assert isinstance(exc, psycopg.Error)
    assert verdict(exc).action == action


# ---- Validation --------------------------------------------------------------------------------


def test_jsonschema() -> None:
    exc = raised(jsonschema.validate, {"id": "x"}, {"properties": {"id": {"type": "integer"}}})
    assert isinstance(exc, jsonschema.ValidationError)
    assert verdict(exc) == gives_up("not valid: jsonschema.ValidationError")


def test_pydantic() -> None:
    class Order(pydantic.BaseModel):
        id: int

    exc = raised(Order, id="x")
    assert isinstance(exc, pydantic.ValidationError)
    assert verdict(exc) == gives_up("not valid: pydantic_core.ValidationError")


def test_pydantics_first_version() -> None:
    v1 = pytest.importorskip("pydantic.v1", reason="gone on this Python", exc_type=ImportError)
    Order = v1.create_model("Order", id=(int, ...))
    assert verdict(raised(Order, id="x")) == gives_up("not valid: pydantic.ValidationError")


def test_a_reply_that_is_no_json_is_retried() -> None:
    assert verdict(raised(requests.models.complexjson.loads, "<html>")).action == "retry"
