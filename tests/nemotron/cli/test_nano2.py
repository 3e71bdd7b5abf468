"""`nemotron nano2`: the tutorial's scripts as commands, with no list of knobs but their dataclasses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.nemotron.cli.conftest import Nemotron

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.cli.main import _run

STAGES = {
    "pretrain": ["pretrain", "long"],
    "sft": ["sft"],
    "rl": ["rl"],
    "compress": ["prune", "distil"],
}
STEPS = [step for stage, steps in STAGES.items() for step in (f"data-{stage}", *steps, f"eval-{stage}")]
SMALL = (
    "data-pretrain:tasks_per_family=2000 data-pretrain:vocab_size=300 data-pretrain:held_out=12 "
    "pretrain:num_sequences=4000 pretrain:seq_length=32 pretrain:warmup_steps=1 long:num_sequences=200"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def say(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr("sys.argv", ["nemotron", *line.split()])
    return _run()


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("pretrain lrr=1e-3", "command line: unknown key lrr = 0.001", "did you mean lr?"),
        ("sft epochs=[1,1]", "command line: epochs = [1, 1]: must be a list of 3: ", "epochs: of "),
        ("data prep pretrain --scale smal", "command line: scale = 'smal': must be one of 'tiny', 'small'", "scale: 1"),
        ("data prep pretrain sources=[nowhere]", "command line: sources.0: no such file: nowhere", None),
        ("pipe sft:lr=-1", "step sft: command line: lr = -1: must be a number > 0", "lr: the smaller the model"),
        ("pretrain", "run.data = nano2-pretrain-data: no artifact 'nano2-pretrain-data' in ", None),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    line: str, message: str, hint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError) as refused:
        say(monkeypatch, f"nano2 {line}")
    assert refused.value.message.startswith(message)
    assert (refused.value.hint or "").startswith(hint or "")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_artifact_names_the_command_that_makes_it(here: Nemotron) -> None:
    done = here("nano2 sft -c tiny")
    assert done.returncode == 2
    assert (
        "make it: nemotron nano2 data prep sft -c tiny (with all before it: nemotron nano2 pipe -c tiny)" in done.stderr
    )


def test_the_pipe_has_all_steps_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "nano2 pipe --dry-run pretrain:lr=1e-3") == 0
    out = capsys.readouterr().out
    assert re.findall(r"^\[\d+/14\] (\S+)", out, re.MULTILINE) == STEPS
    read = re.findall(r"reads     (\w+) = (\S+)", out)
    assert read == [
        ("data", "nano2-pretrain-data:latest"),
        ("model", "nano2-pretrain-model:latest"),
        ("model", "nano2-long-model:latest"),
        ("model", "nano2-long-model:latest"),
        ("data", "nano2-sft-data:latest"),
        ("model", "nano2-long-model:latest"),  # its weights: the data's digest does not depend on them
        ("model", "nano2-sft-model:latest"),
        ("model", "nano2-sft-model:latest"),
        ("data", "nano2-rl-data:latest"),
        ("model", "nano2-sft-model:latest"),
        ("model", "nano2-rl-model:latest"),
        ("model", "nano2-rl-model:latest"),
        ("sft", "nano2-sft-data:latest"),
        ("pretrain", "nano2-pretrain-data:latest"),
        ("data", "nano2-compressed-data:latest"),
        ("model", "nano2-rl-model:latest"),
        ("model", "nano2-pruned-model:latest"),
        ("model", "nano2-compressed-model:latest"),
    ]
    assert len(set(re.findall(r"run dir   output/nano2/(\S+)/tiny-", out))) == 14
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
@pytest.mark.slow
def test_the_pipe_runs_what_has_changed(nemotron: Nemotron, tmp_path: Path) -> None:
    line = f"nano2 pipe --to eval-pretrain {SMALL}"
    first = nemotron(line, OMP_NUM_THREADS="1")
    assert first.returncode == 0, first.stderr
    registry = Registry(tmp_path / "output" / "artifacts")
    names = [f"nano2-{name}" for name in ("pretrain-data", "pretrain-model", "long-model", "pretrain-results")]
    data, base, long, results = (registry.resolve(name) for name in names)
    assert base.record["inputs"] == {"data": data.pinned}
    assert long.record["inputs"] == {"data": data.pinned, "model": base.pinned}
    assert results.record["inputs"]["model"] == long.pinned
    assert nemotron(line).stdout.count("skipped, published already") == 4
    again = nemotron(f"{line} pretrain:lr=1e-3", OMP_NUM_THREADS="1")
    assert again.stdout.count("skipped, published already") == 1, again.stdout
    assert [registry.resolve(name).version for name in names] == [1, 2, 2, 2]
