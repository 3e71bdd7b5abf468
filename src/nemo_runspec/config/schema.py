"""The pydantic class that a script names for its configs: loaded by path, completed, and how to walk its groups.

The schema file is loaded by its path, so that neither the recipe nor its dependencies (torch) are imported. Where the
script names a dataclass of its own, `dataclass_schema` makes a pydantic class of that.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.dataclass_schema import dataclass_in, is_other_class, module_for, pydantic_class
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.runspec import Runspec
from nemo_runspec.words import shown

if TYPE_CHECKING:
    from pydantic import BaseModel

# What pydantic reads from a JSON list.
LISTS = (list, tuple, set, frozenset)
# Keys of the `run` group with a meaning of their own. Every other key there names an input artifact.
# `env` is a mapping (what the job asks its executor for, see `nemo_runspec.config.run_env`), `processes` a
# number; the others are text.
RESERVED_RUN_KEYS = (
    "script",
    "name",
    "config",
    "output",
    "results",
    "family",
    "stage",
    "root",
    "env",
    "files",
    "processes",
)
# What a schema must not bring in: a dry run would wait for seconds, and could not run where they are not installed.
_SLOW_TO_IMPORT = ("torch", "tensorflow", "jax")


def load_schema(spec: Runspec) -> type[BaseModel] | None:
    """The pydantic class that `spec` names, loaded by file path, its `run` group completed by the reserved keys.

    None where the script declares no schema. A dataclass of the script itself is read without running the script.

    Raises:
        UserError: the file imports a library that is slow to load (torch), fails to load, lacks the class, or a
            type that the class names.
    """
    if spec.schema_ref is None or spec.schema_path is None:
        return None
    from pydantic import BaseModel, PydanticUndefinedAnnotation

    path, name = spec.schema_path, spec.schema_ref.partition(":")[2]
    if path == spec.script_path and (of_dataclass := _of_dataclass(path, name)) is not None:
        return of_dataclass
    module = _load_module(path)
    schema = getattr(module, name, None)
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        members = vars(module).items()
        classes = [key for key, value in members if isinstance(value, type) and issubclass(value, BaseModel)]
        raise UserError(f"{shown(path)} has no pydantic class {name!r}", did_you_mean(name, classes, "classes"))
    try:
        schema.model_rebuild(_types_namespace=vars(module))
    except PydanticUndefinedAnnotation as error:
        raise UserError(f"{shown(path)}: {name} names a type {error.name} that is not defined or imported") from None
    return _with_run_keys(schema)


def schema_of(config_class: type) -> type[BaseModel]:
    """The schema of a dataclass that is loaded, for a file of values without a script's block."""
    return _with_run_keys(pydantic_class(config_class), any_input=True)


@functools.cache  # what the script says of it does not change while a command runs
def _of_dataclass(script: Path, name: str) -> type[BaseModel] | None:
    """None where the class is of another kind: a pydantic class beside what it configures."""

    def read(module: ModuleType) -> type[BaseModel] | None:
        return None if is_other_class(script, name) else schema_of(dataclass_in(script, name, module))

    return _load(script, read)


def reads_no_run(schema: type[BaseModel]) -> bool:
    """Whether the script has a dataclass, and so gets no `run` group: it reads an input by `${art:…}` alone."""
    return getattr(run_group(schema), "of_a_dataclass", False)


def _load_module(path: Path) -> ModuleType:
    # The script itself may have imported its schema already: then the config is an instance of that very class.
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
    if not path.is_file():
        raise UserError(f"cannot read {shown(path)}: no such file")

    def run(module: ModuleType) -> ModuleType:
        spec = importlib.util.spec_from_file_location(module.__name__, path)
        assert spec is not None
        assert spec.loader is not None
        module.__file__, module.__spec__ = str(path), spec
        spec.loader.exec_module(module)
        return module

    return _load(path, run)


Made = typing.TypeVar("Made")


def _load(path: Path, run: Callable[[ModuleType], Made]) -> Made:
    """What `run` makes in a new module for the file at `path`."""
    loaded_before = set(sys.modules)
    module = module_for(path)
    try:
        made = run(module)
    except Exception as error:
        del sys.modules[module.__name__]
        if isinstance(error, UserError):
            raise
        if isinstance(error, SyntaxError):
            raise UserError(f"{shown(Path(error.filename or path))}:{error.lineno}: {error.msg}") from None
        raise UserError(
            f"{shown(path)} fails to load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    slow = [library for library in _SLOW_TO_IMPORT if library in sys.modules and library not in loaded_before]
    if slow:
        raise UserError(
            f"{shown(path)}: it, or a module that it imports, imports {slow[0]}",
            "a schema and what it imports must load in a moment, so that a dry run does",
        )
    return made


def _with_run_keys(schema: type[BaseModel], *, any_input: bool = False) -> type[BaseModel]:
    """A subclass of `schema` whose `run` group also has the reserved keys, which every config has.

    So a schema declares only what is its own, the input artifacts, and the validated config still tells its script
    which config it is, and where it runs.

    Args:
        any_input: an input artifact need not be declared, as that of a dataclass, which has no `run` group.
    """
    from pydantic import BaseModel, ConfigDict, Field, create_model

    class Run(BaseModel):
        """The `run` group of a schema that declares none."""

        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    class RunOfAny(BaseModel):
        """The `run` group of a dataclass."""

        of_a_dataclass: typing.ClassVar = True
        model_config = ConfigDict(extra="allow", allow_inf_nan=False)
        __pydantic_extra__: dict[str, str | None]

    field = schema.model_fields.get("run")
    group = (None if field is None else optional_group(field.annotation)) or (RunOfAny if any_input else Run)
    fields: dict[str, Any] = {key: (str | None, None) for key in RESERVED_RUN_KEYS if key not in group.model_fields}
    if "env" in fields:
        fields["env"] = (dict[str, Any] | None, None)
    if "processes" in fields:
        fields["processes"] = (int | None, None)
    run = create_model(group.__name__, __base__=group, __module__=group.__module__, **fields)
    completed: dict[str, Any] = {"run": (run, Field(default_factory=run))}
    return create_model(schema.__name__, __base__=schema, __module__=schema.__module__, **completed)


def run_group(schema: type[BaseModel]) -> type[BaseModel]:
    """The class of the `run` group of a schema that `load_schema` returned."""
    group = optional_group(schema.model_fields["run"].annotation)
    assert group is not None
    return group


def run_defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Defaults of the schema's `run` group, so that an input that only the schema names is pinned too."""
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in run_group(schema).model_fields.items()
        if not field.is_required() and not field.default_factory_takes_validated_data
    }
    return {name: value for name, value in defaults.items() if value is None or isinstance(value, str)}


def leaf_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a schema, in order."""
    keys: list[str] = []
    for name, field in schema.model_fields.items():
        group = optional_group(field.annotation)
        keys += leaf_keys(group, f"{prefix}{name}.") if group else [prefix + name]
    return keys


def is_group(annotation: Any) -> bool:
    """Whether an annotation is a pydantic class."""
    from pydantic import BaseModel

    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def optional_group(annotation: Any) -> type[BaseModel] | None:
    """The pydantic class in `Group`, `Group | None` or `Annotated[Group, …]`, else None."""
    groups = [member for member in members(annotation) if is_group(member)]
    return groups[0] if len(groups) == 1 else None


def group_of(annotation: Any) -> Any:
    """The pydantic class of the items in `list[Group]` or `dict[str, Group]`, else None."""
    for member in members(annotation):
        group = optional_group(item_of(member))
        if group is not None:
            return group
    return None


def item_of(annotation: Any) -> Any:
    """The annotation of an item of a list or of a value of a mapping; None where there is none."""
    for member in members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin in LISTS and args:
            return args[0]
        if origin is dict and len(args) == 2:
            return args[1]
    return None


def members(annotation: Any) -> list[Any]:
    """The members of a union, with Annotated opened; the annotation itself otherwise."""
    if typing.get_origin(annotation) is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(annotation) for inner in members(member)]
    return [annotation]
