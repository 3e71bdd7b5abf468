"""`nemotron plan`: the whole command as a user runs it, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[[str], str]


def test_the_published_pretraining(here: Nemotron) -> None:
    done = here("plan nano3 pretrain --gpu h100 --nodes 128 --price 2")
    assert done.returncode == 0, done.stderr
    assert "933,806 iterations of 25,165,824 tokens" in done.stdout
    assert "1024 GPUs: TP1 PP1 CP1 EP8 DP1024" in done.stdout and "smallest that fits" in done.stdout


def test_the_numbers_agree_with_each_other(here: Nemotron) -> None:
    done = here("plan nano3 pretrain -c phase2 --gpu gb200 --nodes 64 --price 3 --json")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["iterations"] == 993_411 - 933_806  # phase 1 has done the others
    assert numbers["gpus"] == 256  # four a node
    assert numbers["memory_total_bytes"] == sum(numbers["memory_bytes"].values())
    assert numbers["iteration_seconds"] == pytest.approx(sum(numbers["seconds"].values()))
    assert numbers["gpu_hours"] == pytest.approx(256 * numbers["iterations"] * numbers["iteration_seconds"] / 3600)
    assert numbers["cost"] == pytest.approx(3 * numbers["gpu_hours"])
    assert numbers["tokens_a_day"] == pytest.approx(25_165_824 * 86_400 / numbers["iteration_seconds"])


@pytest.mark.parametrize(
    ("stage", "title"),
    [("super3 pretrain-phase2", "super3 pretrain-phase2 -c phase2: 198,682 iterations"),
     ("super3 rlvr2", "super3 rlvr2 -c rlvr2: "), ("nano3 rl-final", "nano3 rl-final -c final: ")],
)  # fmt: skip
def test_a_step_that_shares_a_script_has_its_own_config(stage: str, title: str, here: Nemotron) -> None:
    done = here(f"plan {stage}")
    assert done.returncode == 0 and done.stdout.startswith(title), done.stderr


@pytest.mark.slow
def test_a_plan_for_this_machine_measures_it(nemotron: Nemotron) -> None:
    done = nemotron("plan nano3 sft -c tiny --json")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["gpu"] == "cpu" and numbers["peak_flops_measured"] > 1e8
    assert numbers["tokens_an_iteration"] == 3 * 384  # rows of the packed data, whose config says how long they are
    assert numbers["hours"] > 0


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("plan nano4 pretrain", "no family 'nano4'", "did you mean nano3?"),
        ("plan nano3 pretran", "nano3 has no stage 'pretran'", "did you mean pretrain?"),
        ("plan nano3 pretrain -c defualt", "no config 'defualt'", "did you mean default?"),
        ("plan nano3 pretrain --gpu h10", "no GPU 'h10'", "did you mean h100?"),
        ("plan nano3 pretrain --nodes 5", "3072 is no multiple of 40 replicas", "the smallest that fits: 8 GPUs"),
        ("plan nano3 pretrain model.seq_lenght=1", "seq_lenght", "did you mean"),
        ("plan nano3 pretrain --gpu cpu", "the published size is for GPUs", "a plan for this machine: -c tiny"),
        ("plan nano3 pretrain --price inf", "--price inf: must be a finite number", "as in --price 2.5"),
        ("plan nano3 pretrain --node 5", "--node", "see: nemotron plan --help"),
    ],
)
def test_a_mistake_is_refused_in_two_lines(line: str, message: str, hint: str, refused: Refused) -> None:
    first, second = refused(line).splitlines()
    assert first.startswith("error: ") and message in first
    assert second.startswith(hint)


def test_a_config_of_the_embedded_stack_is_for_the_cpu(refused: Refused) -> None:
    assert "--gpu cpu" in refused("plan nano3 pretrain -c tiny --gpu h100")
    assert "no plan for RL on a CPU" in refused("plan nano3 rlvr -c tiny")
