"""What a user gets wrong costs one or two lines and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Nemotron = Callable[..., subprocess.CompletedProcess[str]]

REFUSALS = [
    ("nano4", "No such command 'nano4'. Did you mean 'nano3', 'nano2'?"),
    ("nano3 pretrian", "No such command 'pretrian'. Did you mean 'pretrain'?"),
    ("nano3 pretrain", "needs megatron-bridge, which is not installed"),  # the published run is the default
    ("nano3 pretrain -c phase2", "--run PROFILE; or another config, -c small, smoke, smoke-long_context, tiny,"),
    ("super3 sft", "the image nvcr.io/nvidia/nemo:26.08 has it"),
    ("nano3 pretrain -c tinny", "did you mean tiny?"),
    ("nano3 pretrain -c tiny --dry-rum", "did you mean --dry-run?"),
    ("nano3 data prep pretrain -c tiny tokenizer.vocab_sise=99", "did you mean tokenizer.vocab_size?"),
    ("nano3 data prep pretrain -c tiny --run slurm", "unknown profile 'slurm'"),
    ("nano3 pretrain -c tiny --dry-run", "make it: nemotron nano3 data prep pretrain -c tiny"),
    ("nano3 pipe -c tiny --from stf", "did you mean sft?"),
    ("nano3 pipe -c tiny --from", "requires an argument"),
    ("nano3 pipe -c tiny --from sft --from=rl", "option --from is given twice"),
    ("runs plot --metric loss a -m lr", "option --metric is given twice"),
    ("--run big nano3 pretrain", "as in nemotron COMMAND --run"),
    ("nano3 -c tiny pretrain", "as in nemotron nano3 COMMAND -c"),
    ("nano3 pipe -c tiny --from rl --to=sft", "--to sft comes before --from rl"),
    ("nano3 pipe -c tiny train.train_iters=5", "write STEP:train.train_iters=5"),
    ("nano3 pipe -c tiny pretrian:train.train_iters=5", "did you mean pretrain?"),
    ("nano3 pipe -c tiny pretrain:train.train_itres=5", "did you mean train.train_iters?"),
    ("nano3 chat --stage slf", "did you mean sft?"),
    ("nano3 chat", "as in nemotron nano3 chat -c tiny"),
    ("nano3 chat -c tiny", "make it: nemotron nano3 rl rlvr -c tiny-final"),
    ("nano3 chat -c curriculum", "make it: nemotron nano3 rl rlvr -c curriculum"),
    ("nano3 data prep sft", "choose one with -c NAME: calculator, lora, small, smoke, tiny"),
    ("data tokenize", "choose one with -c NAME: nano3_pretrain, own,"),
    ("artifacts show nano3-sft-model-tiny", "make it: nemotron nano3 sft -c tiny"),
    ("artifacts verify nothing:1", "no artifact 'nothing'"),
]


@pytest.mark.parametrize(("line", "message"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_a_mistake_is_refused_in_a_line_or_two(
    line: str, message: str, refused: Callable[[str], str], tmp_path: Path
) -> None:
    said = refused(line)
    assert message in said
    assert said.startswith("error: ")
    assert len(said.strip().splitlines()) <= 2
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "nano3 pretrain -c tinny --debug",
        "--debug nano3 pipe -c tinny",
        "artifacts verify nothing:1 --debug",
    ],
)
def test_debug_shows_the_traceback(line: str, nemotron: Nemotron) -> None:
    done = nemotron(line)
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "\nerror: " in done.stderr


def test_a_profile_with_an_unknown_executor_is_refused(nemotron: Nemotron, tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text('[big]\nexecutor = "slrum"\n')
    done = nemotron("nano3 data prep pretrain -c tiny --batch big")
    assert done.returncode == 2
    assert "executor = 'slrum'" in done.stderr and "did you mean slurm?" in done.stderr


def test_a_group_without_a_sub_command_shows_its_help(nemotron: Nemotron) -> None:
    done = nemotron("nano3")
    assert done.returncode == 2
    commands = done.stderr[done.stderr.index("Commands:") :].split("\n")[1:-1]
    names = [line.split()[0] for line in commands]
    assert names == ["pipe", "data", "pretrain", "sft", "rl", "eval", "quantize", "chat", "model"]
