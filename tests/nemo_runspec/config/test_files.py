"""Files that a config names: those of marked fields exist, and their digest is part of the run's identity."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.config import load_config, resolve_config
from nemo_runspec.config.script import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.fingerprint import config_fingerprint
from nemo_runspec.runspec import parse

SCHEMA = """
from typing import Annotated

from pydantic import BaseModel, ConfigDict
from nemo_runspec.user_files import UserFiles

Location = Annotated[str, UserFiles()]


class Source(BaseModel):
    paths: list[Location] = []
    label: str = "mine"


class Cfg(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tokenizer: Location | None = None
    sources: list[Source] = []
    named: dict[str, Source] = {}
    pages: list[Annotated[Location, UserFiles(hint=lambda location: f"write pages=[{location}, …]")]] = []
    style: Annotated[
        str, UserFiles(names=("plain",), check=lambda path: None if path.suffix == ".txt" else f"no text: {path.name}")
    ] = "plain"
"""


@pytest.fixture(autouse=True)
def here(project: Path, write: Callable[[str, str], Path]) -> Path:
    write("schema.py", SCHEMA)
    write("config/tiny.yaml", "run: {output: demo-model}\n")
    for name in ("docs/a.txt", "docs/.hidden", "b.txt"):
        write(name, "x")
    return project


def resolve(*overrides: str) -> dict[str, Any]:
    spec = parse("train.py")
    return resolve_config(load_config(spec.config_dir, "tiny", overrides), spec).data


@pytest.mark.parametrize(
    "override",
    ["tokenizer=docs", "sources=[{paths: [b.txt, docs]}]", "named={a: {paths: ['docs/*.txt']}}", "pages=[docs/a.txt]"],
)
def test_every_marked_field_counts(override: str, write: Callable[[str, str], Path]) -> None:
    before = resolve(override)["run"]["files"]
    assert before is not None and resolve(override)["run"]["files"] == before
    write("docs/.hidden", "changed")
    assert resolve(override)["run"]["files"] == before
    write("docs/a.txt", "changed")
    assert resolve(override)["run"]["files"] != before


def test_no_files_no_digest(write: Callable[[str, str], Path]) -> None:
    assert resolve()["run"]["files"] is None
    assert resolve("sources=[{paths: ['s3://bucket/x']}]", "named={a: {label: docs}}")["run"]["files"] is None
    write("artifact.json", "{}")  # which alone says nothing of what lies below it
    assert resolve("sources=[{paths: [docs/a.txt]}]")["run"]["files"] is not None
    for name in ("artifact.json", "manifest.sha256", "payload/a.txt"):
        write(f"corpus/1/{name}", "{}")  # published: known by its digest, and the times of this copy say nothing
    assert resolve("sources=[{paths: [corpus/1/payload/a.txt]}]")["run"]["files"] is None


def test_command_and_script_find_the_same_run(here: Path) -> None:
    override = "sources=[{paths: [docs]}]"
    spec = parse("train.py")

    def fingerprints() -> set[str]:
        script = load_script_config("train.py", ["--config", "tiny", override])
        return {config_fingerprint(resolve(override), spec, {}), config_fingerprint(script, spec, {})}

    first = fingerprints()
    assert len(first) == 1
    os.utime("docs/a.txt", ns=(1, 1))
    assert len(first | fingerprints()) == 2


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        (
            "sources=[{}, {paths: [b.txt, c.txt]}]",
            r"command line: sources\.1\.paths\.1: no such file: c\.txt",
            "b.txt?",
        ),
        ("named={a: {paths: ['*.csv']}}", r"command line: named\.a\.paths\.0: no file matches \*\.csv", ""),
        ("pages=['*.csv']", r"command line: pages\.0: no file matches \*\.csv", "write pages=[*.csv, …]"),
    ],
)
def test_a_missing_file_is_refused_where_it_is_written(override: str, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        resolve(override)
    assert hint in (caught.value.hint or "")


def test_a_name_is_no_file_and_a_file_may_be_of_the_wrong_kind(write: Callable[[str, str], Path]) -> None:
    assert resolve("style=plain")["run"]["files"] is None
    assert resolve("style=b.txt")["run"]["files"] is not None
    write("picture.png", "x")
    with pytest.raises(UserError, match=r"command line: style: no text: picture\.png"):
        resolve("style=picture.png")
    with pytest.raises(UserError, match="command line: style: no such file: plane"):
        resolve("style=plane")
