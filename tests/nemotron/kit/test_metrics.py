"""The metrics log across kills and resumes, and the progress line with a clock of our own."""

import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from nemo_runspec.errors import UserError
from nemotron.kit.metrics import MetricsLog, Progress, StatusLine, format_seconds, read_metrics


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_lines_are_plain_json_and_come_back(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.log(1, loss=3.5, phase="one\u2028two", parts=[1, np.float32(0.5)], counts={"math": np.int64(3)}, none=None)
    log.log(2, loss=float("nan"), grad_norm=math.inf)
    for line in log.path.read_text().split("\n")[:-1]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = log.read()
    assert (first["step"], first["loss"], first["parts"], first["counts"]) == (1, 3.5, [1, 0.5], {"math": 3})
    assert first["phase"] == "one\u2028two" and first["none"] is None
    assert math.isnan(second["loss"]) and second["grad_norm"] == math.inf
    with pytest.raises(TypeError):
        log.log(3, loss=object())


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        log.log(step, loss=1.0 / step)
        if step == 5:
            num_records = log.num_records
            log.log(step, valid_loss=0.1)  # after the checkpoint, of the same step
    assert log.num_records == 8
    again = MetricsLog(tmp_path / "metrics.jsonl")
    again.truncate(num_records)
    again.log(5, valid_loss=0.2)
    assert [record["step"] for record in again.read()] == [1, 2, 3, 4, 5, 5]
    assert again.num_records == 6 and again.read()[-1]["valid_loss"] == 0.2
    again.truncate(0)
    assert again.read() == [] and again.num_records == 0
    MetricsLog(tmp_path / "none.jsonl").truncate(3)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1]
    MetricsLog(path).log(2, loss=1.0)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    MetricsLog(path).truncate(9)
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n'
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)


def test_a_line_cut_within_a_character_is_dropped_and_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "text": "é"}\n'.encode()
    path.write_bytes(whole + whole[: whole.index(b"\xc3") + 1])
    assert read_metrics(path) == [{"step": 1, "text": "é"}]
    path.write_bytes(whole + b'{"step": 2, "text": "\xc3"}\n')
    with pytest.raises(UserError, match=r'metrics\.jsonl:2: not a JSON object: {"step": 2, "text": "\ufffd"}'):
        read_metrics(path)


@pytest.mark.parametrize("cut", [b'{"text": "\xc3', b'{"text": "\xc3\n', b"\0\xff\n\xc3\n{"])
def test_resuming_drops_what_is_no_text_and_names_it_where_it_is_to_be_kept(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "text": "é"}\n'.encode()
    path.write_bytes(whole + cut)
    log = MetricsLog(path)
    if cut.count(b"\n"):
        with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object"):
            log.truncate(2)
        assert path.read_bytes() == whole + cut
    log.truncate(1)
    assert path.read_bytes() == whole and log.num_records == 1
    log.log(2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_what_was_logged_is_there_after_kill_9(tmp_path):
    script = (
        "import os, sys, signal; from pathlib import Path; from nemotron.kit.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(100): log.log(step, loss=1.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "m.jsonl"], check=False)
    assert done.returncode == -9 and len(read_metrics(tmp_path / "m.jsonl")) == 100


def test_speed_share_of_peak_and_eta_follow_from_the_clock():
    clock = Clock()
    progress = Progress(100, label="sft", peak_flops=1e9, stream=io.StringIO(), clock=clock)
    for step in range(1, 11):
        clock.now += 0.5
        progress.update(step, tokens=2048, flops=0.15e9, loss=3.14159)
    # 2048 tokens and 0.15 GFLOP each half second on a machine of 1 GFLOP/s; 90 steps of 0.5 s to go
    assert progress.line(loss=3.14159) == "sft   10/100   10%  loss 3.142  4.1k tok/s  30% of peak  ETA 0:45"


def test_only_recent_and_own_steps_count_for_the_speed():
    clock = Clock()
    progress = Progress(1000, start=500, stream=io.StringIO(), clock=clock)
    clock.now += 3600  # a slow first step
    progress.update(501, tokens=10)
    for step in range(502, 541):
        clock.now += 1
        progress.update(step, tokens=10)
    assert "10 tok/s" in progress.line() and "ETA 7:40" in progress.line()


def test_without_a_terminal_lines_are_plain_and_rare():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, stream=stream, clock=clock)
    for step in range(1, 101):
        clock.now += 1
        progress.update(step, loss=1.0)
    progress.close()
    text = stream.getvalue()
    assert "\r" not in text and "\x1b" not in text
    steps = [int(line.split()[1].split("/")[0]) for line in text.splitlines()]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


@pytest.mark.parametrize(("seconds_per_row", "shown"), [(1, []), (4, [3, 6]), (20, [1, 2, 3, 4, 5, 6])])
def test_of_a_part_that_is_done_soon_nothing_is_shown(seconds_per_row, shown):
    clock, stream = Clock(), io.StringIO()
    progress = Progress(6, label="validate", only_if_slow=True, stream=stream, clock=clock)
    for row in range(1, 7):
        clock.now += seconds_per_row
        progress.update(row)
    progress.close()
    assert [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()] == shown


def test_on_a_terminal_one_line_is_redrawn_and_notes_stand_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    progress = Progress(1000, stream=stream, clock=clock)
    for step in range(1, 101):
        clock.now += 0.01
        progress.update(step, loss=1.0, a_long_name_to_overflow_the_line="x" * 50)
    progress.note("valid 1.23 bits per byte")
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 2 and text.endswith("\nvalid 1.23 bits per byte\n")
    drawn = text.split("\r\x1b[2K")[1:]
    assert 9 <= len(drawn) <= 11  # a second at ten redraws a second
    assert all(len(line.split("\n")[0]) < 40 for line in drawn)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.7, "1:00:00"), (90061, "25:01:01")]
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


def test_two_lines_on_one_terminal_do_not_tear_each_other(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    one, two = StatusLine(terminal), StatusLine(terminal)
    one.show("one")
    two.show("two")  # in the place of the first
    two.note("of the second")
    one.end()  # there is nothing left to end
    two.show("two again")
    one.end()
    two.end()
    assert terminal.getvalue() == "\r\x1b[2Kone\r\x1b[2Ktwo\nof the second\n\r\x1b[2Ktwo again\n"
