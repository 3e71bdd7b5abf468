"""`nemotron runs`: the state of a run is what became of its process, and removing one leaves what it published."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner, Result

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import Preempted, RunFailed, UserError
from nemotron.cli.main import app
from nemotron.kit import Dataset, Results, Run, open_run, runs
from nemotron.kit.runs import RecordedRun, find_run, inputs_in_use, recorded_runs


@pytest.fixture
def raw(out: Path) -> Dataset:
    return Dataset(path=out, num_examples=2, train_path=out / "train.jsonl", sources=["a book"]).save("raw")


def opened(script: Path, *overrides: str) -> Run:
    return open_run(load_script_config(script, ["--config", "tiny", *overrides]), script=script)


def command(line: str) -> Result:
    return CliRunner().invoke(app, ["runs", *line.split()])


def only() -> RecordedRun:
    (run,) = recorded_runs()
    return run


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        (None, "finished"),
        (RunFailed("loss is nan", "a smaller lr helps"), "failed"),
        (ZeroDivisionError("by zero"), "failed"),
        (Preempted("step-00000003"), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(143), "stopped"),
    ],
    ids=["finished", "failed", "bug", "preempted", "ctrl-c", "signal"],
)
def test_the_state_of_a_run_is_how_it_ended(
    script: Path, raw: Dataset, error: BaseException | None, condition: str
) -> None:
    try:
        with opened(script):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert only().condition == condition
    shown = command("show toy/train").output
    assert f"state        {condition}" in shown
    if isinstance(error, RunFailed):
        assert "failed: loss is nan\n" in shown
    with opened(script) as again:  # a run that did not finish is resumed, as before
        assert again.resumed == (error is not None)
    assert only().condition == "finished" and "why" not in only().state


def test_a_run_at_work_is_running_and_one_that_was_killed_is_not(script: Path, raw: Dataset) -> None:
    code = (
        "import sys, time\nfrom nemo_runspec.config import load_script_config\nfrom nemotron.kit import open_run\n"
        "script = sys.argv[1]\nrun = open_run(load_script_config(script, ['--config', 'tiny']), script=script)\n"
        "run.metrics.log(5, loss=2.5)\nprint('open', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        assert only().condition == "running"
        assert [" ".join(line.split()[1:5]) for line in command("list").output.splitlines()] == ["running 5 loss 2.5"]
        with pytest.raises(UserError, match="a process is at work there"):
            raise command("rm toy/train --force").exception or AssertionError
    finally:
        process.kill()
        process.wait()
    assert only().condition == "killed"
    with pytest.raises(UserError, match="killed, and the same command would go on there"):
        raise command("rm toy/train").exception or AssertionError
    assert command("rm toy/train --force").exit_code == 0 and recorded_runs() == []


def test_removing_a_run_leaves_what_it_published(script: Path, raw: Dataset, registry: Registry) -> None:
    with opened(script) as run:
        Results(metrics={"loss": 2.5}).save()
        (run.dir / "log.txt").write_text("x" * 2500)
    result = command(f"rm {run.fingerprint[:6]}")
    assert result.output.startswith(f"removed toy/train/tiny-{run.fingerprint}, ")
    assert result.output.endswith(" freed; stays: toy-train-results-tiny:1\n")
    assert not run.dir.exists() and registry.verify("toy-train-results-tiny:1") == []
    assert list(run.dir.parent.iterdir()) == []


def test_a_full_disk_keeps_no_run_from_being_removed(
    script: Path, raw: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(script) as run:
        pass

    def full(root: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(root))

    monkeypatch.setattr(runs, "aside_directory", full)
    assert command(f"rm {run.fingerprint}").output.startswith(f"removed toy/train/tiny-{run.fingerprint}, ")
    assert not run.dir.exists()


def test_runs_on_another_disk_are_seen_through_a_link(script: Path, raw: Dataset, tmp_path: Path) -> None:
    """Else `artifacts gc` would remove what one of them still reads."""
    with pytest.raises(RunFailed), opened(script) as run:
        raise RunFailed("out of memory")
    family = run.dir.parent.parent
    (family.rename(tmp_path / "disk") / "back").symlink_to(family)
    family.symlink_to(tmp_path / "disk")
    assert {each.condition for each in recorded_runs()} == {"failed"} and inputs_in_use() == {"raw:1"}
    run.dir.symlink_to(run.dir.rename(tmp_path / "moved"))
    assert command(f"rm {run.fingerprint} --force").output.startswith(f"removed toy/train/tiny-{run.fingerprint}, ")
    assert recorded_runs() == [] and not run.dir.is_symlink() and not (tmp_path / "moved").exists()


def test_a_word_that_names_nothing_removes_no_run_though_there_is_only_one(script: Path, raw: Dataset) -> None:
    with opened(script) as run:
        pass
    for word, why in (("", "name is empty"), ("/", "name is empty"), (run.fingerprint[:3], "at least 4 characters")):
        with pytest.raises(UserError, match=why):
            raise CliRunner().invoke(app, ["runs", "rm", word]).exception or AssertionError
        assert run.dir.is_dir()
    assert find_run(run.fingerprint[:4]).directory == run.dir


def test_a_run_is_named_by_folder_end_of_name_fingerprint_or_stage(script: Path, raw: Dataset, tmp_path: Path) -> None:
    for rate in ("0.2", "0.3"):
        with opened(script, f"lr={rate}") as run:
            run.metrics.log(1, loss=3.0, valid_loss={"web": 2.0})
            run.metrics.log(2, loss=float("nan"))
    for word in (str(run.dir), run.dir.name, run.fingerprint[:8], "toy/train", "train"):
        assert find_run(word).directory == run.dir
    shown = command("show train").output.splitlines()
    assert "metric       loss nan" in shown and any(line.split() == ["valid_loss.web", "2"] for line in shown)
    assert "lr: 0.3" in command("show train --config").output
    assert len(command("list toy").output.splitlines()) == 2 and "no run with 'rl'" in command("list rl").output
    with pytest.raises(UserError, match=r"no run 'xyz' in .*\nnemotron runs list names them") as refused:
        raise command("show xyz").exception or AssertionError
    assert refused.value.exit_code == 2
    with pytest.raises(UserError, match=r"did you mean toy/train\?"):
        find_run("toy/trian")
    with pytest.raises(UserError, match=r"no run 'toy/rl'") as refused:
        find_run("toy/rl")
    assert refused.value.hint == "nemotron runs list names them"
    # what is not a run, cut off, or unreadable does not stop the list
    (tmp_path / "output" / "toy" / "train" / "tiny-0000000000").mkdir()
    (tmp_path / "output" / "toy" / "train" / "tiny-0000000000" / "run.json").write_text("{")
    assert [entry.condition for entry in recorded_runs()].count("finished") == 2
    (run.dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "loss": 4.5}) + '\n{"step": 2, "lo')
    assert find_run("train").last_metrics() == {"step": 1.0, "time": 1.0, "loss": 4.5}


def test_plots_take_the_newest_run_that_logged_metrics_and_say_so(
    script: Path, raw: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(script, "lr=0.2") as trained:
        trained.metrics.log(1, loss=4.5)
    with opened(script, "lr=0.3") as refused:
        pass
    os.utime(trained.dir / "metrics.jsonl", (1, 1))
    os.utime(trained.dir / "run.json", (1, 1))
    assert find_run("toy/train").directory == refused.dir
    assert capsys.readouterr().err == ""
    assert find_run("toy/train", logged=True).directory == trained.dir
    assert f"the newest, {find_run('toy/train').name} (finished), has logged no metrics" in capsys.readouterr().err
    assert find_run(refused.dir.name, logged=True).directory == refused.dir  # named itself
