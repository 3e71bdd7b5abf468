"""A script's own dataclass as the schema of its configs: read from the text, whatever else the script imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_runspec.config import load_script_config
from nemo_runspec.config.help import key_lines
from nemo_runspec.config.schema import load_schema
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse

BLOCK = """# /// script
# [tool.runspec]
# name = "garden/beds"
# setup = "none"
# config = {default = "tiny", schema = "dig.py:Config"}
# ///
"""
SCRIPT = (
    BLOCK
    + '''"""Dig."""
from __future__ import annotations

import os.path
import a_library_that_takes_seconds
from a_library_that_takes_seconds import width  # a field of this name does not use it
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from nemo_runspec.user_files import UserFiles

DEPTHS = (1, 2)
Size = Literal["small", "large"]
OTHER = a_library_that_takes_seconds.start()


def deepest() -> list[int]:
    return [max(DEPTHS)]


@dataclass
class Config:
    plan: Annotated[Path, UserFiles()] | None = None  # where to dig
    depths: tuple[int, ...] = DEPTHS  # in cm, größer: tiefer
    more: list[int] = field(default_factory=deepest)
    width: Annotated[float, Field(gt=0)] = 0.5  # in m
    size: Size = "small"


raise RuntimeError("the script ran")
'''
)
Write = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()

    def write(text: str = SCRIPT, config: str = "") -> Path:
        (tmp_path / "config" / "tiny.yaml").write_text(config)
        (tmp_path / "dig.py").write_text(text, encoding="utf-8")
        load_schema.__globals__["_of_dataclass"].cache_clear()
        return tmp_path / "dig.py"

    return write


def test_fields_with_their_comments_defaults_and_limits_without_running_the_script(script: Write) -> None:
    assert [" ".join(line.split()) for line in key_lines(parse(script()))] == [
        "plan a path or null, default null: where to dig",
        "depths a list, each item an integer, default [1, 2]: in cm, größer: tiefer",
        "more a list, each item an integer, default [2]",
        "width a number > 0, default 0.5: in m",
        "size one of 'small', 'large', default small",
    ]
    config = load_script_config(script(config="size: large\n"), ["width=2"])
    assert (config.depths, config.more, config.width, config.size) == ((1, 2), [2], 2.0, "large")


def test_the_script_may_lie_in_a_folder_whose_name_is_not_utf8(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script()
    folder = tmp_path / "caf\udce9"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes no such name")
    for name in ("dig.py", "config"):
        (tmp_path / name).rename(folder / name)
    monkeypatch.chdir(folder)
    assert load_script_config(folder / "dig.py", ["--config", "tiny"]).width == 0.5


def test_a_dataclass_of_another_script_is_nested_and_extended_without_running_that(
    script: Write, tmp_path: Path
) -> None:
    (tmp_path / "garden").mkdir()
    (tmp_path / "garden" / "water.py").write_text(SCRIPT.replace("= 0.5  # in m", "= 3.0  # in l"))
    text = SCRIPT.replace("class Config:", "class Config(water.Config):").replace(
        "    size: Size", "    again: water.Config = field(default_factory=water.Config)  # for later\n    size: Size"
    )
    text = text.replace("import a_library", "from garden import water\nimport a_library")
    text = text.replace("    width: Annotated[float, Field(gt=0)] = 0.5  # in m\n", "")
    config = load_script_config(script(text), ["again.width=2"])
    assert (config.width, config.again.width, config.again.size) == (3.0, 2.0, "small")
    lines = [" ".join(line.split()) for line in key_lines(parse(tmp_path / "dig.py"))]
    assert {f"{key} a number > 0, default 3: in l" for key in ("width", "again.width")} <= set(lines)
    with pytest.raises(UserError) as refused:
        load_script_config(tmp_path / "dig.py", ["again.widht=2"])
    assert refused.value.hint == "did you mean again.width?"


def test_files_that_change_make_another_run(script: Write, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("here")
    path = script(config="plan: plan.txt\n")
    before = load_script_config(path, []).run.files
    (tmp_path / "plan.txt").write_text("there, rather")
    assert before is not None and load_script_config(path, []).run.files != before
    with pytest.raises(UserError, match=r"no such file: pln\.txt"):
        load_script_config(path, ["plan=pln.txt"])


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("widht=1", "command line: unknown key widht = 1", "did you mean width?"),
        ("width=-1", "command line: width = -1: must be a number > 0", "width: in m"),
        ("size=lage", "command line: size = 'lage': must be one of 'small', 'large'", None),
        (
            "run.soil=x",
            "command line: run.soil = 'x': no key of the config reads this input",
            None,
        ),
    ],
)
def test_what_is_refused(script: Write, word: str, message: str, hint: str | None) -> None:
    with pytest.raises(UserError) as refused:
        load_script_config(script(), [word])
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_an_input_is_what_a_key_reads(script: Write, tmp_path: Path) -> None:
    path = script(config="run: {map: a-map}\nplan: ${art:map,path}\n")
    with pytest.raises(UserError, match=r"run.map = a-map: no artifact 'a-map'"):
        load_script_config(path, [])
    (tmp_path / "plan.txt").touch()
    assert load_script_config(path, ["plan=plan.txt"]).plan == Path("plan.txt")  # a path in its place
    with pytest.raises(UserError) as refused:
        load_script_config(path, ["run.mpa=b-map"])
    assert refused.value.hint == "did you mean run.map?"


def test_a_script_without_the_class_or_with_a_broken_one_is_refused(script: Write) -> None:
    with pytest.raises(UserError, match="has no dataclass 'Config'") as refused:
        load_schema(parse(script(SCRIPT.replace("class Config", "class Confg"))))
    assert refused.value.hint == "did you mean Confg?"
    with pytest.raises(UserError, match=r"dig\.py fails to load: NameError: name 'heavy'"):
        load_schema(parse(script(SCRIPT.replace("= DEPTHS ", "= heavy "))))
    with pytest.raises(UserError, match=r"dig\.py:\d+: "):
        load_schema(parse(script(SCRIPT.replace("class Config:", "class Config"))))
