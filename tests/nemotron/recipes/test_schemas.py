"""Every key of every config says what it is: help pages and error messages take their words from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import nemotron.recipes
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, group_of, load_schema, optional_group
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
