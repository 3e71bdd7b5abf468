"""Every key of every config says what it is: help pages and error messages take their words from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import nemotron.recipes
from nemo_runspec.config import load_script_config
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, group_of, load_schema, optional_group
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse

RECIPES = Path(nemotron.recipes.__file__).parent
SCRIPTS = sorted(path for path in RECIPES.rglob("*.py") if "\n# [tool.runspec]" in path.read_text())


def undescribed(group: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in group.model_fields.items():
        below = optional_group(field.annotation) or group_of(field.annotation)
        if below is not None:
            yield from undescribed(below, f"{prefix}{name}.")
        elif not field.description:
            yield prefix + name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_key_is_described(script: Path) -> None:
    schema = load_schema(parse(script))
    assert schema is not None
    assert [key for key in undescribed(schema) if key.removeprefix("run.") not in RESERVED_RUN_KEYS] == []


def numbers(group: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a group and of those below it, and its field with the type and limits."""
    for name, field in group.model_fields.items():
        below = optional_group(field.annotation) or group_of(field.annotation)
        if below is not None:
            yield from numbers(below, f"{prefix}{name}.")
        else:
            yield prefix + name, field


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(RECIPES)))
def test_no_number_is_infinite_and_no_seed_too_large(script: Path) -> None:
    """A dry run passes neither what training cannot start with nor what ends it after an hour."""
    schema = load_schema(parse(script))
    assert schema is not None
    for key, field in numbers(schema):
        if key.rpartition(".")[2] == "seed":
            annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            adapter = TypeAdapter(annotation)
            for value in (2**64, 2**63):
                with pytest.raises(ValidationError):
                    adapter.validate_python(value)
            adapter.validate_python(2**31)
    for group in groups(schema):
        assert group.model_config.get("allow_inf_nan") is False, group


def groups(group: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A group and all below it."""
    yield group
    for field in group.model_fields.values():
        below = optional_group(field.annotation) or group_of(field.annotation)
        if below is not None:
            yield from groups(below)


def test_an_infinite_number_is_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"optimizer\.lr = inf: must be a finite number"):
        load_script_config(RECIPES / "nano3/stage0_pretrain/train.py", ["--config", "tiny", "optimizer.lr=.inf"])
