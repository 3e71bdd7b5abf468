"""Training a judge, and with one: what is counted and said before and after a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from nemo_runspec.errors import RunFailed, UserError
from nemotron.recipes.nano3.stage2_rl import genrm
from nemotron.recipes.nano3.stage2_rl.genrm import comparisons_of, memory_needs, note_nothing_learned
from nemotron.recipes.nano3.stage2_rl.genrm_schema import GenRMConfig
from nemotron.recipes.nano3.stage2_rl.rlhf import judged_families, win_rate
from nemotron.recipes.nano3.stage2_rl.rlhf_schema import RLHFConfig
from nemotron.stack.environments import Solution, Task, generate_tasks
from nemotron.stack.evaluation.scoring import Completion
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.rl.prompts import PromptSource
from nemotron.stack.training.distributed import ALONE

NO_ROOM = (
    "step 3: nothing is learned, none of 4 comparisons leaves room for a verdict: "
    "raise policy.max_total_sequence_length"
)
MODEL = {"run": {"model": "model", "data": "data"}, "data": {"path": "data"}}


@pytest.mark.parametrize(
    ("batch_size", "group", "penalty", "copies", "completions"),
    [
        (1024, 8, 0.0, 1, 64),  # 16 tasks for 8 comparisons, 4 responses each; 8 verdicts on each comparison
        (1024, 16, 0.0, 1, 128),
        (1024, 2, 1e-4, 2, 64),
        (32, 2, 0.0, 1, 32),
    ],
)
def test_the_model_that_answers_and_the_reference_are_counted_beside_the_judge(
    batch_size: int, group: int, penalty: float, copies: int, completions: int
) -> None:
    values: dict[str, Any] = {
        "policy": {"model_name": "m", "generation": {"batch_size": batch_size, "max_new_tokens": 64}},
        "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": group},
        "loss_fn": {"reference_policy_kl_penalty": penalty},
    }
    needs = memory_needs(GenRMConfig.model_validate(MODEL | values), PRESETS["nano3-30b"], ALONE)
    assert (needs.copies, needs.completions) == (copies, completions)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("tool_comparison", "of tool_comparison the answer is a call of a tool; a judge compares texts"),
        ("workplace_assistant", "workplace_assistant has several turns; a judge compares single responses"),
    ],
)
def test_what_no_judge_can_compare_is_refused_with_its_reason(family: str, message: str) -> None:
    values = {"policy": {"model_name": "m", "generation": {"max_new_tokens": 64}}, "env": {"families": {family: 1}}}
    with pytest.raises(ValidationError, match=message):
        GenRMConfig.model_validate(MODEL | values)


def test_a_call_of_a_tool_is_one_response_and_no_text_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    own = Task("halves", "Half of 2?", "", {"tools": [tool]}, Solution("", ""))
    tasks = [*generate_tasks("tool_comparison", "train", 2), own]
    path.write_text("".join(json.dumps({"task": task.to_dict()}) + "\n" for task in tasks))
    environments: Any = {"halves": SimpleNamespace()}
    for family in ("tool_comparison", "halves"):
        source = PromptSource(path, {family: 1.0}, 2, 0, environments)
        source.check_single_responses("why")
        with pytest.raises(UserError, match=f"{family} has tasks whose answer is a call of a tool; a judge compares"):
            source.check_comparable()


@pytest.mark.parametrize(
    ("drawn", "usable", "notes"),
    [
        (4, 1, []),
        (0, 0, ["step 3: nothing is learned, no two responses of which one is better"]),
        (4, 0, [NO_ROOM]),
    ],
)
def test_a_step_without_a_usable_comparison_says_so(drawn: int, usable: int, notes: list[str]) -> None:
    noted: list[str] = []
    session: Any = SimpleNamespace(ranks=ALONE, progress=SimpleNamespace(note=noted.append))
    note_nothing_learned(session, 2, drawn, usable)
    assert noted == notes


@pytest.mark.parametrize(("allowed", "stops"), [(0.1, True), (0.3, False)])
def test_responses_that_cannot_be_verified_stop_the_run_where_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch, allowed: float, stops: bool
) -> None:
    values = {
        "policy": {"model_name": "m", "generation": {"max_new_tokens": 64}},
        "grpo": {"max_error_rate": allowed}, "env": {"families": {"math": 1}}, "judge": {"responses_per_task": 2},
    }  # fmt: skip
    cfg = GenRMConfig.model_validate(MODEL | values)
    tasks = generate_tasks("math", "train", 4, distinct=True)
    tasks[0] = replace(tasks[0], spec={})

    def answer(prompts: Sequence[str], **_: Any) -> list[Completion]:  # right, then wrong
        both = [(task.solution.answer, "no") for task in tasks]
        return [Completion(f"so</think>{text}", 1, 0.0, True) for pair in both for text in pair]

    data: Any = SimpleNamespace(template="nano3")
    drawn = comparisons_of(cfg, answer, data, tasks, 0)
    assert len(drawn.tasks) == 2 * 3
    too_many = r"no verdict on 2 of 8 responses, .*max_error_rate 0\.1"
    with pytest.raises(RunFailed, match=too_many) if stops else nullcontext():
        drawn.check_verified(cfg, ALONE)
    with_others = {"errors": 0.0, "responses": 12.0}  # of another rank: 2 of 20 are the allowed share
    monkeypatch.setattr(genrm, "sum_metrics", lambda mine, _: {k: v + with_others.get(k, 0) for k, v in mine.items()})
    drawn.check_verified(cfg, ALONE)


def test_where_no_family_was_drawn_and_evaluated_it_is_said_that_there_is_no_win_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {
        "run": {"model": "model", "data": "data", "judge": "judge"},
        "policy": {"model_name": "m", "generation": {"max_new_tokens": 64}},
        "judge": {"model_path": "j"}, "env": {"families": {"math": 1}},
    }  # fmt: skip
    cfg = RLHFConfig.model_validate(MODEL | values)
    assert judged_families(cfg, ["math", "multiple_choice"]) == ["math"] and not capsys.readouterr().err
    assert judged_families(cfg, ["multiple_choice"]) == []
    assert "no win rate: training drew math, and evaluation.families has multiple_choice" in capsys.readouterr().err


def test_a_win_rate_is_of_all_pairs_and_of_those_that_are_decided() -> None:
    changed, same = np.array([[1, 0.5], [1, 0], [0.5, 0.75], [0.5, 0.5]]), np.full((4, 2), 0.5)
    rates = win_rate([changed, same])
    assert rates["estimate"] == pytest.approx((4.75 / 8 + 0.5) / 2)
    assert rates["ties"] == 12 / 16
    assert rates["decided"]["estimate"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert 0 <= rates["decided"]["low"] < rates["decided"]["estimate"] < rates["decided"]["high"] <= 1
    assert win_rate([same])["decided"] is None
