"""Backoff: the arithmetic to the digit, the draw as a distribution, every rule of the policy, and
the command as a learner runs it. No Redis takes part."""

import math
import os
import random
import re
import smtplib
import stat
import subprocess
import sys
import time
import urllib.error
from datetime import datetime, timedelta, timezone
from email.message import Message
from email.utils import format_datetime
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock

import pytest

import backoff
from backoff import PermanentError, Policy, Verdict, ceiling, draw

NOW = 1_800_000_000.0
HUGE = (1023, 1024, 1074, 1100, 10**6, 10**18, 10**400)


def error(name: str = "RemoteError", module: str = "client", **attributes: Any) -> Exception:
    """An exception of a class made for the occasion, with these attributes."""
    made = type(name, (Exception,), {"__module__": module})("boom")
    vars(made).update(attributes)
    return made


def verdict(exc: BaseException, **settings: Any) -> Verdict:
    return Policy(**settings).verdict(exc, now=NOW)


def action(exc: BaseException, **settings: Any) -> str:
    return verdict(exc, **settings).action


def asked(status: int = 429, **fields: str) -> float:
    """The wait that an answer with these header fields asks for (retry_after is Retry-After)."""
    headers = {name.replace("_", "-").title(): value for name, value in fields.items()}
    return verdict(error(status_code=status, headers=headers)).not_before


def http_date(after: float) -> str:
    when = datetime.fromtimestamp(NOW + after, timezone.utc)
    return format_datetime(when, usegmt=True)


# ---- The arithmetic ----------------------------------------------------------------------------


def test_the_ceiling_doubles_until_the_cap() -> None:
    assert [ceiling(n) for n in range(9)] == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert [ceiling(n, cap=math.inf) for n in range(6)] == [1, 2, 4, 8, 16, 32]
    assert [ceiling(n, base=0.05, cap=0.9) for n in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.8, 0.9]


@pytest.mark.parametrize("n", HUGE)
def test_no_attempt_number_overflows(n: int) -> None:
    assert ceiling(n) == ceiling(n, base=0.5) == ceiling(n, base=1e-300) == 30
    assert ceiling(n, base=0) == ceiling(n, cap=0) == 0
    assert 0 <= draw(n) <= 30


def test_a_cap_below_the_base_wins() -> None:
    assert [ceiling(n, base=5, cap=2) for n in (0, 1, 1100)] == [2, 2, 2]


def test_the_ceiling_is_a_float_and_never_shrinks() -> None:
    for base in (0, 0.05, 0.9, 1, 7):
        ceilings = [ceiling(n, base, cap=30) for n in range(1200)]
        assert ceilings == sorted(ceilings)
        assert {type(value) for value in ceilings} == {float}


@pytest.mark.parametrize("n", [-1, -(10**18)])
def test_a_negative_attempt_number_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="first retry has number 0"):
        ceiling(n)


@pytest.mark.parametrize("n", range(9))
def test_draws_are_uniform_from_zero_to_the_ceiling(n: int) -> None:
    """Law: a wait is anywhere in 0...ceiling(n), all parts of it equally likely.

    20,000 seeded draws: the mean is half the ceiling, both ends are reached, and the greatest
    distance to the uniform distribution (Kolmogorov-Smirnov) is below 1.95 / sqrt(20,000), which
    a right sample stays under 999 times in 1000 and a ceiling that is 3 % off does not.
    """
    rng, size, top = random.Random(n), 20_000, ceiling(n)
    waits = sorted(draw(n, rng=rng) for _ in range(size))

    assert 0 <= waits[0] < top / 1000
    assert top * 0.999 < waits[-1] <= top
    assert sum(waits) / size == pytest.approx(top / 2, rel=0.02)
    distance = max(
        max(abs(wait / top - i / size), abs(wait / top - (i + 1) / size))
        for i, wait in enumerate(waits)
    )
    assert distance < 1.95 / math.sqrt(size)


def test_a_handler_that_seeds_random_does_not_choose_our_waits() -> None:
    def waits() -> list[float]:
        random.seed(42)
        return [draw(20) for _ in range(4)]

    assert waits() != waits()
    random.seed(42)
    before = random.getstate()
    draw(3)
    assert random.getstate() == before


def test_a_fork_does_not_repeat_its_parents_waits() -> None:
    """Law: two hands that start at the same instant draw different sequences."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import backoff; backoff.draw(9)\n"
        "for _ in range(2):\n"
        "    if not os.fork():\n"
        "        print([backoff.draw(9) for _ in range(4)], flush=True); os._exit(0)\n"
        "os.wait(); os.wait()"
    )
    here = str(Path(backoff.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, here], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first != second


# ---- The wait of a policy ----------------------------------------------------------------------


def test_the_wait_follows_the_policys_base_and_cap() -> None:
    policy = Policy(base=0.2, cap=5)
    for n in (0, 1, 3, 1100):
        waits = [policy.wait(n, rng=random.Random(seed)) for seed in range(200)]
        assert 0 <= min(waits) <= max(waits) <= ceiling(n, 0.2, 5)
        assert max(waits) > 0.9 * ceiling(n, 0.2, 5)


def test_the_jitter_comes_on_top_of_the_wait_that_was_asked_for() -> None:
    """Law: nobody returns early, and a crowd that was given one instant does not return at it."""
    waits = [Policy().wait(3, not_before=60, rng=random.Random(seed)) for seed in range(200)]
    assert 60 <= min(waits) < 61
    assert 67 < max(waits) <= 68
    assert len(set(waits)) == 200


@pytest.mark.parametrize("field", ["max_attempts", "base", "cap", "retry_after_cap"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, "3", "", None, True])
def test_a_policy_refuses_nonsense_and_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        Policy(**{field: value})


def test_a_policy_refuses_zero_attempts_half_attempts_and_names_in_one_string() -> None:
    wrong: list[dict[str, Any]]
    wrong = [{"max_attempts": 0}, {"max_attempts": 1.5}, {"permanent": "KeyError"}, {"cap": 9**999}]
    for settings in wrong:
        with pytest.raises(ValueError, match=next(iter(settings))):
            Policy(**settings)


def test_the_defaults_are_those_of_the_exercise() -> None:
    assert Policy() == Policy(5, 1.0, 30.0, 900.0, frozenset())


# ---- What the handler and the operator say -----------------------------------------------------

PLAIN = [
    ValueError("x"), KeyError("x"), RuntimeError("x"), Exception(), FileNotFoundError(2, "x"),
    OSError(404, "x"), AssertionError(), RecursionError(), MemoryError(), TimeoutError(),
    KeyboardInterrupt(), GeneratorExit(), SystemExit(404), SystemExit(), StopIteration(404),
    ConnectionResetError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), ZeroDivisionError(),
]  # fmt: skip


@pytest.mark.parametrize("exc", PLAIN, ids=repr)
def test_plain_exceptions_are_retried_by_the_schedule(exc: BaseException) -> None:
    assert verdict(exc) == ("retry", type(exc).__name__, 0.0)


def test_a_permanent_error_gives_up_and_so_do_its_subclasses() -> None:
    class NoSuchUser(PermanentError):
        pass

    assert verdict(PermanentError("x")).action == "give up"
    assert verdict(NoSuchUser()).reason == "NoSuchUser is marked as not retryable"


def test_a_permanent_error_of_another_copy_of_the_file_gives_up_too(tmp_path: Path) -> None:
    """Law: the files work when copied flat into another folder, with the handler in a third."""
    copy: dict[str, Any] = {"__name__": "copy"}
    source = Path(backoff.__file__).read_text().partition("# ---- The policy")[2]
    start = source.index("class PermanentError")
    exec(source[start : source.index("class Verdict")], copy)
    assert copy["PermanentError"] is not PermanentError
    assert action(copy["PermanentError"]()) == "give up"


@pytest.mark.parametrize("mark", [None, 0, 1, "", "False", [], Mock()])
def test_only_true_and_false_themselves_are_marks(mark: Any) -> None:
    assert action(error(retryable=False)) == "give up"
    assert action(error(retryable=mark)) == "retry"
    assert action(error(retryable=mark, status_code=404)) == "give up"


def test_retryable_true_beats_the_shape() -> None:
    assert action(error(retryable=True, status_code=404)) == "retry"
    assert action(error("ValidationError", "jsonschema.exceptions", retryable=True)) == "retry"


def test_the_operators_list_beats_everything_but_the_facts() -> None:
    exc = error("Stale", "shop.orders", retryable=True, retry_after=5)
    assert verdict(exc, permanent={"Stale"}).reason == "Stale is on the list of permanent errors"


@pytest.mark.parametrize(
    "name", ["Stale", "shop.Stale", "shop.orders.Stale", "Exception", "builtins.Exception"]
)
def test_the_operator_may_use_any_name_of_the_class_or_a_parent(name: str) -> None:
    assert action(error("Stale", "shop.orders"), permanent=frozenset({"other", name})) == "give up"


@pytest.mark.parametrize("name", ["stale", "orders.Stale", "Stal", "", "shop", "*"])
def test_a_name_that_is_not_the_classs_matches_nothing(name: str) -> None:
    assert action(error("Stale", "shop.orders"), permanent=frozenset({name})) == "retry"


# ---- HTTP by shape -----------------------------------------------------------------------------

SHAPES = {
    "code": lambda status: error(code=status),
    "status": lambda status: error(status=status),
    "status_code": lambda status: error(status_code=status),
    "response.status_code": lambda status: error(response=Bag(status_code=status)),
    "an enum": lambda status: error(code=HTTPStatus(status)),
    "botocore": lambda status: error(response={"ResponseMetadata": {"HTTPStatusCode": status}}),
    "urllib": lambda status: urllib.error.HTTPError("http://x", status, "x", Message(), None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_error_is_permanent_and_a_server_error_is_not(shape: str) -> None:
    """Law: HTTP 4xx gives up, except 408, 425 and 429; whatever else HTTP says is retried."""
    make = SHAPES[shape]
    for status in HTTPStatus:
        permanent = 400 <= status <= 499 and status not in (408, 425, 429)
        expected = "give up" if permanent else "retry"
        assert verdict(make(int(status))) == (expected, f"HTTP {int(status)}", 0.0)


@pytest.mark.parametrize("status", [True, "404", 404.0, 40, 4040, -404, None, Mock(), [404]])
def test_what_is_no_http_status_is_not_taken_for_one(status: Any) -> None:
    for attribute in ("code", "status", "status_code"):
        assert verdict(error(**{attribute: status})) == ("retry", "RemoteError", 0.0)


def test_an_answer_that_counts_as_false_is_an_answer() -> None:
    """requests' Response is false when its status is 4xx."""

    class Response:
        status_code = 404

        def __bool__(self) -> bool:
            return False

    assert action(error(response=Response())) == "give up"


def test_a_mail_servers_4xx_means_later() -> None:
    class SMTPResponseException(Exception):
        code = 450

    assert action(SMTPResponseException()) == "retry"
    assert action(smtplib.SMTPResponseException(450, "greylisted")) == "retry"


@pytest.mark.parametrize("status", [403, 413])
def test_a_403_or_413_that_says_when_to_come_back_is_retried(status: int) -> None:
    assert asked(status, retry_after="60") == 60
    assert asked(status, x_ratelimit_remaining="0", x_ratelimit_reset=str(int(NOW) + 50)) == 50
    assert action(error(status=status, headers={"X-RateLimit-Remaining": "7"})) == "give up"
    assert action(error(status=404, headers={"Retry-After": "60"})) == "give up"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ThrottlingException", "retry"),
        ("ProvisionedThroughputExceededException", "retry"),
        ("RequestLimitExceeded", "retry"),
        ("TooManyRequestsException", "retry"),
        ("RequestTimeout", "retry"),
        ("ResourceNotFoundException", "give up"),
        ("ValidationException", "give up"),
    ],
)
def test_aws_says_400_for_a_throttled_call_and_its_code_decides(code: str, expected: str) -> None:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    assert action(error(response=response)) == expected


# ---- Other shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["jsonschema.exceptions", "pydantic_core._x", "pydantic.v1"])
def test_a_validation_error_is_permanent(module: str) -> None:
    assert action(error("ValidationError", module)) == "give up"
    parent = type(error("ValidationError", module))
    assert action(type("OrderInvalid", (parent,), {"__module__": "shop"})()) == "give up"


def test_a_validation_error_of_an_unknown_library_is_retried() -> None:
    assert action(error("ValidationError", "shop.jsonschema")) == "retry"
    assert action(error("OtherError", "jsonschema.exceptions")) == "retry"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("INVALID_ARGUMENT", "give up"), ("NOT_FOUND", "give up"), ("ALREADY_EXISTS", "give up"),
        ("PERMISSION_DENIED", "give up"), ("UNAUTHENTICATED", "give up"),
        ("FAILED_PRECONDITION", "give up"), ("OUT_OF_RANGE", "give up"),
        ("UNAVAILABLE", "retry"), ("DEADLINE_EXCEEDED", "retry"), ("RESOURCE_EXHAUSTED", "retry"),
        ("ABORTED", "retry"), ("CANCELLED", "retry"), ("INTERNAL", "retry"), ("UNKNOWN", "retry"),
        ("UNIMPLEMENTED", "retry"), ("DATA_LOSS", "retry"), (None, "retry"), ([], "retry"),
    ],
)  # fmt: skip
def test_a_grpc_status_gives_up_where_http_would(name: Any, expected: str) -> None:
    assert action(error(code=lambda: Bag(name=name))) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("22001", "give up"), ("22P02", "give up"), ("23503", "give up"), ("23505", "give up"),
        ("40001", "retry"), ("40P01", "retry"), ("42P01", "retry"), ("42501", "retry"),
        ("53300", "retry"), ("57014", "retry"), ("08006", "retry"), ("23", "retry"),
        (23505, "retry"), (None, "retry"), ("", "retry"),
    ],
)  # fmt: skip
def test_an_sql_error_gives_up_when_the_data_is_wrong(state: Any, expected: str) -> None:
    assert action(error(sqlstate=state)) == action(error(pgcode=state)) == expected


def test_a_cause_is_not_followed() -> None:
    """Law: the handler's own exception is its word on what happened; the cause is for people."""
    try:
        raise RuntimeError("mine") from error(status_code=404)
    except RuntimeError as exc:
        assert action(exc) == "retry"


# ---- Groups ------------------------------------------------------------------------------------


def group(*inner: BaseException, **attributes: Any) -> Exception:
    """An exception group by shape, so that Python 3.10 runs this too."""
    return error("ExceptionGroup", "builtins", exceptions=inner, **attributes)


def test_a_group_gives_up_only_if_every_error_in_it_is_permanent() -> None:
    assert action(group(PermanentError(), error(status=404))) == "give up"
    assert action(group(PermanentError(), group(group(error(status=404))))) == "give up"
    assert action(group(PermanentError(), group(ValueError()))) == "retry"
    assert action(group(PermanentError(), retryable=True)) == "retry"
    assert action(group(ValueError(), retryable=False)) == "give up"
    assert action(group(ValueError(), status_code=404)) == "retry"
    assert action(group(PermanentError(), error(exceptions=()))) == "retry"
    assert action(error(exceptions=(), status_code=404)) == "give up"


def test_a_group_waits_as_long_as_its_most_patient_error_asks() -> None:
    parts = error(retry_after=7), group(error(status=429, headers={"retry-after": "60"}))
    assert verdict(group(*parts, KeyError())).not_before == 60
    assert verdict(group(*parts, retry_after=5)).not_before == 5


def test_endless_deep_and_huge_groups_are_walked_within_bounds() -> None:
    endless = group()
    endless.exceptions = (endless, PermanentError())  # type: ignore[attr-defined]
    assert action(endless) == "give up"
    endless.exceptions = (endless, ValueError())  # type: ignore[attr-defined]
    assert action(endless) == "retry"

    deep: Exception = PermanentError()
    for _ in range(5000):
        deep = group(deep)
    assert action(deep) == "retry"
    crowd = [PermanentError() for _ in range(100_000)]
    assert action(group(*crowd)) == action(group(PermanentError(), group(*crowd))) == "retry"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_pythons_own_groups_are_groups() -> None:
    from builtins import ExceptionGroup

    made = ExceptionGroup("x", [PermanentError(), ExceptionGroup("y", [PermanentError()])])
    assert verdict(made).reason == (
        "ExceptionGroup of 2, first: PermanentError is marked as not retryable"
    )


# ---- When to come back -------------------------------------------------------------------------


def test_retry_after_is_read_in_seconds_and_as_any_http_date() -> None:
    assert asked(retry_after="120") == asked(retry_after=" 120 ") == 120
    assert asked(retry_after="1.5") == 1.5
    when = datetime.fromtimestamp(NOW + 90, timezone.utc)
    for form in ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y"):
        assert asked(retry_after=when.strftime(form)) == 90


def test_a_date_without_a_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ+7")
    time.tzset()
    try:
        when = datetime.fromtimestamp(NOW + 90, timezone.utc)
        assert asked(retry_after=when.strftime("%a %b %d %H:%M:%S %Y")) == 90
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_date_counts_from_the_answers_own_clock() -> None:
    """Law: a clock that is wrong, ours or theirs, moves no retry."""
    assert asked(date=http_date(-5000), retry_after=http_date(-4940)) == 60
    assert asked(date="yesterday", retry_after=http_date(60)) == 60
    reset = {"x_ratelimit_reset": str(int(NOW) + 3640), "date": http_date(3600)}
    assert asked(**reset) == 40


@pytest.mark.parametrize(
    ("fields", "wait"),
    [
        ({"retry_after_ms": "2500", "retry_after": "9"}, 2.5),
        ({"x_ms_retry_after_ms": "1500"}, 1.5),
        ({"ratelimit_reset": "30"}, 30),
        ({"x_ratelimit_reset": "30"}, 30),
        ({"x_rate_limit_reset": str(int(NOW) + 70)}, 70),
        ({"x_ratelimit_reset": str(int(NOW) - 70)}, 0),
        ({"x_ratelimit_reset_after": "1.25", "x_ratelimit_reset": str(int(NOW) + 9)}, 1.25),
        ({"ratelimit": '"burst";r=0;t=20'}, 20),
        ({"ratelimit": '"day";r=5;t=9000, "burst";r=0;t=20'}, 20),
        ({"ratelimit": "limit=10, remaining=0, reset=33"}, 33),
        ({"retry_after": "3", "x_ratelimit_reset": "800"}, 3),
    ],
)
def test_the_common_rate_limit_headers_are_read(fields: dict[str, str], wait: float) -> None:
    assert asked(429, **fields) == wait


def test_a_rate_limit_counts_only_when_it_is_used_up() -> None:
    assert asked(500, x_ratelimit_remaining="12", x_ratelimit_reset="30") == 0
    assert asked(500, x_ratelimit_reset="30") == 0
    assert asked(500, ratelimit='"burst";r=3;t=20') == 0
    assert asked(500, x_ratelimit_remaining="0", x_ratelimit_reset="30") == 30
    assert asked(503, x_ratelimit_reset="30") == 30


GARBAGE = [
    "", "soon", "-5", "0", "nan", "inf", "1e999", "9" * 400, "1_000", "٣", "0x10", "5;q=1", "\x00",
    "Thu, 99 Foo 2026 99:99:99 GMT", "Fri, 31 Dec 99999 23:59:59 GMT", "," * 10**6,
    "r=0;" * 10**5,
]  # fmt: skip


@pytest.mark.parametrize("value", GARBAGE, ids=lambda value: ascii(value[:30]))
def test_garbage_in_the_headers_is_ignored(value: str) -> None:
    names = ("retry_after", "retry_after_ms", "ratelimit", "ratelimit_reset", "date")
    assert asked(503, **dict.fromkeys(names, value)) == 0


def test_a_date_in_the_past_asks_for_nothing() -> None:
    assert asked(retry_after=http_date(-60)) == 0


def test_the_wait_that_is_asked_for_has_a_bound() -> None:
    assert asked(retry_after="86400") == asked(retry_after=http_date(86400)) == 900
    assert verdict(error(retry_after=10**9), retry_after_cap=20).not_before == 20
    assert verdict(error(retry_after=10**9), retry_after_cap=0).not_before == 0


class Shouting:
    """Headers that are no mapping, but can list their items."""

    def items(self) -> Any:
        yield "RETRY-AFTER", 44


@pytest.mark.parametrize("headers", [{"retry-AFTER": "44"}, Shouting(), {"Retry-After": 44}])
def test_headers_of_any_kind_are_read_whatever_the_case(headers: Any) -> None:
    message = Message()
    message["retry-after"] = "44"
    aws = {"ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "44"}}}
    for exc in (
        error(status=503, headers=headers),
        error(response=Bag(status_code=503, headers=headers)),
        error(response=aws),
        urllib.error.HTTPError("http://x", 503, "x", message, None),
    ):
        assert verdict(exc) == ("retry", "HTTP 503", 44.0)


@pytest.mark.parametrize("value", [60, 60.0, "60", timedelta(minutes=1)])
def test_any_exception_can_say_when_to_come_back(value: Any) -> None:
    assert verdict(error(retry_after=value)) == ("retry", "RemoteError", 60.0)
    told = error(retry_after=value, status_code=404)
    assert verdict(told) == ("retry", "HTTP 404", 60.0), "to say when is to say again"


@pytest.mark.parametrize(
    "value",
    [
        *(-1, 0, math.nan, math.inf, -math.inf, 10**400, 1j, True, None, "soon", [], Mock()),
        *(timedelta(seconds=-1), object(), lambda: 5),
    ],
    ids=lambda value: re.sub(" ?at 0x.*| id=.*", "", repr(value))[:20],  # the same in each run
)
def test_nonsense_in_retry_after_is_ignored(value: Any) -> None:
    assert verdict(error(retry_after=value)).not_before == 0
    assert action(error(retry_after=value, status_code=404)) == "give up"


# ---- Nothing an exception does can hurt the verdict --------------------------------------------


class Bomb(Exception):
    """Raises whatever attribute is read."""

    trigger: ClassVar[BaseException] = RuntimeError("boom")

    def __getattribute__(self, name: str) -> Any:
        raise type(self).trigger


@pytest.mark.parametrize(
    "trigger", [RuntimeError(), KeyboardInterrupt(), SystemExit(404), AttributeError()], ids=repr
)
def test_an_exception_whose_attributes_raise_is_retried(trigger: BaseException) -> None:
    assert verdict(type("Live", (Bomb,), {"trigger": trigger})()) == ("retry", "Live", 0.0)


def test_an_attribute_that_never_comes_to_an_end_is_survived() -> None:
    class Endless(Exception):
        @property
        def response(self) -> Any:
            return self.response

        code = response

    assert action(Endless()) == "retry"


def test_mocks_say_nothing() -> None:
    class Mocked(Exception):
        def __getattr__(self, name: str) -> Any:
            return MagicMock(name=name)

    assert verdict(Mocked()) == ("retry", "Mocked", 0.0)
    assert verdict(error(response=MagicMock(), headers=Mock(), code=Mock())).action == "retry"


def test_a_class_with_a_strange_name_has_a_printable_one() -> None:
    assert verdict(error("")).reason == "an exception without a name"
    assert verdict(error("\x1b[31m\nÉ")).reason == r"\x1b[31m\n\xc9"
    assert len(verdict(error("A" * 10**6)).reason) == 80


def test_what_cannot_be_examined_at_all_is_retried() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise SystemExit(404)

    class Wild(Exception, metaclass=Meta):
        pass

    class Number(int):
        def __le__(self, other: object) -> bool:
            raise KeyboardInterrupt

    def explode() -> None:
        raise GeneratorExit

    for exc in (Wild(), error(code=explode), error(retry_after=Number(5)), error(code=Number(5))):
        assert action(exc) == "retry"


# ---- The command -------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A current directory that must not matter."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def command(cwd: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs `python backoff.py` as a learner does."""
    return subprocess.run(
        [sys.executable, "-W", "error", backoff.__file__, *arguments],
        capture_output=True,
        encoding="utf-8",
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **variables},
        check=False,
    )


def test_the_command_writes_the_labs_three_files(tmp_path: Path, elsewhere: Path) -> None:
    """Law: the files of steps 3, 4 and 5, to the letter, in a folder that is made if missing."""
    folder = tmp_path / "not" / "yet there"
    done = command(elsewhere, QR_DIR=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "capped.txt",
        "jitter.txt",
        "schedule.txt",
    ]
    assert list(elsewhere.iterdir()) == []

    assert (folder / "schedule.txt").read_bytes() == (
        b"attempt=0 wait=1\nattempt=1 wait=2\nattempt=2 wait=4\n"
        b"attempt=3 wait=8\nattempt=4 wait=16\nattempt=5 wait=32\n"
    )
    assert (folder / "capped.txt").read_bytes() == b"1\n2\n4\n8\n16\n30\n30\n30\n30\n"
    jitter = (folder / "jitter.txt").read_text(encoding="ascii")
    lines = jitter.splitlines()
    assert jitter == "".join(f"{float(line):.6f}\n" for line in lines)
    assert len(lines) == 20
    assert all(0 <= float(line) <= 8 for line in lines)
    assert len(set(lines)) > 1


def test_each_run_draws_anew_and_replaces_the_files(tmp_path: Path, elsewhere: Path) -> None:
    command(elsewhere, QR_DIR=str(tmp_path))
    first = (tmp_path / "jitter.txt").read_text()
    for name in ("schedule.txt", "jitter.txt", "capped.txt"):
        (tmp_path / name).write_text("old\n" * 1000)
    assert command(elsewhere, QR_DIR=str(tmp_path)).returncode == 0
    assert (tmp_path / "capped.txt").read_text() == "1\n2\n4\n8\n16\n30\n30\n30\n30\n"
    assert len((tmp_path / "jitter.txt").read_text().splitlines()) == 20
    second = (tmp_path / "jitter.txt").read_text()
    assert second != first
    assert max(map(float, (first + second).split())) > 4, "forty draws from 0...8"


def test_the_files_are_as_readable_as_any_other(tmp_path: Path, elsewhere: Path) -> None:
    command(elsewhere, QR_DIR=str(tmp_path))
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.txt")}
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


def test_a_symbolic_link_stays_one(tmp_path: Path, elsewhere: Path) -> None:
    goal = elsewhere / "waits"
    (tmp_path / "capped.txt").symlink_to(goal)
    assert command(elsewhere, QR_DIR=str(tmp_path)).returncode == 0
    assert (tmp_path / "capped.txt").is_symlink()
    assert goal.read_text().startswith("1\n2\n")


def test_a_link_planted_where_the_draft_goes_is_not_followed(
    tmp_path: Path, elsewhere: Path
) -> None:
    """Law: in a folder that others may write to, too, nothing else is overwritten."""
    treasure = elsewhere / "treasure"
    treasure.write_text("gold")
    (tmp_path / f".capped.txt.{os.getpid()}").symlink_to(treasure)
    with pytest.raises(FileExistsError):
        backoff.write(tmp_path / "capped.txt", ["1"])
    assert treasure.read_text() == "gold"


def test_the_picture_shows_doubling_cap_and_jitter(tmp_path: Path, elsewhere: Path) -> None:
    shown = command(elsewhere, QR_DIR=str(tmp_path)).stdout
    lines = shown.splitlines()
    bars = [line for line in lines if line.startswith("  attempt ")]
    assert [bar.count("█") for bar in bars] == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert len({bar.index("┃") for bar in bars}) == 1, "the cap is a straight wall"
    assert bars[8].endswith("30 s, would be 256")
    assert shown.count("●") == 20
    assert f"wrote {tmp_path / 'jitter.txt'} (20 lines)" in lines
    assert max(map(len, lines[:-3])) <= 79


def test_a_terminal_that_knows_only_ascii_gets_ascii(tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "à la carte"
    done = command(elsewhere, QR_DIR=str(folder), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert done.stdout.count("o\n") >= 1
    assert "##############################| 30 s" in done.stdout
    assert (folder / "capped.txt").exists()


@pytest.mark.parametrize("stdout", ["| true", ">&-", "> /dev/null"])
def test_the_files_are_written_though_nobody_reads_the_picture(
    stdout: str, tmp_path: Path, elsewhere: Path
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$1" {stdout}', sys.executable, backoff.__file__],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "QR_DIR": str(tmp_path), "PYTHONUNBUFFERED": ""},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "capped.txt").exists()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path, elsewhere: Path) -> None:
    blocked = tmp_path / "file" / "qr"
    blocked.parent.touch()
    done = command(elsewhere, QR_DIR=str(blocked))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"backoff.py: cannot make the folder {blocked}: Not a directory. "
        "Mend that, or use another folder: QR_DIR=./lab python backoff.py\n"
    )


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "jitter.txt").mkdir()
    done = command(elsewhere, QR_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"backoff.py: cannot write {tmp_path / 'jitter.txt'}: Is a directory. "
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere",
        "jitter.txt",
        "schedule.txt",
    ], "no draft is left behind"


def test_a_full_disk_is_a_clear_error_and_the_old_file_stays(
    tmp_path: Path, elsewhere: Path
) -> None:
    """Law: a file is replaced as a whole or not at all."""
    (tmp_path / "schedule.txt").write_text("old\n")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$0" "$1"', sys.executable, backoff.__file__],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "QR_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot write {tmp_path / 'schedule.txt'}: File too large." in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "schedule.txt").read_text() == "old\n"
    assert [path.name for path in tmp_path.glob(".*")] == [], "no draft is left behind"


def test_an_empty_qr_dir_is_an_error_that_names_it(elsewhere: Path) -> None:
    done = command(elsewhere, QR_DIR="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "backoff.py: QR_DIR is empty: name a folder, or unset it\n"
    assert list(elsewhere.iterdir()) == []


def test_help_is_the_manual(elsewhere: Path, tmp_path: Path) -> None:
    done = command(elsewhere, "--help", QR_DIR=str(tmp_path))
    assert done.returncode == 0
    for word in ("QR_DIR", "/root/qr", "schedule.txt", "jitter.txt", "capped.txt", "exit codes"):
        assert word in done.stdout
    assert not list(tmp_path.glob("*.txt"))


def test_nothing_happens_at_import(elsewhere: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import backoff; print('redis' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(backoff.__file__).parent)],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "QR_DIR": str(elsewhere / "qr")},
        check=True,
    )
    assert done.stdout == "False\n"
    assert list(elsewhere.iterdir()) == []
