"""The progress line: rates in a window, share and ETA, terminals and plain streams."""

from __future__ import annotations

import io
import re

import pytest

from nemotron.data_prep.work.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_rates_share_and_eta(clock: Clock) -> None:
    progress = Progress("tokenize", 100_000_000, "document", stream=io.StringIO(), clock=clock)
    clock.now += 4
    progress.add(rows=2000, tokens=5_000_000, bytes=20_000_000)
    # 20 MB in 4 s are 5 MB/s; 80 MB are left.
    assert progress.line() == ("tokenize   20% of 100 MB  500 documents/s  1.25M tokens/s  5.0 MB/s  ETA 0:16")


def test_what_a_resumed_run_found_is_part_of_the_share_and_not_of_the_rates(clock: Clock) -> None:
    progress = Progress("tokenize", 1000_000, stream=io.StringIO(), clock=clock)
    progress.add(rows=50, tokens=60, bytes=500_000, was_done=True)
    clock.now += 10
    progress.add(rows=10, tokens=20, bytes=100_000)
    assert progress.line() == "tokenize   60% of 1 MB  1 rows/s  2 tokens/s  0.0 MB/s  ETA 0:40"
    assert (progress.rows, progress.tokens, progress.bytes) == (60, 80, 600_000)
    assert progress.summary() == "tokenize  60 rows  80 tokens  600 kB  0:10  1 rows/s  2 tokens/s  0.0 MB/s"


def test_rates_are_those_of_the_last_minute(clock: Clock) -> None:
    progress = Progress("read", 10**9, stream=io.StringIO(), clock=clock)
    for _ in range(100):  # slow: 1 MB/s
        clock.now += 1
        progress.add(rows=1, bytes=1_000_000)
    for _ in range(70):  # then 3 MB/s
        clock.now += 1
        progress.add(rows=1, bytes=3_000_000)
    # 690 MB are left, at 3 MB/s.
    assert "3.0 MB/s" in progress.line() and progress.line().endswith("ETA 3:50")
    # Over all of it: 310 MB in 170 s.
    assert "1.8 MB/s" in progress.summary()


def test_few_reports_of_long_tasks_make_the_window_longer(clock: Clock) -> None:
    progress = Progress("read", 10**9, stream=io.StringIO(), clock=clock)
    for size in (8_000_000, 1_000_000, 1_000_000, 1_000_000, 1_000_000):
        clock.now += 50
        progress.add(bytes=size)
    assert "0.0 MB/s" in progress.line()  # 12 MB in 250 s: eight reports at least, however long ago


def test_a_report_for_every_row_costs_no_memory(clock: Clock) -> None:
    progress = Progress("read", 10**9, stream=io.StringIO(), clock=clock)
    for _ in range(20_000):
        clock.now += 0.001
        progress.add(rows=1, bytes=1000)
    assert len(progress._marks) < 250  # ten a second
    assert "1.00k rows/s  1.0 MB/s  ETA 16:20" in progress.line()


def test_without_a_total_there_is_no_share_and_no_eta(clock: Clock) -> None:
    progress = Progress("extract", None, "page", stream=io.StringIO(), clock=clock)
    clock.now += 2
    progress.add(rows=300)
    assert progress.line() == "extract  300 pages  150 pages/s"


def test_a_terminal_has_one_line_rewritten_once_a_second_at_most(clock: Clock) -> None:
    stream = Terminal()
    with Progress("tokenize", 10_000, stream=stream, clock=clock) as progress:
        for _ in range(50):
            clock.now += 0.1
            progress.add(bytes=200)
    text = stream.getvalue()
    # Five seconds, and the totals.
    assert 5 <= text.count("\r\x1b[2K") <= 6
    assert text.count("\n") == 1 and text.endswith("\n")
    assert not re.search(r"\x1b\[[0-9;]*m", text)  # no colours, with or without NO_COLOR


def test_elsewhere_a_plain_line_every_ten_seconds_and_the_totals(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("tokenize", 10_000, stream=stream, clock=clock) as progress:
        for _ in range(200):
            clock.now += 0.125
            progress.add(rows=1, bytes=50)
    lines = stream.getvalue().splitlines()
    assert [line.split("%")[0].split()[-1] for line in lines[:2]] == ["40", "80"]
    assert lines[2].startswith("tokenize  200 rows  10 kB  0:25")
    assert len(lines) == 3 and "\x1b" not in stream.getvalue()


def test_an_error_ends_the_line_and_claims_no_total(clock: Clock) -> None:
    stream = Terminal()
    with pytest.raises(RuntimeError), Progress("tokenize", 10, stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.add(bytes=5)
        raise RuntimeError
    assert stream.getvalue().endswith("\n")
    assert "rows" not in stream.getvalue()


def test_nothing_to_do(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("tokenize", 0, stream=stream, clock=clock) as progress:
        assert progress.line() == "tokenize  100% of 0 B"
    assert stream.getvalue() == "tokenize  0 rows  0:00\n"
