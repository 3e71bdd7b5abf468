"""Strict validation of config values against a script's pydantic class, with messages a reader can act on.

A message names where the value was written, the key, the value, what is allowed, and for a misspelt key the nearest.
The schema file is loaded by path, so that neither the recipe nor its dependencies (torch) are imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from nemo_runspec.config.allowed import allowed, group_of, optional_group
from nemo_runspec.config.interpolate import is_to_come
from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.yaml_text import KeyPath, dotted, read_scalar, shown
from nemo_runspec.errors import UserError, did_you_mean, nearest
from nemo_runspec.runspec import Runspec

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

# Keys of the `run` group with a meaning of their own. Every other key there names an input artifact.
# `env` is a mapping (what the job asks its executor for, see `nemo_runspec.config.run_env`); the others are text.
RESERVED_RUN_KEYS = ("script", "name", "config", "output", "results", "family", "stage", "root", "env", "files")
# What a schema must not bring in: a dry run would wait for seconds, and could not run where they are not installed.
_SLOW_TO_IMPORT = ("torch", "tensorflow", "jax")


def load_schema(spec: Runspec) -> type[BaseModel] | None:
    """The pydantic class that `spec` names, loaded by file path, its `run` group completed by the reserved keys.

    None where the script declares no schema.

    Raises:
        UserError: the file imports a library that is slow to load (torch), fails to load, or lacks the class.
    """
    if spec.schema_ref is None or spec.schema_path is None:
        return None
    from pydantic import BaseModel

    path, name = spec.schema_path, spec.schema_ref.partition(":")[2]
    module = _load_module(path)
    schema = getattr(module, name, None)
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        members = vars(module).items()
        classes = [key for key, value in members if isinstance(value, type) and issubclass(value, BaseModel)]
        raise UserError(f"{shown(path)} has no pydantic class {name!r}", did_you_mean(name, classes, "classes"))
    return _with_run_keys(schema)


def _load_module(path: Path) -> ModuleType:
    # The script itself may have imported its schema already: then the config is an instance of that very class.
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
    if not path.is_file():
        raise UserError(f"cannot read {shown(path)}: no such file")
    loaded_before = set(sys.modules)
    name = f"_runspec_schema_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module_object = importlib.util.module_from_spec(spec)
    sys.modules[name] = module_object  # pydantic looks annotations up there
    try:
        spec.loader.exec_module(module_object)
    except SyntaxError as error:
        del sys.modules[name]
        raise UserError(f"{shown(Path(error.filename or path))}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{shown(path)} fails to load: {type(error).__name__}: {_one_line(error)}") from error
    slow = [library for library in _SLOW_TO_IMPORT if library in sys.modules and library not in loaded_before]
    if slow:
        raise UserError(
            f"{shown(path)}: it, or a module that it imports, imports {slow[0]}",
            "a schema and what it imports must load in a moment, so that a dry run does",
        )
    return module_object


def _with_run_keys(schema: type[BaseModel]) -> type[BaseModel]:
    """A subclass of `schema` whose `run` group also has the reserved keys, which every config has.

    So a schema declares only what is its own, the input artifacts, and the validated config still tells its script
    which config it is, and where it runs.
    """
    from pydantic import BaseModel, ConfigDict, Field, create_model

    class Run(BaseModel):
        """The `run` group of a schema that declares none."""

        model_config = ConfigDict(extra="forbid")

    field = schema.model_fields.get("run")
    group = (None if field is None else optional_group(field.annotation)) or Run
    fields: dict[str, Any] = {key: (str | None, None) for key in RESERVED_RUN_KEYS if key not in group.model_fields}
    if "env" in fields:
        fields["env"] = (dict[str, Any] | None, None)
    run = create_model(group.__name__, __base__=group, __module__=group.__module__, **fields)
    completed: dict[str, Any] = {"run": (run, Field(default_factory=run))}
    return create_model(schema.__name__, __base__=schema, __module__=schema.__module__, **completed)


def run_keys(schema: type[BaseModel]) -> list[str]:
    """The keys that the schema's `run` group declares."""
    field = schema.model_fields.get("run")
    group = None if field is None else optional_group(field.annotation)
    return [] if group is None else list(group.model_fields)


def run_defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Defaults of the schema's `run` group, so that an input that only the schema names is pinned too."""
    field = schema.model_fields.get("run")
    group = None if field is None else optional_group(field.annotation)
    if group is None:
        return {}
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in group.model_fields.items()
        if not field.is_required() and not field.default_factory_takes_validated_data
    }
    return {name: value for name, value in defaults.items() if value is None or isinstance(value, str)}


def check_keys(loaded: LoadedConfig, schema: type[BaseModel]) -> None:
    """Refuse a key that the schema does not have, naming the nearest one that it has."""
    for path, group in _unknown(loaded.data, schema, ()):
        value = _at(loaded.data, path)
        text = f" = {value!r}" if not isinstance(value, (dict, list)) else ""
        message = f"{loaded.origin(path)}: unknown key {dotted(path)}{text}"
        raise UserError(message, _nearest_key(path, group, schema))


def _unknown(data: Any, annotation: Any, path: KeyPath) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Paths of the keys in `data` that their group does not have; groups in lists and mappings are entered too."""
    if isinstance(data, dict):
        group = optional_group(annotation)
        if group is not None:
            for key, value in data.items():
                field = _field(group, key)
                if field is not None:
                    yield from _unknown(value, field.annotation, (*path, key))
                elif group.model_config.get("extra") != "allow":
                    yield (*path, key), group
            return
    below = group_of(annotation)
    if below is not None and below is not annotation:
        items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        for key, value in items:
            yield from _unknown(value, below, (*path, key))


def _field(group: type[BaseModel], key: str) -> FieldInfo | None:
    for name, field in group.model_fields.items():
        if key in (name, field.alias):
            return field
    return None


def _nearest_key(path: KeyPath, group: type[BaseModel], schema: type[BaseModel]) -> str | None:
    """The sibling that looks like the last part of `path`; else a key of that name elsewhere; else the siblings.

    A group may say in a class variable `other_names` how other commands call its keys: {their name: its own}.
    """
    word = str(path[-1])
    prefix = f"{dotted(path[:-1])}." if len(path) > 1 else ""
    own_name = getattr(group, "other_names", {}).get(word)
    if own_name is not None:
        return f"here it is called {prefix}{own_name}"
    siblings = list(group.model_fields)
    near = nearest(word, siblings)
    if near is not None:
        return f"did you mean {prefix}{near}?"
    elsewhere = [key for key in leaf_keys(schema) if key.rpartition(".")[2] == word]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    all_keys = {key.rpartition(".")[2]: key for key in leaf_keys(schema)}
    near = nearest(word, all_keys)
    if near is not None:
        return f"did you mean {all_keys[near]}?"
    return f"known keys: {', '.join(prefix + name for name in siblings)}"


def leaf_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a schema, in order."""
    keys: list[str] = []
    for name, field in schema.model_fields.items():
        group = optional_group(field.annotation)
        keys += leaf_keys(group, f"{prefix}{name}.") if group else [prefix + name]
    return keys


def validate(data: dict[str, Any], loaded: LoadedConfig, schema: type[BaseModel]) -> BaseModel | None:
    """An instance of `schema` from resolved values; None where a value is to come from an artifact not made yet.

    Types are strict: a string is no number and true is no 1. Two readings are allowed: a whole float for an integer
    (`1e6`), and the text of an environment variable or another interpolation for the number that it spells.

    Raises:
        UserError: the first fault, with its origin, value and what is allowed; how many more there are.
    """
    from pydantic import ValidationError

    for attempt in range(2):
        try:
            return schema.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            faults = [
                fault
                for fault in error.errors(include_url=False)
                if not is_to_come(_at(data, _data_path(data, fault["loc"])))
            ]
            if not faults:
                return None
            if attempt or not _reread(data, loaded, faults):
                raise _explain(faults, data, loaded, schema) from None
    raise AssertionError("unreachable")


def _reread(data: dict[str, Any], loaded: LoadedConfig, faults: list[Any]) -> bool:
    """Apply the two readings that `validate` allows, in place; False if there is nothing to apply."""
    changed = False
    for fault in faults:
        path = _data_path(data, fault["loc"])
        value = _at(data, path)
        new: Any = value
        if fault["type"] == "int_type" and isinstance(value, float) and value.is_integer():
            new = int(value)
        elif isinstance(value, str) and fault["type"] in ("int_type", "float_type", "bool_type"):
            raw = _at(loaded.data, path)
            if isinstance(raw, str) and "${" in raw:
                new = read_scalar(value, dotted(path))
        if new is not value and path:
            _at(data, path[:-1])[path[-1]] = new
            changed = True
    return changed


def _explain(faults: list[Any], data: dict[str, Any], loaded: LoadedConfig, schema: type[BaseModel]) -> UserError:
    fault = faults[0]
    path = _data_path(data, fault["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "missing":
        name = fault["loc"][-1]
        key = dotted((*path, name))
        message = f"{loaded.origin(path)}: {key} is missing; it must be {allowed(schema, (*path, name)).text}{more}"
        return UserError(message, f"give it a value: {key}=…")
    value = _at(data, path)
    at = loaded.origin_of_fault(path, _plain(fault)) if isinstance(value, dict) else loaded.origin(path)
    if not path:
        return UserError(f"{at}: {_plain(fault)}{more}")
    rule = allowed(schema, path)
    # A check written in the schema has its own words.
    reason = _plain(fault) if fault["type"] in ("value_error", "assertion_error") else f"must be {rule.text}"
    if fault["type"] == "extra_forbidden":
        reason = "unknown key"
    text = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    text = "" if isinstance(value, dict) else f" = {text}"
    return UserError(f"{at}: {dotted(path)}{text}: {reason}{more}", rule.hint)


def _plain(fault: Any) -> str:
    """The text of a schema's own check, on one line and without pydantic's prefix."""
    text = str(fault["msg"])
    for prefix in ("Value error, ", "Assertion failed, "):
        text = text.removeprefix(prefix)
    return " ".join(text.split())


def _data_path(data: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """The part of a fault's location that leads through the data; labels of union members are skipped."""
    path: KeyPath = ()
    for part in loc:
        here = _at(data, path)
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            path = (*path, part)
    return path


def _at(data: Any, path: KeyPath) -> Any:
    """The value at `path`, or None where it leads nowhere."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(cast(str, part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
