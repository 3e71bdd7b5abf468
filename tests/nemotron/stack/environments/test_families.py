"""What holds for every family: splits, determinism, conversations, refusals, baselines."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import xxhash

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.schemas.difficulty import DEFAULT_FAMILIES
from nemotron.stack.environments import (
    FAMILIES,
    Task,
    answer_of,
    best_constant_answer,
    evaluation_prompts,
    fraction_of_space_seen,
    generate_tasks,
    iter_tasks,
    nearest_neighbour_lookup,
    plain_answer,
    plain_prompt,
    plain_text,
    read_tasks,
    split_of,
    task_space_size,
    to_messages,
    verify,
)

SRC = Path(__file__).parents[4] / "src"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_task_is_in_two_splits_whatever_the_seed(family: str) -> None:
    drawn = {
        split: generate_tasks(family, split, 100, seed=seed) for seed, split in enumerate(("train", "valid", "eval"))
    }
    for split, tasks in drawn.items():
        for task in tasks:
            bucket = xxhash.xxh64(task.canonical.encode(), seed=0).intdigest() % 100
            assert split == ("eval" if bucket < 10 else "valid" if bucket < 15 else "train") == split_of(task.canonical)
    assert len({task.canonical for task in drawn["eval"]}) == 100  # held-out tasks are distinct


def test_the_splits_have_the_shares_that_are_documented() -> None:
    counts = Counter(split_of(f"math|{i}+1") for i in range(20_000))
    assert abs(counts["eval"] / 20_000 - 0.10) < 0.01 and abs(counts["valid"] / 20_000 - 0.05) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_longer_list_begins_with_the_shorter_and_another_seed_differs(family: str) -> None:
    tasks = generate_tasks(family, "train", 50, seed=1)
    assert generate_tasks(family, "train", 20, seed=1) == tasks[:20]
    assert [task for task, _ in zip(iter_tasks(family, "train", 1), range(20), strict=False)] == tasks[:20]
    assert generate_tasks(family, "train", 20, seed=2) != tasks[:20]


def test_every_process_draws_the_same_tasks() -> None:
    code = (
        "import json; from nemotron.stack.environments import *;"
        "print(json.dumps([t.to_dict() for f in FAMILIES for t in generate_tasks(f, 'eval', 20, 7)]))"
    )
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SRC), "PYTHONHASHSEED": other_hashes},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    here = [task.to_dict() for family in FAMILIES for task in generate_tasks(family, "eval", 20, 7)]
    assert json.loads(output) == here


@pytest.mark.parametrize("family", DEFAULT_FAMILIES)  # of one response
def test_a_demonstration_is_right_as_the_chat_template_renders_it(family: str) -> None:
    for task in generate_tasks(family, "train", 200):
        for thinking in (True, False):
            segments = chat.render_with_mask(to_messages(task, thinking), enable_thinking=thinking, template="nano3")
            response = chat.response_of("".join(text for text, trained in segments if trained), "nano3")
            assert verify(task, response, thinking=thinking).status == "score"
            assert verify(task, response).status == "score"
        assert plain_text(task).startswith(plain_prompt(task))
        assert plain_answer(plain_text(task).removeprefix(plain_prompt(task)), task.family) == task.solution.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_survive_json(family: str) -> None:
    for task in generate_tasks(family, "train", 20):
        assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task
    with pytest.raises(UserError, match="not a task record"):
        Task.from_dict({"family": family})


@pytest.mark.parametrize("family", DEFAULT_FAMILIES)
def test_prompts_and_demonstrations_are_short(family: str) -> None:
    for task in generate_tasks(family, "train", 500):
        assert len(task.prompt) < 160 and len(task.solution.answer) < 80 and len(task.solution.reasoning) < 80
        assert "\n" not in task.prompt + task.solution.reasoning + task.solution.answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"canonical": 5}, "canonical must be a string, not 5"),
        ({"prompt": None}, "prompt must be a string, not None"),
        ({"spec": "5"}, "spec must be an object, not '5'"),
        ({"solution": "5"}, "solution must be an object, not '5'"),
        ({"solution": {"reasoning": "", "answer": 5}}, "solution.answer must be a string, not 5"),
        ({"solution": {"reasoning": ""}}, "solution.answer missing"),
        ({"solution": {"reasoning": "", "answer": "", "stile": ""}}, "unknown key solution.stile"),
        ({"promt": "?"}, "unknown key promt"),
        ({"family": ["math"]}, "family must be a string"),
    ],
)
def test_a_record_that_is_no_task_is_named(change: dict[str, object], message: str) -> None:
    record = generate_tasks("math", "train", 1)[0].to_dict()
    assert Task.from_dict({**record, "solution": {"reasoning": "", "answer": "1"}}).solution.style == "careful"
    with pytest.raises(UserError) as caught:
        Task.from_dict({**record, **change})
    assert caught.value.message.startswith("not a task record: ") and message in caught.value.message
    for no_record in (None, [], "task"):
        with pytest.raises(UserError, match="an object is needed"):
            Task.from_dict(no_record)  # type: ignore[arg-type]


def test_the_prompts_that_no_training_text_may_contain() -> None:
    expected = [task.prompt for family in FAMILIES for task in generate_tasks(family, "eval", 20)]
    assert evaluation_prompts(20) == expected
    hard = {"math": {"max_digits": 4}}
    first = [task.prompt for task in generate_tasks("math", "eval", 20, difficulty=hard["math"])]
    assert evaluation_prompts(20, hard) == first + expected[20:]
    # A family with fewer evaluation tasks than asked for gives those that it has.
    small = {"math": {"min_digits": 1, "max_digits": 1, "multiply_digits": 1}}
    assert 0 < len(evaluation_prompts(100, small)) - 100 * (len(FAMILIES) - 1) < 20


def test_where_the_answer_begins() -> None:
    assert answer_of("2+3=5\n</think>\n5\n", thinking=True) == "5"
    assert answer_of("5", thinking=False) == "5"
    assert answer_of("2+3=5\n</think>\n5") == "5"
    assert answer_of("5", thinking=True) == ""  # the reasoning was never closed
    assert answer_of("5") == "5"


def test_a_broken_task_is_an_error_whose_score_is_not_a_number() -> None:
    for family in FAMILIES:
        task = generate_tasks(family, "train", 1)[0]
        broken = Task(family, task.prompt, task.canonical, {}, task.solution)
        verdict = verify(broken, task.solution.answer)
        assert verdict.status == "error" and math.isnan(verdict.score)
    unknown = Task("no_family", "", "", {}, task.solution)
    assert verify(unknown, "5").status == "error"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("maths", "train", {}), "unknown task family 'maths'", "math"),
        (("math", "test", {}), "unknown split 'test'", "train"),
        (("math", "train", {"max_digit": 3}), "unknown difficulty 'max_digit'", "max_digits"),
        (("math", "train", {"max_digits": "3"}), "max_digits = '3'", ""),
        (("math", "train", {"max_digits": True}), "max_digits = True", ""),
        (("math", "train", {"max_digits": 7}), "digits", ""),
        (("math", "train", {"careful_share": 1.5}), "careful_share = 1.5", ""),
        (("multiple_choice", "train", {"kinds": ["bigest"]}), "kinds", ""),
        (("multiple_choice", "train", {"kinds": "largest"}), "kinds", ""),
        (("multiple_choice", "train", {"num_options": 7}), "num_options = 7", ""),
        (("instruction_following", "train", {"words_per_category": 17}), "words_per_category = 17", ""),
        (("instruction_following", "train", {"max_times": 0}), "max_times", ""),
        (("instruction_following", "train", {"in_order_share": -0.1}), "in_order_share = -0.1", ""),
        (("structured_output", "train", {"min_keys": 4}), "min_keys", ""),
        (("structured_output", "train", 3), "mapping", ""),
    ],
)
def test_refusals_name_what_is_wrong(arguments: tuple, message: str, hint: str) -> None:
    family, split, difficulty = arguments
    with pytest.raises(UserError) as caught:
        generate_tasks(family, split, 1, difficulty=difficulty)
    assert message in caught.value.message and hint in (caught.value.hint or "")


def test_asking_for_more_distinct_tasks_than_there_are() -> None:
    tiny = {"min_digits": 1, "max_digits": 1, "multiply_digits": 1}
    with pytest.raises(UserError, match=r"only [0-9]+ distinct tasks"):
        generate_tasks("math", "eval", 100, difficulty=tiny)
    assert len(generate_tasks("math", "train", 500, difficulty=tiny)) == 500  # training draws with replacement


def test_the_best_constant_answer_to_four_options_is_a_little_above_a_quarter() -> None:
    tasks = generate_tasks("multiple_choice", "eval", 400)
    counts = Counter(task.solution.answer for task in tasks)
    best = best_constant_answer(tasks)
    assert (best.answer, best.score) == (counts.most_common(1)[0][0], counts.most_common(1)[0][1] / 400)


def test_looking_up_the_nearest_task_finds_it_again_and_knows_nothing_new() -> None:
    tasks = generate_tasks("math", "train", 300, distinct=True)
    assert nearest_neighbour_lookup(tasks, tasks) == 1.0
    assert nearest_neighbour_lookup(tasks, generate_tasks("math", "eval", 200)) < 0.05
    assert nearest_neighbour_lookup([], tasks) == 0.0


def test_the_fraction_of_the_space_that_was_seen() -> None:
    tasks = generate_tasks("math", "train", 1000, seed=3)
    canonicals = [task.canonical for task in tasks] + ["multiple_choice|x"]
    assert fraction_of_space_seen(canonicals, "math") == len({t.canonical for t in tasks}) / task_space_size("math")


def test_tasks_are_read_back_from_the_files_of_a_data_artifact(tmp_path: Path) -> None:
    tasks = [task for family in FAMILIES for task in generate_tasks(family, "train", 3)]
    assert read_tasks(tmp_path) == []
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_dict()) + "\n" for task in tasks[:6]))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"task": task.to_dict()}) + "\n" for task in tasks[6:]))
    assert read_tasks(tmp_path) == tasks
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl:7: not a task record"):
        read_tasks(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"family": 3}\n')
    with pytest.raises(UserError, match=r"tasks\.jsonl:1: not a task record: family must be a string, not 3"):
        read_tasks(tmp_path)


def test_preference_pairs_are_no_tasks_but_their_artifact_may_list_some(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": [], "chosen": [], "rejected": []}\n' * 2)
    assert read_tasks(tmp_path) == []
    (task,) = generate_tasks("math", "train", 1)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task.to_dict()))
    assert read_tasks(tmp_path) == [task]
