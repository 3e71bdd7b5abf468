"""Scripts whose config is a dataclass: `main(config) -> artifact`, called from a shell, a pipe or another script.

    @dataclass
    class Config:
        dataset_path: Path | None = None  # default: what the script before in the pipe made

    @step
    def main(config: Config) -> Checkpoint: ...

    if __name__ == "__main__":
        run_step(main, Config)

tyro makes the flags from the dataclass; what it lacks is a file of defaults (`--config`) that is checked like them.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, ParamSpec, Protocol, TypeVar

from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.env import output_root
from nemo_runspec.errors import UserError, did_you_mean, run_main
from nemotron.kit.artifact import Artifact, script_scope
from nemotron.kit.commands import command_hint
from nemotron.kit.pipes import print_complete
from nemotron.kit.stop import stop_at_once


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


P = ParamSpec("P")
Made = TypeVar("Made", bound=Artifact)
ConfigClass = TypeVar("ConfigClass", bound=Dataclass)


def step(main: Callable[P, Made]) -> Callable[P, Made]:
    """What `main` loads are the inputs of what it saves, under the name of its script, whoever calls it."""
    script = Path(main.__globals__["__file__"])

    @functools.wraps(main)
    def call(*args: P.args, **kwargs: P.kwargs) -> Made:
        with script_scope(script):
            return main(*args, **kwargs)

    return call


def run_step(main: Callable[[ConfigClass], Artifact], config_class: type[ConfigClass]) -> NoReturn:
    """Read the config from the command line, run `main`, print what it made for the next script in a pipe; then exit.

    The last line on stdout is a JSON map: what was made and what it was made from, each by its role. Exit codes are
    those of `run_main`.
    """

    def work() -> None:
        made = main(read_config(config_class))
        print(f"{made.ref}: {made.path}", file=sys.stderr)
        inputs = {role: f"art://{pinned.partition('@')[0]}" for role, pinned in made.inputs.items()}
        print_complete(inputs | {made.role(): made})

    stop_at_once()
    sys.exit(run_main(work, command_hint))


def read_config(config_class: type[ConfigClass], argv: list[str] | None = None) -> ConfigClass:
    """An instance of the dataclass from `--config FILE` (YAML), over which the flags of the command line win.

    A file's group `run`, which a launcher writes, is left out: it says where the script runs, not what it does.

    Raises:
        UserError: the file cannot be read, has a key that is no field, or a value that does not fit it; a flag whose
            value is out of range. SystemExit with code 2, from tyro: an unknown flag.
    """
    import tyro
    from pydantic import TypeAdapter, ValidationError

    args = list(sys.argv[1:] if argv is None else argv)
    file = _take_config(args)
    adapter = TypeAdapter(config_class)

    def checked(values: dict[str, Any], where: str) -> ConfigClass:
        _check_names(config_class, values, where)
        try:
            return adapter.validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{where}: {key} = {first['input']!r}: {first['msg']}") from None

    options = (tyro.conf.FlagConversionOff,)
    if file is None:
        parsed = tyro.cli(config_class, args=args, config=options)
    else:
        parsed = tyro.cli(config_class, args=args, default=checked(_read_file(file), str(file)), config=options)
    return checked(asdict(parsed), "command line")


def _take_config(args: list[str]) -> Path | None:
    """Take `--config FILE` or `--config=FILE` out of `args`."""
    for i, argument in enumerate(args):
        if argument == "--config" and i + 1 < len(args):
            del args[i]
            return Path(args.pop(i))
        if argument.startswith("--config="):
            return Path(args.pop(i).partition("=")[2])
    return None


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values, _ = read_yaml(file.read_text("utf-8"), str(file))
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}") from None
    if not isinstance(values or {}, dict):
        raise UserError(f"{file}: not a mapping of keys to values")
    return {key: value for key, value in (values or {}).items() if key != "run"}


def _check_names(config_class: type, values: dict[str, Any], where: str, prefix: str = "") -> None:
    """UserError for a key that is no field of the dataclass, however deep."""
    known = {field.name: field for field in fields(config_class)}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {prefix}{key}", did_you_mean(key, known, "keys"))
        factory = known[key].default_factory
        if isinstance(value, dict) and isinstance(factory, type) and is_dataclass(factory):
            _check_names(factory, value, where, f"{prefix}{key}.")


@contextlib.contextmanager
def output_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder that a step fills and then publishes: the chosen one, which stays, or one of its own, which does not.

    Publishing copies the files, so that a chosen folder remains the user's. UserError if that folder holds something.
    """
    if chosen is not None:
        if chosen.exists() and (not chosen.is_dir() or any(chosen.iterdir())):
            raise UserError(f"output_dir {chosen} exists and is not empty", "give another folder, or remove it")
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
        return
    output_root().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="step-", dir=output_root()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
