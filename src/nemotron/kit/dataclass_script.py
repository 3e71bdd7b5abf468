"""Scripts whose config is a dataclass: `main(config) -> artifact`, called from a shell, a pipe or another script.

    @dataclass
    class Config:
        dataset_path: Path | None = None  # default: what the script before in the pipe made

    @step
    def main(config: Config) -> Checkpoint: ...

    if __name__ == "__main__":
        run_step(main, Config)

tyro makes the flags from the dataclass. What it lacks is a file of values (`--config`), which `nemo_runspec` checks and
resolves as that of every recipe: its schema is the same dataclass. A pipe goes before the artifacts that it names
(`${art:data,path}`), and a flag before both. A script that a launcher started with such a file is a run, with a folder
of its own and the artifact names of the config; one that a user starts is none.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NoReturn, ParamSpec, Protocol, TypeVar, get_type_hints

from nemo_runspec.artifacts import Registry
from nemo_runspec.artifacts.aside import aside_directory
from nemo_runspec.config import load_script_config
from nemo_runspec.config.dataclass_schema import pydantic_class
from nemo_runspec.config.interpolate import interpolate
from nemo_runspec.config.loader import load_config
from nemo_runspec.config.schema import schema_of
from nemo_runspec.config.validate import check_keys, validate
from nemo_runspec.env import output_root
from nemo_runspec.errors import UserError, run_main
from nemo_runspec.fingerprint import plain
from nemo_runspec.runspec import parse as parse_runspec
from nemo_runspec.user_files import expanded
from nemotron.kit.artifact import Artifact, script_scope
from nemotron.kit.commands import command_hint
from nemotron.kit.lineage import use_configured_tracker
from nemotron.kit.pipes import piped, print_complete, read_pipe, stdout_kept_for_the_map
from nemotron.kit.run import Run, open_run
from nemotron.kit.stop import stop_at_once


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


_ART = re.compile(r"\$\{art:\s*([\w.-]+)")
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


def step_config(config_class: type[ConfigClass], *given: str) -> ConfigClass:
    """A field with the config of a step that the script calls, of which it gives some fields itself: no flag may."""
    made: ConfigClass = field(default_factory=config_class, metadata={"given": given})
    return made


def run_step(main: Callable[[ConfigClass], Artifact], config_class: type[ConfigClass]) -> NoReturn:
    """Read the config from the command line, run `main`, print what it made for the next script in a pipe; then exit.

    The last line on stdout is a JSON map: what was made and what it was made from, each by its role. Exit codes are
    those of `run_main`.
    """

    def work() -> None:
        config = read_config(config_class)
        Registry.default().check_writable()
        _check_given(config)
        _check_output_dirs(config)
        with stdout_kept_for_the_map(), _run_of_launcher(config_class) or contextlib.nullcontext():
            use_configured_tracker()
            made = main(config)
        print(f"{made.ref}: {made.path}", file=sys.stderr)
        inputs = {role: f"art://{pinned.partition('@')[0]}" for role, pinned in made.inputs.items()}
        print_complete(inputs | {made.role(): made})

    stop_at_once()
    sys.exit(run_main(work, command_hint))


def read_config(config_class: type[ConfigClass], argv: list[str] | None = None) -> ConfigClass:
    """An instance of the dataclass from `--config NAME|FILE` (YAML), over which the flags of the command line win.

    The file's group `run` says where the script runs and what its artifacts are called; the dataclass has none.

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
        try:
            return adapter.validate_python(pydantic_class(config_class).model_validate(values).model_dump())
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{where}: {key} = {first['input']!r}: {first['msg']}") from None

    cli = functools.partial(
        tyro.cli,
        config_class,
        args=args,
        description=f"{config_class.__doc__} --config NAME or FILE reads values from YAML, over which flags win.",
        config=(tyro.conf.FlagConversionOff,),
    )
    parsed = cli() if file is None else cli(default=checked(_values_of(config_class, file, args), file))
    return checked(asdict(parsed), "command line")


def _take_config(args: list[str]) -> str | None:
    """Take `--config FILE` or `--config=FILE` out of `args`."""
    for i, argument in enumerate(args):
        if argument == "--config" and i + 1 < len(args):
            del args[i]
            return args.pop(i)
        if argument.startswith("--config="):
            return args.pop(i).partition("=")[2]
    return None


def _values_of(config_class: type, file: str, flags: list[str]) -> dict[str, Any]:
    """The values of a file, by its schema. For a script with a block it may be a name, and names artifacts.

    What a flag gives need not exist as an artifact. For the others a pipe goes before the names of the file.
    """
    script = _script_of(config_class)
    if _has_block(script):
        spec = parse_runspec(script)
        inputs = dict(_artifact_inputs(config_class, load_config(spec.config_dir, file, fmt=spec.config.format).data))
        flags = [flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags]
        helps = not {"_h", "help"}.isdisjoint(flags)  # a help page waits for nothing
        words = [f"{field}=null" for field in inputs if field in flags or helps]
        others = {key for field, key in inputs.items() if field not in flags}
        if others and not helps and not _is_job(file):
            words += [f"run.{key}={reference}" for key, reference in _from_pipe().items() if key in others]
        config = load_script_config(script, ["--config", file, *words])
    else:
        schema = schema_of(config_class)
        loaded = load_config(Path(), file)
        check_keys(loaded, schema)
        for field in dict(_artifact_inputs(config_class, loaded.data)):
            raise UserError(
                f"{loaded.origin(tuple(field.split('.')))}: {field}: only a single script's config names artifacts",
                f"give the folder of its payload: {field}: output/artifacts/NAME/1/payload",
            )
        config = validate(interpolate(loaded.data, loaded.origin), loaded, schema)
    return {key: value for key, value in plain(config).items() if key != "run"}


def _artifact_inputs(config_class: type, values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Fields that may be left out and are `${art:KEY,…}` in a file (`ifeval.base_path` for one in a group), and KEY."""
    hints = get_type_hints(config_class)
    for part in fields(config_class):
        value = values.get(part.name) if isinstance(values, dict) else None
        if is_dataclass(hints[part.name]):
            yield from _artifact_inputs(hints[part.name], value, f"{prefix}{part.name}.")
        elif part.default is None and isinstance(value, str) and (match := _ART.match(value)):
            yield prefix + part.name, match[1]


def _from_pipe() -> dict[str, str]:
    """What came through the pipe. UserError where nothing did: the file's artifacts may be those of another day."""
    references = read_pipe()
    if not references and piped():
        hint = "the script before it failed: see its message; where there is none, end the line with < /dev/null"
        raise UserError("nothing came through the pipe", hint)
    return references


def _check_given(config: Dataclass, prefix: str = "") -> None:
    """UserError: a value for what the script gives a step itself (`step_config`), which would be overwritten."""
    for part in fields(config):
        if (given := part.metadata.get("given")) is None:
            continue
        inner: Any = getattr(config, part.name)
        for name in given:
            if (chosen := attrgetter(name)(inner)) != attrgetter(name)(type(inner)()):
                hint = "give --scale for all steps" if name == "scale" else "run the step's own script"
                raise UserError(f"{prefix}{part.name}.{name} = {chosen}: this script decides it", hint)
        _check_given(inner, f"{prefix}{part.name}.")


def _check_output_dirs(config: object) -> None:
    """UserError for what `output_folder` would refuse, when the work is done, in any step of the config."""
    for name, value in vars(config).items():
        if is_dataclass(value):
            _check_output_dirs(value)
        elif name == "output_dir" and value is not None:
            _unused(value)


def _unused(output_dir: Path) -> Path:
    """The folder itself, with the home folder in place of `~`. UserError: it holds something."""
    folder = expanded(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir {folder} exists and is not empty", "give another folder, or remove it")
    return folder


def _has_block(script: Path) -> bool:
    return "# /// script" in script.read_text(encoding="utf-8").splitlines()


def _script_of(config_class: type) -> Path:
    return Path(str(sys.modules[config_class.__module__].__file__))


def _run_of_launcher(config_class: type) -> Run | None:
    """The run of a launcher's job, which has a `job.yaml` beside its config; None for what a user starts."""
    args, script = sys.argv[1:], _script_of(config_class)
    file = _take_config(args)
    if file is None or args or not _is_job(file):
        return None
    return open_run(load_script_config(script, ["--config", file]), script)


def _is_job(file: str) -> bool:
    return Path(file).with_name("job.yaml").is_file()


def first_published(*names: str) -> str:
    """The first of these artifacts that there is, else the last: a step goes on from what a step that may be left out
    made, or from what that step would have begun with."""
    there = Registry.default().names()
    first = next((name for name in names if name in there), names[-1])
    print(f"goes on from the latest {first}", file=sys.stderr)
    return first


@contextlib.contextmanager
def output_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder that a step fills and then publishes: the chosen one, which stays, or one of its own, which does not.

    Publishing copies the files, so that a chosen folder remains the user's. UserError if that folder holds something.
    """
    if chosen is not None:
        folder = _unused(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with aside_directory(output_root()) as folder:  # also removes what killed processes left
        yield folder
