"""What an exception becomes: text on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_runspec import errors
from nemo_runspec.errors import (
    EXIT_CODE_FILE,
    ArtifactError,
    Interrupted,
    Preempted,
    RunFailed,
    RunspecError,
    UserError,
    did_you_mean,
    nearest,
    run_main,
)
from nemo_runspec.execution.local import CPU_SETTINGS


def raising(error: BaseException) -> int:
    def main() -> None:
        raise error

    return run_main(main)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("bad key", "did you mean lr?"), 2, "error: bad key\ndid you mean lr?\n"),
        (RunFailed("loss is nan"), 1, "error: loss is nan\n"),
        (Interrupted("interrupted"), 130, "error: interrupted\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (Preempted("ckpt/7"), 143, "error: stopped on a signal; checkpoint saved: ckpt/7\nthe same command"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "error: /x: Permission denied\n"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), 2, "error: /x: Read-only file system\n"),
        (OSError(errno.ENOSPC, "full", "/x"), 1, "error: no space left on device: /x\n"),
        (RuntimeError("Io error: No space left on device (os error 28)"), 1, "error: no space left on device: /"),
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


@pytest.mark.parametrize(
    "error", [UserError("m", "h"), ArtifactError("m", "h", "n", corrupt=True), Preempted("c"), RunFailed("m").at("x")]
)
def test_an_error_comes_from_another_process_as_it_was(error: RunspecError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


PIPES = """
import multiprocessing, sys
from nemo_runspec.errors import run_main

def to_nobody():
    print("training", flush=True)
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    ours.send(1)

def much():
    for number in range(100_000):
        print(number)

sys.exit(run_main(globals()[sys.argv[1]]))
"""


def test_a_reader_that_left_is_no_error_and_another_pipe_that_broke_is_one() -> None:
    words = [sys.executable, "-c", PIPES]
    done = subprocess.run([*words, "to_nobody"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "training\n") and "BrokenPipeError" in done.stderr
    for buffering in ((), ("-u",)):
        with subprocess.Popen(
            [words[0], *buffering, *words[1:], "much"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 1


CLOSED = """
import os, subprocess, sys
from nemo_runspec.errors import run_main

def main():
    print("to nobody")
    with open(sys.argv[1], "w") as file:
        subprocess.run([sys.executable, "-c", "import sys; print(sys.stdout.isatty())"], check=True)
    sys.stdout.flush()

sys.exit(run_main(main))
"""


def test_a_closed_stdout_leads_nowhere_and_into_no_file(tmp_path: Path) -> None:
    words = ["sh", "-c", '"$0" -c "$1" "$2" >&-', sys.executable, CLOSED, str(tmp_path / "file")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_text() == ""


def test_a_current_folder_that_was_removed_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run_main(lambda: Path.cwd() and None) == 2
    assert capsys.readouterr().err == "error: the current folder has been removed\ncd to one that exists\n"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        raising(FileNotFoundError(errno.ENOENT, "No such file", "/x"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_what_has_no_handlers_of_its_own(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as left:
            run_main(lambda: signal.raise_signal(number))
        assert left.value.code == 143 and signal.getsignal(number) is signal.SIG_DFL
        assert capfd.readouterr().err == f"error: stopped by {number.name}\nthe same command starts again\n"
        signal.signal(number, signal.SIG_DFL)
        assert run_main(lambda: signal.signal(number, signal.SIG_IGN) and None) == 0
        assert signal.getsignal(number) is signal.SIG_IGN  # as the last process of a node does
    finally:
        signal.signal(number, before)


def test_what_is_denied_after_a_run_began_has_failed_and_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        errors.work_began = True  # as open_run does
        raise PermissionError(errno.EACCES, "Permission denied", "/checkpoints/7")

    assert run_main(main) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.endswith("error: /checkpoints/7: Permission denied\n")
    assert raising(PermissionError(errno.EACCES, "Permission denied", "/x")) == 2


def test_a_full_disk_is_named_where_the_error_names_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow and safetensors do not say which file they were writing."""
    full = tmp_path / "runs"
    full.mkdir()
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(full / "not-made-yet"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if path == full else 10))

    def write() -> None:
        raise RuntimeError("Error writing bytes: No space left on device")

    assert run_main(write) == 1
    assert capsys.readouterr().err.startswith(f"error: no space left on device: {full}\n")


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
    monkeypatch.setenv("RANK", "0")
    assert raising(Preempted("x")) == 143
    assert (tmp_path / "code").read_text() == "143\n"
    capsys.readouterr()
    monkeypatch.setenv("RANK", "1")
    assert raising(UserError("bad")) == 2
    assert capsys.readouterr().err == ""
    assert (tmp_path / "code").read_text() == "143\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_does_not_keep_rank_0_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_EXIT_CODE_FILE", "/dev/full")
    monkeypatch.setenv("RUNSPEC_RESTARTS", "1")  # with which one that has saved ends with 0, were that file written
    assert raising(Preempted("x")) == 143


def test_another_rank_speaks_where_rank_0_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNSPEC_EXIT_CODE_FILE", str(tmp_path / "code"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("nemo_runspec.errors.WAIT_FOR_THE_SAME_ERROR", 0.1)
    assert raising(UserError("bad")) == 2
    assert capsys.readouterr().err == "error: bad\n"
    assert not (tmp_path / "code").exists()


def test_another_rank_leaves_after_rank_0_has_spoken(tmp_path: Path) -> None:
    """A launcher ends all ranks once one has left, and rank 0 may be the slower one."""
    script = (
        "from nemo_runspec.errors import UserError, run_main\n"
        "def main():\n    print('refuses', flush=True)\n    raise UserError('bad')\n"
        "raise SystemExit(run_main(main))\n"
    )
    left = tmp_path / "exit_code"
    env = {**os.environ, "RANK": "1", EXIT_CODE_FILE: str(left)}
    pipe = subprocess.PIPE
    rank = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=pipe, stderr=pipe, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "refuses\n"
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.3)
    left.write_text("2\n", encoding="utf-8")
    assert rank.communicate(timeout=20)[1] == "" and rank.returncode == 2


def test_a_signal_after_all_is_done_kills_no_script(tmp_path: Path) -> None:
    """As Python takes the modules apart, which may last with torch among them; its own handlers are gone by then.

    SIGALRM stands for what a handler raised before that, and Python dropped.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys\n"
        "from nemo_runspec.errors import end_on_signals, run_main\n"
        "end_on_signals()\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGTERM, signal.SIGALRM)):\n"
        "        for number in numbers:\n"
        "            kill(pid, number)\n"
        "last = Last()\n"
        "sys.exit(run_main(lambda: None))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nearest_word() -> None:
    assert nearest("tiny", ["tiny", "zzz"]) is None  # nobody means what he has said already
    assert nearest("tiny", ["tiny", "Tiny"]) == "Tiny"
    assert nearest("trian_iters", ["train_iters", "lr"]) == "train_iters"
    assert nearest("TINY", ["tiny", "small"]) == "tiny"
    assert nearest("zzz", ["tiny", "small"]) is None
    assert did_you_mean("tny", ["tiny", "small"]) == "did you mean tiny?"
    assert did_you_mean("zzz", ["tiny", "small"], "configs") == "configs: tiny, small"
    assert did_you_mean("zzz", []) is None


@pytest.mark.parametrize("began", [False, True], ids=["before run_main", "in run_main"])
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "error: interrupted"),
        (signal.SIGTERM, 143, "error: stopped by SIGTERM"),
        (signal.SIGUSR1, 143, "error: stopped by SIGUSR1"),
        (signal.SIGHUP, 143, "error: stopped by SIGHUP"),
    ],
)
def test_signals_end_a_script_in_one_line(
    tmp_path: Path, number: signal.Signals, code: int, text: str, began: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "from nemo_runspec.errors import end_on_signals, run_main\n"
        "def main():\n"
        "    print('ready', flush=True)\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except Exception:\n"
        "        print('swallowed', flush=True)\n"
        "end_on_signals()\n" + ("sys.exit(run_main(main))\n" if began else "main()\n")
    )
    left = tmp_path / "code"
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {EXIT_CODE_FILE: str(left)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert said.startswith(text + "\n") and said.count("\n") <= 2
    assert left.read_text() == f"{code}\n"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("SIGINT", 130, "error: interrupted\n"),
        ("SIGTERM", 143, "error: stopped by SIGTERM\nthe same command starts again\n"),
    ],
)
@pytest.mark.parametrize("first", ["", "stop_at_once()"])  # which work on data calls, for handlers of its own
def test_a_signal_whose_exception_python_drops_ends_the_script_all_the_same(
    tmp_path: Path, name: str, code: int, text: str, first: str
) -> None:
    """As when it arrives in one of the callbacks of os.fork: here in a destructor, twice."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "from nemo_runspec.errors import end_on_signals, run_main\n"
        "from nemotron.kit.stop import stop_at_once\n"
        "class Dropping:\n"
        "    def __del__(self):\n"
        f"        signal.raise_signal(signal.{name})\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        time.sleep(0.5)\n"
        "def main():\n"
        f"    {first}\n"
        "    Dropping()\n"
        "    Slow()\n"
        "    time.sleep(20)\n"
        "end_on_signals()\n"
        "sys.exit(run_main(main))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", text)


def test_a_library_of_an_extra_that_is_missing_is_two_lines_and_any_other_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    (tmp_path / "other.py").write_text("import nowhere\n")
    env = {**os.environ, EXIT_CODE_FILE: str(tmp_path / "code")}
    for library in ("torch", "other"):
        (tmp_path / "train.py").write_text(
            f"from nemo_runspec.script import begin_script\nbegin_script()\nimport {library}\n"
        )
        done = subprocess.run([sys.executable, tmp_path / "train.py"], env=env, capture_output=True, text=True)
        if library == "torch":
            first, second = done.stderr.splitlines()
            assert first == "error: train.py needs torch, which is not installed"
            assert second.startswith("pip install -c") and second.endswith("[train]'")
            assert done.returncode == 2 and (tmp_path / "code").read_text() == "2\n"
    assert done.returncode == 1 and done.stderr.startswith("Traceback")


def test_threads_of_a_script_that_nobody_launched_wait_as_those_of_a_launched_one(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from nemo_runspec.script import begin_script\nbegin_script()\nimport os\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in CPU_SETTINGS}
    for own, expected in (({}, "PASSIVE 5000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE 5000")):
        done = subprocess.run([sys.executable, script], env=env | own, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


def test_another_rank_does_not_leave_before_rank_0_has_saved(tmp_path: Path) -> None:
    """A launcher ends all ranks once one has left, and passes on the signal that Slurm has sent to each of them."""
    script = (
        "import sys\nfrom nemo_runspec.errors import Preempted, run_main\n"
        "def main():\n    print('leaves', flush=True)\n    raise Preempted('x')\nsys.exit(run_main(main))\n"
    )
    left = tmp_path / "exit_code"
    env = {**os.environ, "RANK": "1", EXIT_CODE_FILE: str(left)}
    rank = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "leaves\n"
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.7)
    rank.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.3)
    left.write_text("143\n", encoding="utf-8")
    assert rank.wait(20) == 143


def test_the_caller_may_know_a_better_hint(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ArtifactError("no artifact 'soup'", "did you mean soap?", "soup")

    assert run_main(main, lambda error: f"cook {error.name}" if isinstance(error, ArtifactError) else None) == 2
    assert run_main(main, lambda error: None) == 2
    assert capsys.readouterr().err == (
        "error: no artifact 'soup'\ncook soup\nerror: no artifact 'soup'\ndid you mean soap?\n"
    )


def test_text_that_stdout_cannot_spell_is_no_traceback(tmp_path: Path) -> None:
    text = r"'caf\xe9 \u2192 \udce9'"
    script = f"import sys; from nemo_runspec.errors import run_main; sys.exit(run_main(lambda: print({text})))"
    for encoding, expected in [("ascii", rb"caf\xe9 \u2192 \udce9"), ("latin-1", b"caf\xe9 \\u2192 \\udce9")]:
        result = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True
        )
        assert (result.returncode, result.stdout.strip()) == (0, expected), result.stderr
