"""Difficulty in the configs: the limits of each field, the short form, and the nearest names of misspelt ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import nemotron.recipes.nano3 as recipe
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemotron.kit.schemas.difficulty import DifficultyConfig
from nemotron.stack.environments import FAMILIES, make_difficulty

NANO3 = Path(recipe.__file__).parent


def test_the_families_are_those_of_the_environments() -> None:
    assert tuple(DifficultyConfig.model_fields) == FAMILIES


# The widest that is taken, and each rule between fields: (family, fields, whether they are refused).
LIMITS: list[tuple[str, dict[str, Any], bool]] = [
    ("math", {"max_digits": 6, "multiply_digits": 6}, False),
    ("math", {"min_digits": 3}, True),  # above multiply_digits
    ("math", {"add": 0, "subtract": 0}, True),
    ("multiple_choice", {"kinds": []}, True),
    ("multiple_choice", {"kinds": ["bigest"]}, True),
    ("multiple_choice", {"num_options": 6, "min_digits": 1, "max_digits": 9}, False),
    ("multiple_choice", {"kinds": ["odd_one_out"], "words_per_category": 2}, True),
    ("structured_output", {"words_per_category": 16}, False),
    ("instruction_following", {"min_times": 4}, True),
    ("instruction_following", {"num_given": 8, "num_reorder": 8, "max_count": 8, "num_upper": 4}, False),
    ("structured_output", {"min_keys": 4}, True),
    ("structured_output", {"max_number": 10**9, "flags": False, "choices": False}, False),
    ("structured_output", {"max_numbr": 5}, True),
]


@pytest.mark.parametrize(("family", "fields", "refused"), LIMITS)
def test_the_limits_of_each_field(family: str, fields: dict[str, Any], refused: bool) -> None:
    if not refused:
        assert make_difficulty(family, fields) == DifficultyConfig.model_validate({family: fields}).get(family)
        return
    with pytest.raises(ValidationError):
        DifficultyConfig.model_validate({family: fields})
    with pytest.raises(UserError):
        make_difficulty(family, fields)


def test_the_resolved_config_is_as_short_as_the_one_written() -> None:
    assert DifficultyConfig().model_dump() == DifficultyConfig.model_validate({}).model_dump(mode="json") == {}
    assert DifficultyConfig().get("math") is None
    written = DifficultyConfig.model_validate({"math": {"max_digits": 4}}).model_dump(mode="json")
    assert list(written) == ["math"] and written["math"]["max_digits"] == 4
    assert DifficultyConfig.model_validate(written).model_dump(mode="json") == written


@pytest.mark.parametrize(
    ("script", "prefix"),
    [
        ("stage0_pretrain/data_prep.py", "tasks"),
        ("stage1_sft/data_prep.py", "tasks"),
        ("stage2_rl/data_prep.py", "tasks"),
        ("stage0_pretrain/train.py", "evaluation"),
        ("stage1_sft/train.py", "evaluation"),
        ("stage2_rl/rlvr.py", "evaluation"),
        ("stage3_eval/evaluate.py", "tasks"),
    ],
)
def test_every_script_refuses_a_misspelt_family_and_field(script: str, prefix: str) -> None:
    for key, value, hint in (
        ("mth.max_digits", "3", f"did you mean {prefix}.difficulty.math?"),
        ("math.max_digit", "3", f"did you mean {prefix}.difficulty.math.max_digits?"),
    ):
        with pytest.raises(UserError) as caught:
            load_script_config(NANO3 / script, ["--config", "tiny", f"{prefix}.difficulty.{key}={value}"])
        assert caught.value.hint == hint, caught.value
