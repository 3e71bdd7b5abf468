"""What an exception becomes: text on stderr and an exit code."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nemo_runspec.errors import Interrupted, Preempted, RunFailed, UserError, did_you_mean, nearest, run_main


def raising(error: BaseException) -> int:
    def main() -> None:
        raise error

    return run_main(main)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("bad key", "did you mean lr?"), 2, "error: bad key\ndid you mean lr?\n"),
        (RunFailed("loss is nan"), 1, "error: loss is nan\n"),
        (Interrupted(), 130, "error: interrupted\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (Preempted("ckpt/7"), 143, "error: stopped on a signal; checkpoint saved: ckpt/7\nthe same command"),
        (OSError(errno.ENOSPC, "full", "/x"), 1, "error: no space left on device: /x\n"),
        (RuntimeError("Io error: No space left on device (os error 28)"), 1, "error: no space left on device\n"),
    ],
)
def test_exit_codes_and_messages(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    assert raising(error) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(text)
    assert captured.err.count("\n") <= 2
    assert captured.out == ""


def test_the_outcome_of_main_is_its_exit_code() -> None:
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 1) == 1


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_DEBUG", "1")
    assert raising(UserError("bad")) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("RUNSPEC_DEBUG", "0")
    assert raising(UserError("bad")) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_only_rank_0_speaks_and_leaves_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNSPEC_EXIT_CODE_FILE", str(tmp_path / "code"))
    monkeypatch.setenv("RANK", "1")
    assert raising(UserError("bad")) == 2
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "code").exists()
    monkeypatch.setenv("RANK", "0")
    assert raising(Preempted("x")) == 143
    assert (tmp_path / "code").read_text() == "143\n"


def test_nearest_word() -> None:
    assert nearest("trian_iters", ["train_iters", "lr"]) == "train_iters"
    assert nearest("TINY", ["tiny", "small"]) == "tiny"
    assert nearest("zzz", ["tiny", "small"]) is None
    assert did_you_mean("tny", ["tiny", "small"]) == "did you mean tiny?"
    assert did_you_mean("zzz", ["tiny", "small"], "configs") == "configs: tiny, small"
    assert did_you_mean("zzz", []) is None
