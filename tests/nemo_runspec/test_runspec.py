"""The block of a script, read strictly."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse

Write = Callable[[str, str], Path]

FULL = '''
"""A script."""
# /// script
# dependencies = ["torch"]
#
# [tool.runspec]
# schema = "1"
# docs = "docs/runspec/v1/spec.md"
# name = "nano3/data/prep/sft"
# image = "registry/image:1"
# setup = """
# name = "not a key, but text"
# """
# [tool.runspec.run]
# launch = "torchrun"
# cmd = "python -u {script} --config {config} --fast"
# workdir = ".."
# [tool.runspec.config]
# dir = "../configs"
# default = "tiny"
# format = "yaml"
# schema = "schema.py:Cfg"
# [tool.runspec.resources]
# nodes = 4
# gpus_per_node = 0
# [tool.runspec.env]
# NCCL_DEBUG = "INFO"
# ///
print("never run")
'''


def block(body: str) -> str:
    """A script with `body` as its block; line 1 is `# /// script`, so line n of the body is line n + 1."""
    lines = textwrap.dedent(body).strip("\n").splitlines()
    return "\n".join(["# /// script", *(f"# {line}".rstrip() for line in lines), "# ///", "raise SystemExit(9)", ""])


MINIMAL = """
[tool.runspec]
schema = "1"
name = "demo"
"""


def test_every_field_is_read(write: Write, tmp_path: Path) -> None:
    write("stage/schema.py", "")
    (tmp_path / "configs").mkdir()
    spec = parse(write("stage/train.py", FULL))
    assert (spec.schema, spec.docs, spec.name, spec.image) == (
        "1",
        "docs/runspec/v1/spec.md",
        "nano3/data/prep/sft",
        "registry/image:1",
    )
    assert spec.setup == 'name = "not a key, but text"\n'
    assert (spec.family, spec.stage) == ("nano3", "data/prep/sft")
    assert spec.run.launch == "torchrun"
    assert spec.run.cmd == "python -u {script} --config {config} --fast"
    assert spec.run.workdir == tmp_path
    assert spec.script_path == tmp_path / "stage" / "train.py"
    assert spec.config_dir == tmp_path / "configs"
    assert (spec.config.default, spec.config.format) == ("tiny", "yaml")
    assert spec.schema_ref == "schema.py:Cfg"
    assert spec.schema_path == tmp_path / "stage" / "schema.py"
    assert (spec.resources.nodes, spec.resources.gpus_per_node) == (4, 0)
    assert spec.env == {"NCCL_DEBUG": "INFO"}
    assert spec.dependencies == ("torch",) and spec.to_dict()["dependencies"] == ["torch"]


def test_defaults_are_those_of_the_specification(write: Write, tmp_path: Path) -> None:
    spec = parse(write("s.py", block(MINIMAL)))
    assert (spec.family, spec.stage) == ("demo", "demo")
    assert (spec.docs, spec.image, spec.setup, spec.env) == ("", None, "", {})
    assert (spec.run.launch, spec.run.cmd, spec.run.workdir) == ("direct", "python {script} --config {config}", None)
    assert (spec.config.default, spec.config.format, spec.schema_ref) == ("default", "omegaconf", None)
    assert spec.config_dir == tmp_path / "config"
    assert (spec.resources.nodes, spec.resources.gpus_per_node) == (1, 8)


def test_paths_are_absolute_from_anywhere(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("s.py", block(MINIMAL))
    monkeypatch.chdir(tmp_path)
    assert parse("s.py").script_path == tmp_path / "s.py"


def test_a_fault_names_a_script_as_the_current_folder_does(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bad(write, MINIMAL + "image = 3").message.startswith("s.py:5: image = 3: must be")


def bad(write: Write, body: str) -> UserError:
    with pytest.raises(UserError) as caught:
        parse(write("s.py", block(body)))
    return caught.value


@pytest.mark.parametrize(
    ("body", "line", "words", "hint"),
    [
        (MINIMAL + 'imag = "x"', 5, "unknown runspec key 'imag'", "image"),
        (MINIMAL + '[tool.runspec.config]\ndir = "./cfg"', 6, 'config.dir = "./cfg": no such folder', None),
        (MINIMAL + '[tool.runspec.run]\nlaunch = "torchrn"', 6, "torchrun, ray, direct", "torchrun"),
        (MINIMAL + "[tool.runspec.run]\nlauncher = 1", 6, "unknown runspec key 'launcher' in [run]", "launch"),
        (MINIMAL + "[tool.runspec.run]\ncmd = 'python {script} \"{config}'", 6, "No closing quotation", None),
        (MINIMAL + '[tool.runspec.run]\ncmd = "python {script} {config!z}"', 6, "conversion", None),
        (MINIMAL + '[tool.runspec.run]\ncmd = "python {scrip} {config}"', 6, "unknown placeholder {scrip}", "{script}"),
        (MINIMAL + '[tool.runspec.run]\ncmd = "python {script}"', 6, "must hold {config}", None),
        (
            MINIMAL + '[tool.runspec.run]\nlaunch = "torchrun"\ncmd = "bash {config}"',
            7,
            'must start with "python "',
            None,
        ),
        (MINIMAL + "[tool.runspec.resources]\nnodes = 0", 6, "must be an integer >= 1", None),
        (MINIMAL + '[tool.runspec.resources]\ngpus_per_node = "8"', 6, "must be an integer >= 0", None),
        (MINIMAL + '[tool.runspec.config]\nformat = "toml"', 6, "omegaconf, yaml, json", None),
        (MINIMAL + '[tool.runspec.config]\nschema = "Cfg"', 6, '"file.py:Class"', None),
        (MINIMAL + '[tool.runspec.config]\nschema = "no.py:Cfg"', 6, "no such file", None),
        (MINIMAL + "[tool.runspec.env]\nA = 1", 6, "must be a string", None),
        (MINIMAL + "run = 3", 5, "must be a table", None),
        ('[tool.runspec]\nschema = "2"\nname = "x"', 3, 'reads schema "1"', None),
        ('[tool.runspec]\nschema = "1"', 2, "no 'name'", None),
        ('[tool.runspec]\nschema = "1"\nname = "/x"', 4, "words of letters", None),
        ('[tool.runspec]\nschema = "1"\nschema = "1"', 4, "bad TOML", None),
        ("[tool.other]", 1, "no [tool.runspec] table", "spec.md"),
    ],
)
def test_a_fault_names_file_line_and_what_is_allowed(
    write: Write, tmp_path: Path, body: str, line: int, words: str, hint: str | None
) -> None:
    error = bad(write, body)
    assert error.message.startswith(f"{tmp_path / 's.py'}:{line}: ")
    assert words in error.message
    assert "\n" not in error.message
    if hint is not None:
        assert error.hint is not None
        assert hint in error.hint


@pytest.mark.parametrize("value", ['"canary-1"', "4711"])
def test_a_secret_in_the_block_is_refused_and_not_repeated(write: Write, value: str) -> None:
    error = bad(write, f'{MINIMAL}[tool.runspec.env]\nPLAIN = "1"\nMY_API_KEY = {value}')
    assert error.message.endswith("s.py:7: env.MY_API_KEY looks like a secret, which has no value in a script")
    assert error.hint is not None and 'secrets = ["MY_API_KEY"]' in error.hint
    assert value.strip('"') not in str(error)


def test_a_password_in_the_block_is_refused_and_not_repeated(write: Write) -> None:
    error = bad(write, f'{MINIMAL}[tool.runspec.env]\nPROXY = "http://me:canary@proxy"')
    assert error.message.endswith("s.py:6: env.PROXY is an address with a password, which has no place in a script")
    assert error.hint is not None and 'secrets = ["PROXY"]' in error.hint
    assert "canary" not in str(error)


def test_a_script_has_exactly_one_block(write: Write, tmp_path: Path) -> None:
    one = block(MINIMAL)
    with pytest.raises(UserError, match=r"s\.py:8: two"):
        parse(write("s.py", one + "\n" + one))
    with pytest.raises(UserError, match="two"):  # without a line of code in between
        parse(write("s.py", one.replace("raise SystemExit(9)\n", "") + one))
    with pytest.raises(UserError, match="no `# /// script` block"):
        parse(write("s.py", "print()\n"))
    with pytest.raises(UserError, match=r"s\.py:1: .*not closed"):
        parse(write("s.py", one.replace("# ///\n", "")))
    with pytest.raises(UserError, match=r"s\.py:1: .*not closed"):  # that one line and nothing else
        (tmp_path / "s.py").write_text("# /// script")
        parse(tmp_path / "s.py")
    with pytest.raises(UserError, match=r"s\.py:2: .*not closed"):  # a start in a docstring is one
        parse(write("s.py", '"""\n# /// script\n"""\n' + one))


@given(st.text(max_size=300))
def test_any_text_is_parsed_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "s.py"
    path.write_bytes(("# /// script\n" + text).encode("utf-8", "surrogatepass"))
    try:
        parse(path)
    except UserError as error:
        assert "\n" not in error.message
