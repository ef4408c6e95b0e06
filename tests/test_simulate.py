"""`python backoff.py --simulate`: the storms against what can be worked out by hand, the published
experiment against what was published, and the command as a learner runs it."""

import math
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import accumulate
from pathlib import Path

import pytest

import backoff
from backoff import CONTENDERS, ENDLESS, HOUR, RULES, Storm, ceiling, contest, occ, storm

PROJECT = Path(backoff.__file__).parent
STORM_RULES = [rule for rule in RULES if rule != "no wait"] + [ENDLESS]
JITTERED = ["equal jitter", "full jitter", "decorrelated"]


def command(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", backoff.__file__, *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80", **variables},
        check=False,
    )


def calls(one: Storm) -> int:
    return sum(one.calls.values())


@pytest.fixture(scope="module")
def storms() -> dict[str, Storm]:
    """The storm of the issue: ten thousand clients, a hundred served per tick."""
    return {rule: storm(rule, 10_000, 100, seed=1) for rule in STORM_RULES}


# ---- Without jitter everything can be worked out by hand ----------------------------------------


def test_at_a_fixed_interval_the_crowd_comes_every_second_a_hundred_fewer() -> None:
    fixed = storm("fixed interval", 1000, 10, seed=1)
    assert fixed.calls == {10 * wave: 1000 - 10 * wave for wave in range(100)}
    assert fixed.served == dict.fromkeys(fixed.calls, 10)
    assert (fixed.peak(), fixed.left(), fixed.wait(1)) == (990, 0, 99.0)
    assert (fixed.wait(0.5), fixed.wait(0.99)) == (49.0, 98.0)


@pytest.mark.parametrize(("rule", "cap"), [("exponential", math.inf), ("exponential + cap", 30)])
def test_without_jitter_the_waves_come_when_the_ceilings_add_up(rule: str, cap: float) -> None:
    one = storm(rule, 1000, 10, seed=1)
    waits = [ceiling(n, cap=cap) for n in range(len(one.calls) - 1)]
    assert list(one.calls) == [0] + [int(second * 10) for second in accumulate(waits)]
    assert list(one.calls.values()) == [1000 - 10 * wave for wave in range(len(one.calls))]


def test_without_a_cap_nearly_all_are_left_after_an_hour(storms: dict[str, Storm]) -> None:
    free = storms["exponential"]
    assert max(free.calls) == 10 * (2**11 - 1), "the wait before retry 10 is 1024 s"
    assert free.left() == 10_000 - 12 * 100
    assert free.wait(0.5) == math.inf


# ---- Laws of every storm ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", STORM_RULES)
def test_nobody_is_lost_and_nobody_is_served_beyond_the_capacity(
    rule: str, storms: dict[str, Storm]
) -> None:
    one = storms[rule]
    assert one.calls.keys() == one.served.keys()
    assert list(one.calls) == sorted(one.calls)
    assert one.calls[0] == 10_000
    assert max(one.calls) <= HOUR
    poisoned = 1 if rule == ENDLESS else 0
    for tick, came in one.calls.items():
        assert min(came, 100) - poisoned <= one.served[tick] <= min(came, 100)
    ends_in_the_hour = rule not in ("exponential", ENDLESS)
    assert (one.left() == 0) is ends_in_the_hour


def test_lots_are_drawn_fairly() -> None:
    """Who is served first is no question of number: the poison message, number 0, has no luck
    or bad luck of its own, and the served ones come from the whole crowd."""
    first = [storm("full jitter", 2, 1, seed=seed).wait(1) for seed in range(200)]
    assert len(set(first)) > 5
    lucky = sum(storm(ENDLESS, 2, 1, seed=seed).served[0] for seed in range(400))
    assert 150 < lucky < 250, "one of two is served: the poison in about half of the storms"


def test_the_same_seed_is_the_same_storm(storms: dict[str, Storm]) -> None:
    for rule in JITTERED:
        assert storm(rule, 10_000, 100, seed=1) == storms[rule]
        assert storm(rule, 10_000, 100, seed=2) != storms[rule]


def test_the_arithmetic_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the storm runs `ceiling` and `draw` themselves, with the policy's base and cap."""
    asked: list[tuple[float, float]] = []

    def two(n: int, base: float, cap: float, rng: random.Random) -> float:
        asked.append((base, cap))
        return 2.0

    monkeypatch.setattr(backoff, "draw", two)
    assert list(storm("full jitter", 30, 10, seed=1).calls.items()) == [(0, 30), (20, 20), (40, 10)]
    monkeypatch.setattr(backoff, "ceiling", lambda n, base, cap: 10.0)
    assert list(storm("equal jitter", 30, 10, seed=1).calls) == [0, 60, 120]
    assert list(storm("exponential + cap", 30, 10, seed=1).calls) == [0, 100, 200]
    assert set(asked) == {(backoff.Policy().base, backoff.Policy().cap)}


def test_decorrelated_waits_are_at_most_three_times_the_last() -> None:
    ticks = [list(storm("decorrelated", 2, 1, seed=seed).calls) for seed in range(300)]
    second = [each[1] for each in ticks]
    assert (min(second), max(second)) == (11, 30), "1...3 s, rounded up to a tick"


@pytest.mark.parametrize("rule", ["exponential + cap", *JITTERED])
def test_no_wait_is_longer_than_the_cap(rule: str) -> None:
    rng = random.Random(1)
    waits = [RULES[rule](1000, 30.0, 1.0, 30.0, rng) for _ in range(100)]
    assert 25 < max(waits) <= 30


# ---- What jitter, cap and giving up are good for ------------------------------------------------


def test_jitter_ends_the_waves_and_saves_most_of_the_calls(storms: dict[str, Storm]) -> None:
    capped = storms["exponential + cap"]
    for rule in JITTERED:
        assert calls(storms[rule]) < calls(capped) / 10
        assert storms[rule].peak() < capped.peak() / 4
        assert storms[rule].wait(1) < 60 < 40 * 60 < capped.wait(1)
    equal, full, decorrelated = (storms[rule].peak() for rule in JITTERED)
    assert decorrelated < full < equal


def test_with_full_jitter_the_server_is_never_idle_while_many_wait(
    storms: dict[str, Storm],
) -> None:
    full, capped = storms["full jitter"], storms["exponential + cap"]
    assert all(full.served[tick] == 100 for tick in range(50)), "every tick of the first 5 s"
    assert sum(capped.served.get(tick, 0) for tick in range(50)) == 300, "three waves"


def test_a_poison_message_that_nobody_gives_up_fails_for_ever(storms: dict[str, Storm]) -> None:
    endless = storms[ENDLESS]
    assert endless.left() == 1
    alone = [tick for tick in endless.calls if tick > 1000]
    assert all(endless.calls[tick] == 1 and endless.served[tick] == 0 for tick in alone)
    assert 200 < len(alone) < endless.poison_calls < 300, "every 15 s on average, for an hour"
    assert max(endless.calls) > HOUR - 300, "until the end"


def test_a_larger_storm_has_the_same_shape(storms: dict[str, Storm]) -> None:
    large = storm("full jitter", 100_000, 1000, seed=1)
    assert calls(large) == pytest.approx(10 * calls(storms["full jitter"]), rel=0.03)
    assert large.wait(0.99) == pytest.approx(storms["full jitter"].wait(0.99), abs=1)


# ---- The published experiment -------------------------------------------------------------------
# Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 4 March 2015; the model is
# that of github.com/aws-samples/aws-arch-backoff-simulator (network normal(10, 2) ms, base 5, cap
# 2000, first wait n = 1). Published are curves; the text states what is asserted here.


@pytest.fixture(scope="module")
def hundred() -> dict[str, tuple[float, float]]:
    """Writes and seconds for 100 clients, by rule."""
    return {rule: contest(rule, 100, seed=1, runs=40) for rule in CONTENDERS}


def test_occ_jitter_more_than_halves_the_work_of_a_hundred_clients(
    hundred: dict[str, tuple[float, float]],
) -> None:
    """Published: "reduced our call count by more than half"."""
    plain = hundred["exponential + cap"][0]
    assert 0.35 < hundred["full jitter"][0] / plain < 0.5
    assert hundred["decorrelated"][0] / plain < 0.6


def test_occ_the_order_by_work_is_the_published_one(
    hundred: dict[str, tuple[float, float]],
) -> None:
    """Published: full and equal about the same, equal slightly more; decorrelated more; both
    kinds without jitter far more, and backoff alone helps only a little."""
    none, plain, equal, full, decorrelated = (hundred[rule][0] for rule in CONTENDERS)
    assert full < equal < 1.05 * full
    assert 1.1 * full < decorrelated < plain
    assert 0.6 * none < plain < 0.9 * none


def test_occ_the_order_by_time_is_the_published_one(
    hundred: dict[str, tuple[float, float]],
) -> None:
    """Published: without jitter so slow that it is left off the graph; equal much slower than
    full; full slightly slower than decorrelated."""
    _none, plain, equal, full, decorrelated = (hundred[rule][1] for rule in CONTENDERS)
    assert plain > 8 * equal
    assert equal > 1.2 * full
    assert decorrelated < full < 1.25 * decorrelated


def test_occ_work_without_backoff_grows_with_the_square(
    hundred: dict[str, tuple[float, float]],
) -> None:
    half, _ = contest("no wait", 50, seed=1, runs=40)
    assert 3.2 < hundred["no wait"][0] / half < 4


def test_occ_in_lockstep_is_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network without variance all compete in every round and one wins: N, N-1, ..., 1
    writes, and each round is a read and a write there and back."""
    rng = random.Random(1)
    monkeypatch.setattr(rng, "normalvariate", lambda mean, deviation: mean)
    assert occ("no wait", 10, rng) == (55, 10 * 40)
    assert occ("exponential + cap", 2, rng) == (3, 40 + 10 + 40), "the first wait is 5 * 2**1"
    assert occ("full jitter", 1, rng) == (1, 40)


# ---- The command --------------------------------------------------------------------------------


def test_the_command_shows_seven_pictures_a_table_and_three_claims() -> None:
    done = command("--simulate")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    heads = [line.split(":")[0] for line in lines]
    assert [head for head in heads if head in STORM_RULES] == STORM_RULES
    table = lines[lines.index(next(line for line in lines if line.startswith("rule "))) :]
    rows = {line[:17].strip(): line[17:].split("  ") for line in table[1:8]}
    assert list(rows) == STORM_RULES
    assert [cell.strip() for cell in rows["fixed interval"] if cell] == [
        *("99,000", "505,000", "99.0 s", "49.0 s", "98.0 s")
    ]
    text = " ".join(done.stdout.split())
    for claim in (
        "10,000 at one instant",
        "9,900 come in one tick, to a server that takes 100",
        "before retry 10 is 1,024 s, 17 minutes",
        "5,760 times a day, for ever. Given up after 5 runs it is out of the way within 15 s",
    ):
        assert claim in text


def picture(lines: list[str], rule: str) -> list[str]:
    """The three rows of blocks of one rule."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{rule}: "))
    return [f"{row[2:]:<77}" for row in lines[start + 1 : start + 4]]


def test_the_shock_waves_are_plain_and_so_is_their_end() -> None:
    lines = command("--simulate").stdout.splitlines()
    for row in picture(lines, "fixed interval")[1:]:
        assert row[:70:2].strip("▇█") == "" and row[1:70:2].strip() == "", "a comb"
    waves = [x for x, block in enumerate(picture(lines, "exponential + cap")[0]) if block != " "]
    assert waves == [0, 2, 6, 14, 30, 62], "0, 1, 3, 7, 15 and 31 s, two columns a second"
    for rule in JITTERED:
        top, middle, low = picture(lines, rule)
        assert (top.strip(), middle.strip()) == ("█", "█"), "the first wave, then never again"
        assert len(low.rstrip()) > 40


@pytest.mark.parametrize("columns", [30, 45, 79, 200])
def test_the_output_is_no_wider_than_the_terminal(columns: int) -> None:
    done = command("--simulate", "--clients", "2000", COLUMNS=str(columns))
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) < columns


def test_a_terminal_that_knows_only_ascii_gets_ascii_waves() -> None:
    done = command("--simulate", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "  # # # # # " in done.stdout
    assert "\\u" not in done.stdout


@pytest.mark.parametrize("clients", [1, 2, 99])
def test_a_small_storm_is_one_too(clients: int, tmp_path: Path) -> None:
    small = ["--clients", str(clients), "--capacity", "5", "--svg", str(tmp_path / "x.svg")]
    done = command("--simulate", *small)
    assert (done.returncode, done.stderr) == (0, "")
    ET.parse(tmp_path / "x.svg")


def test_the_simulation_writes_none_of_the_labs_files(tmp_path: Path) -> None:
    assert command("--simulate", QR_DIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_occ_shows_work_and_time_of_ten_to_a_hundred_clients() -> None:
    done = command("--simulate", "--model", "occ")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) < 80
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"\d", line)]
    assert [int(row[0]) for row in rows] == 2 * list(range(10, 101, 10))
    assert all(len(row) == 1 + len(CONTENDERS) for row in rows)
    work = f"{contest('full jitter', 100, seed=1)[0]:,.0f}"
    assert rows[9][4] == work


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--simulate", "--clients", "0"], "--clients"),
        (["--simulate", "--clients", "many"], "--clients"),
        (["--simulate", "--clients", "1e4"], "--clients"),
        (["--simulate", "--clients", "9" * 9999], "--clients"),
        (["--simulate", "--capacity", "0"], "--capacity"),
        (["--simulate", "--capacity", "-5"], "--capacity"),
        (["--simulate", "--seed", "x"], "--seed"),
        (["--simulate", "--model", "tcp"], "--model"),
        (["--simulate", "--svg"], "--svg"),
        (["--clients", "5"], "--clients"),
        (["--seed", "0"], "--seed"),
        (["--svg", "x.svg"], "--svg"),
        (["--simulate", "--model", "occ", "--capacity", "5"], "--capacity"),
        (["--simulate", "--model", "occ", "--svg", "x.svg"], "--svg"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_option(
    arguments: list[str], option: str, tmp_path: Path
) -> None:
    done = command(*arguments, QR_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert f"argument {option}: " in last
    assert len(last) < 150
    assert list(tmp_path.iterdir()) == []


def test_the_help_shows_each_option_and_how_to_use_it() -> None:
    text = command("--help").stdout
    for option in ("clients", "capacity", "seed", "svg", "model"):
        assert f"--{option} " in text
    examples = re.findall(r"^  python backoff\.py (--simulate.*?)(?:  |$)", text, re.M)
    assert len(examples) == 5
    named = {word for example in examples for word in example.split() if word.startswith("--")}
    assert named == {"--simulate", "--clients", "--capacity", "--svg", "--model"}


# ---- The drawing --------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_figure_is_what_make_figure_draws(tmp_path: Path) -> None:
    """Law: byte for byte, on every Python and every machine."""
    recipe = re.findall(r"^figure:.*\n\t(.*)$", (PROJECT / "Makefile").read_text(), re.M)
    assert recipe == ["$(PYTHON) backoff.py --simulate --svg docs/storm.svg"]
    done = command("--simulate", "--svg", str(tmp_path / "storm.svg"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"wrote {tmp_path / 'storm.svg'}"
    drawn = (tmp_path / "storm.svg").read_bytes()
    assert drawn == (PROJECT / "docs" / "storm.svg").read_bytes()


@pytest.mark.parametrize(("clients", "capacity"), [(10_000, 100), (3, 5), (50_000, 7_000)])
def test_the_drawing_is_whole_and_stays_on_its_paper(clients: int, capacity: int) -> None:
    storms = {rule: storm(rule, clients, capacity, seed=1) for rule in STORM_RULES}
    source = "\n".join(backoff.figure(storms, capacity))
    root = ET.fromstring(source)
    _, _, width, height = map(int, root.attrib["viewBox"].split())
    for path in root.iter(f"{SVG}path"):
        for letter, numbers in re.findall(r"([MLHV])([-\d. ]+)", path.attrib["d"]):
            values = [float(number) for number in numbers.split()]
            xs, ys = (values, []) if letter == "H" else (values[:-1], values[-1:])
            assert all(0 <= x <= width for x in xs)
            assert all(0 <= y <= height for y in ys)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert None not in words
    assert all(rule in words for rule in STORM_RULES)
    assert {"requests/s", "0 s", "60 s", "served", "refused"} <= set(words)
    assert "@media (prefers-color-scheme: dark)" in source
    assert "href" not in source and "url(" not in source, "nothing is fetched"


def test_the_drawing_shows_where_the_server_refuses(storms: dict[str, Storm]) -> None:
    root = ET.fromstring("\n".join(backoff.figure(storms, 100)))
    paths = [(path.attrib["class"], path.attrib["d"]) for path in root.iter(f"{SVG}path")]
    refused = [d for kind, d in paths if kind == "refused"]
    served = [d for kind, d in paths if kind == "served"]
    assert len(refused) == len(served) == len(STORM_RULES)
    assert refused[0].count("V") == 2 * 60 + 1, "sixty waves in sixty seconds, up and down"
    full = STORM_RULES.index("full jitter")
    *edges, _end = (int(x) for x in re.findall(r"H(\d+)V", refused[full]))
    last_refusal = max(edges)
    assert last_refusal < backoff.LEFT + 10 * 15, "after 15 s nobody is refused"


def test_a_file_that_cannot_be_drawn_is_a_clear_error(tmp_path: Path) -> None:
    goal = tmp_path / "nowhere" / "storm.svg"
    done = command("--simulate", "--svg", str(goal))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"backoff.py: cannot write {goal}: No such file or directory\n"
