"""The curriculum by pass rate: the Gaussian of each batch, what is left out, and that no prompt comes twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.rl import CurriculumConfig
from nemotron.stack.environments import generate_tasks
from nemotron.stack.rl.curriculum import Curriculum, allocate, gaussian_shares
from nemotron.stack.rl.prompts import PromptSource

EIGHTHS = [level / 8 for level in range(9)]


def settings(**values: float) -> CurriculumConfig:
    return CurriculumConfig.model_validate(values)


def drawn_rates(curriculum: Curriculum, step: int) -> Counter[float]:
    taken = [taken for _, taken in curriculum.draws[step]]
    return Counter(dict(zip(curriculum.rates_L.tolist(), taken, strict=True)))


def test_each_batch_follows_the_density_around_a_mean_that_falls_linearly() -> None:
    pass_rates = [rate for rate in EIGHTHS for _ in range(100_000)]
    curriculum = Curriculum(pass_rates, 1_000, 5, settings(start_mean=0.9, end_mean=0.1, std=0.2))
    for step, mean in enumerate((0.9, 0.7, 0.5, 0.3, 0.1)):
        densities = {rate: NormalDist(mean, 0.2).pdf(rate) for rate in EIGHTHS if rate < 1.0}
        counts = drawn_rates(curriculum, step)
        assert counts.total() == 1_000 and set(counts) == set(densities)
        for rate, density in densities.items():
            assert abs(counts[rate] - 1_000 * density / sum(densities.values())) < 1


def test_a_mean_far_from_every_level_takes_the_nearest_one() -> None:
    assert gaussian_shares(np.array([0.0, 0.125]), 1.0, 0.01).tolist() == [0.0, 1.0]


def test_shares_are_rounded_by_largest_remainder() -> None:
    taken = allocate(np.array([0.14, 0.43, 0.43]), np.array([9, 9, 9]), 4)  # 0.56, 1.72, 1.72
    assert taken.tolist() == [0, 2, 2]


def test_what_a_level_lacks_comes_from_the_largest_pools_that_are_left() -> None:
    taken = allocate(np.array([0.0, 0.0, 1.0]), np.array([4, 6, 5]), 10)
    assert taken.tolist() == [2, 3, 5], "6 4: the second first, then in turn; 3 of it, 2 of the first"


@pytest.mark.parametrize(("drop", "kept"), [(1.0, 8), (0.75, 6), (2.0, 9)])
def test_prompts_of_a_high_pass_rate_are_left_out(drop: float, kept: int) -> None:
    curriculum = Curriculum(EIGHTHS, 1, 1, settings(drop_pass_rate=drop))
    assert curriculum.num_prompts == kept and curriculum.rates_L.tolist() == EIGHTHS[:kept]


def write_prompts(path: Path, rates: list[float]) -> Path:
    """As many math prompts and as many questions with choices as there are rates."""
    with path.open("w", encoding="utf-8") as lines:
        for family in ("math", "multiple_choice"):
            tasks = generate_tasks(family, "train", len(rates), 3, distinct=True)
            for task, rate in zip(tasks, rates, strict=True):
                lines.write(json.dumps({"task": task.to_dict(), "pass_rate": rate}) + "\n")
    return path


def test_batches_keep_the_mixture_repeat_no_prompt_and_do_not_depend_on_what_was_drawn_before(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "train.jsonl", [rate for rate in EIGHTHS[:8] for _ in range(5)])  # 40 of each
    families = {"math": 3.0, "multiple_choice": 1.0}
    source = PromptSource(path, families, 16, 7)
    source.follow(settings(), 3)
    batches = [source.batch(step) for step in range(3)]
    for batch in batches:
        assert Counter(task.family for task in batch) == {"math": 12, "multiple_choice": 4}
    every = [task.canonical for batch in batches for task in batch]
    assert len(set(every)) == len(every) == 48
    resumed = PromptSource(path, families, 16, 7)
    resumed.follow(settings(), 3)
    assert resumed.batch(2) == batches[2] and source.batch(2) == batches[2]
    other = PromptSource(path, families, 16, 8)
    other.follow(settings(), 3)
    assert other.batch(0) != batches[0]


def test_the_logged_pass_rate_is_that_of_the_prompts(tmp_path: Path) -> None:
    rates = [rate for rate in EIGHTHS for _ in range(5)]
    path = write_prompts(tmp_path / "train.jsonl", rates)
    of_task = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        of_task[record["task"]["canonical"]] = record["pass_rate"]
    source = PromptSource(path, {"math": 1.0, "multiple_choice": 1.0}, 16, 7)
    assert source.pass_rate(0) == {}
    source.follow(settings(), 4)
    means = []
    for step in range(4):
        mean = float(np.mean([of_task[task.canonical] for task in source.batch(step)]))
        assert source.pass_rate(step)["prompt_pass_rate"] == pytest.approx(mean, abs=1e-12)
        means.append(mean)
    assert means == sorted(means, reverse=True) and means[0] > 0.6 > 0.4 > means[-1]


def test_all_prompts_come_again_once_too_few_are_left(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "train.jsonl", [0.5, 0.5, 0.25, 0.25, 0.0])
    source = PromptSource(path, {"math": 1.0}, 5, 7)
    source.follow(settings(), 4)
    for step in range(4):
        assert len({task.canonical for task in source.batch(step)}) == 5, "an epoch is a batch"


def test_prompts_without_pass_rates_or_without_any_left_are_refused(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "train.jsonl", [0.75, 1.0])
    source = PromptSource(path, {"math": 1.0}, 2, 7)
    with pytest.raises(UserError, match=r"drop_pass_rate 0\.75 leaves no prompt of 'math'"):
        source.follow(settings(drop_pass_rate=0.75), 4)
    lines = path.read_text().splitlines()
    for rate in ("null", "1.5", "NaN", "true"):
        path.write_text("\n".join([lines[0], lines[1].replace("1.0}", f"{rate}}}")]))
        with pytest.raises(UserError, match=r"train.jsonl:2 has no pass_rate"):
            PromptSource(path, {"math": 1.0}, 2, 7).follow(settings(), 4)
