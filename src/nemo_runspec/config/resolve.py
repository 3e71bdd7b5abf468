"""The road of a config, after `load_config`: `run` filled in, inputs pinned, `${…}` replaced, values validated.

`resolve_config` takes it once, step by step, in a dry run as in a run, so that both refuse the same configs.

Interpolations: `${key.of.this.config}`, `${run.…}`, `${oc.env:VAR,default}`, `${mul:a,b}`, and `${art:data,path}`: the
payload directory (`path`), or any other field, of the artifact that `run.data` names.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.artifacts.naming import SCHEME, check_name
from nemo_runspec.artifacts.pins import agree
from nemo_runspec.artifacts.registry import Registry, Version
from nemo_runspec.config.inputs import (
    Adopt,
    ArtifactInput,
    input_marks,
    is_place,
    name_inputs,
    put_reference,
    references_of,
)
from nemo_runspec.config.interpolate import interpolate, to_come
from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.run_env import run_env
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, load_schema, reads_no_run, run_defaults
from nemo_runspec.config.validate import (
    UserLocation,
    check_defaults,
    check_keys,
    digest_user_files,
    user_locations,
    validate,
)
from nemo_runspec.config.yaml_text import KeyPath, dotted, dump_yaml, escape_interpolation, read_yaml, spelled
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.gpus import visible_gpus
from nemo_runspec.runspec import NAME, Runspec, recipe_name
from nemo_runspec.secrets import has_password
from nemo_runspec.user_files import UserFiles, is_elsewhere
from nemo_runspec.variables import JOB_DIR
from nemo_runspec.words import shown

if TYPE_CHECKING:
    from pydantic import BaseModel

# What `${art:…}` may ask for besides the fields of the record.
_VERSION_FIELDS = ("path", "ref", "uri", "digest", "name", "version")
_ART = re.compile(r"\$\{art:\s*([\w.-]+)\s*(?:,\s*([\w.-]+)\s*)?\}")
# `${art:KEY,FIELD}` -> its value
_FieldOf = Callable[[str, str], Any]


@dataclass(frozen=True)
class ResolvedConfig:
    """A config after all checks.

    `data` are plain values with every default filled in (what train.yaml holds); `model` is the instance of the schema
    class, None where a script declares no schema or a value is still to come; `inputs` maps the keys of `run` to the
    versions they are pinned to, None for one that an earlier step of the same pipeline is going to publish.
    `remote_files` are the user's files on other machines: the job counts them into its fingerprint when it starts.
    """

    spec: Runspec
    loaded: LoadedConfig
    data: dict[str, Any]
    model: BaseModel | None
    inputs: dict[str, Version | None] = field(default_factory=dict)
    remote_files: tuple[str, ...] = ()

    @property
    def run(self) -> dict[str, Any]:
        """The `run` group: reserved keys and pinned inputs."""
        run: dict[str, Any] = self.data["run"]
        return run

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the artifacts that the run publishes (`run.output`, `run.results`)."""
        return tuple(self.run[key] for key in ("output", "results") if self.run.get(key))


def resolve_config(
    loaded: LoadedConfig,
    spec: Runspec,
    *,
    produced: Mapping[str, str | None] | None = None,
    look_up: bool = True,
    registry: Registry | None = None,
    at_start: bool = False,
    found_here: Callable[[list[UserLocation]], list[UserLocation]] | None = None,
    publish: bool = True,
) -> ResolvedConfig:
    """Resolve and validate `loaded` for the script of `spec`.

    Args:
        produced: artifact names that earlier steps of a pipeline made, with the version to read (`name:3`), or None
            where the step has not run yet (a dry run).
        look_up: False checks the config alone, as if every input were still to come: for a registry that cannot be
            reached from here.
        registry: where inputs are looked up; `Registry.default()` when None.
        at_start: True in the job itself: all its ranks, nodes and attempts agree on the versions of the inputs that
            the config leaves open (`nemo_runspec.artifacts.pins`).
        found_here: of the user's files, returns those that are to be found on this machine, for a job on other ones;
            it has looked for the others. All of them when None.
        publish: False where nothing may be published: what the schema would adopt (`config.inputs`) is still to come.

    Raises:
        UserError: the config is for another script; an unknown, ill-typed or missing key; a value out of range; an
            address with a password; an interpolation that leads nowhere; a missing artifact, after all others: a fault
            of the config is found before somebody goes and makes the artifact.
    """
    # 1. The config is for this script, and the script knows its keys.
    _check_script(loaded, spec)
    schema = load_schema(spec)
    if schema is not None:
        check_keys(loaded, schema)
    run_env(loaded)
    loaded = replace(loaded, data=name_inputs(loaded, schema, _artifact_names(registry, produced or {}, look_up)))
    if schema is not None and reads_no_run(schema) and loaded.overrides:
        loaded = replace(loaded, data=_without_unread_inputs(loaded))
    # 2. The run group: what the config says, over what follows from schema, script and file name.
    run = {**(run_defaults(schema) if schema else {}), **vars(loaded.run)}
    run |= _identity(loaded, spec)
    # 3. Inputs are pinned to versions: `corpus` becomes `corpus:3`.
    _check_run(run, loaded, spec)
    if at_start and run.get("processes"):
        run["processes"] = _processes_here(run["processes"])
    if publish and look_up and any(map(is_place, references_of(run).values())):
        # A fault of the config is found before a model is downloaded and published.
        resolve_config(loaded, spec, produced=produced, registry=registry, found_here=found_here, publish=False)
    finder = _Finder(registry, input_marks(schema), publish)
    inputs, missing = _look_up_inputs(run, finder, produced or {}, look_up=look_up, at_start=at_start)
    # What the job is to adopt has to lie where it runs, like the user's files.
    there = [] if look_up or found_here is None else _local_places(run, finder, loaded)
    for key, reference in references_of(run).items():
        version = inputs[key]
        put_reference(run, key, _latest(reference) if version is None else version.ref)
    # 4. `${art:…}` is replaced by what the record says, everything else by OmegaConf.
    data = _values(loaded, run, lambda key, what: _field_of(inputs, key, what))
    # 5. Types and ranges.
    model = None if schema is None else validate(data, loaded, schema)
    if model is not None and schema is not None and spec.schema_path is not None:
        check_defaults(model, schema, loaded, spec.schema_path)
    if model is not None and run["family"] != spec.family:
        _refuse_defaults_of_another_family(model, spec, loaded)
    _refuse_passwords(data, (), loaded)
    # 6. The user's files are where the config says, and their digest is part of the run's identity.
    locations = [] if model is None else user_locations(model, loaded)
    here = locations if found_here is None else found_here([*there, *locations])
    remote_files = tuple(each.location for each in locations if each not in here)
    if model is not None:
        model.run.files = digest_user_files(each for each in here if each in locations)  # type: ignore[attr-defined]
    if missing is not None:
        raise missing
    # Every default becomes visible, and two configs that mean the same get the same fingerprint.
    data = data if model is None else model.model_dump(mode="json")
    return ResolvedConfig(spec, loaded, data, model, inputs, remote_files)


def config_to_ship(resolved: ResolvedConfig) -> str:
    """The config file that travels with a job, in the format of its script (`Runspec.job_config_name`).

    All of it is resolved, except `${art:…}`: where a payload lies is another matter on another machine. An input has
    the version that it is pinned to (`corpus:3@<12 digits>`), one that is not known here is `corpus:latest`. The script
    loads this file like any other; its fingerprint there is the one here.
    """
    spec, data = resolved.spec, copy.deepcopy(resolved.data)
    if data["run"].get("env") is not None:  # what the job was to ask its executor for: it has asked
        data["run"]["env"] = None
    for key, version in resolved.inputs.items():
        if version is not None:
            put_reference(data["run"], key, f"{version.ref}@{version.digest[:12]}")
    if spec.config.format == "omegaconf":
        data = escape_interpolation(data)
        # A value depends on an artifact if it is another one with `${art:…}` left as text.
        here = _values(resolved.loaded, resolved.run, lambda key, what: _field_of(resolved.inputs, key, what))
        anywhere = _values(resolved.loaded, resolved.run, lambda key, what: f"${{art:{key},{what}}}")
        _put_differing(data, anywhere, here)
    return config_text(data, spec, escape=False)


def config_text(data: dict[str, Any], spec: Runspec, *, escape: bool) -> str:
    """The file of a job's config, in the format of its script. `escape`: as in `dump_yaml`."""
    if spec.config.format == "json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    return f"# The resolved config of {spec.name}; where it comes from: job.yaml\n" + dump_yaml(data, escape=escape)


def _put_differing(data: Any, anywhere: Any, here: Any) -> None:
    """Replace the values of `data` at which `anywhere` differs from `here` by the text of `anywhere`, in place."""
    for key, value in anywhere.items() if isinstance(anywhere, dict) else enumerate(anywhere):
        if isinstance(value, (dict, list)):
            below = data.get(key) if isinstance(data, dict) else data[key] if key < len(data) else None
            if isinstance(below, (dict, list)):
                _put_differing(below, value, here[key])
        elif value != here[key]:
            # Another `${` in the same text was written as text, and is to stay it.
            data[key] = re.sub(r"(\\*)\$\{(?!art:|mul:)", r"\1\1\\${", value)


def _check_script(loaded: LoadedConfig, spec: Runspec) -> None:
    script, family = (vars(loaded.run).get(key) for key in ("script", "family"))
    if script is not None and not isinstance(script, str):
        raise UserError(f"{loaded.origin(('run', 'script'))}: run.script = {script!r}: must be text")
    if script and not spec.is_named(script):
        at = loaded.origin(("run", "script"))
        raise UserError(
            f"{at}: run.script = {script!r}: this config is not for {spec.script_path.name}",
            f"configs of {spec.name}: {shown(spec.config_dir)}",
        )
    if script and "/" in script and not family:
        at = loaded.origin(("run", "script"))
        raise UserError(
            f"{at}: run.script = {script!r}: run.family is missing",
            "a config for the script of another recipe says whose runs these are, as in run.family: mine",
        )


def _refuse_passwords(value: Any, path: KeyPath, loaded: LoadedConfig) -> None:
    """Refuse an address with a password: job.yaml, the script's config and the record of an artifact would have it."""
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_passwords(item, (*path, key), loaded)
    elif isinstance(value, str) and has_password(value):
        raise UserError(
            f"{loaded.origin(path)}: {dotted(path)}: an address with a password, which has no place in a config",
            "configs are written to files: let the environment of the job have it (secrets in a profile of env.toml)",
        )


def _refuse_defaults_of_another_family(model: BaseModel, spec: Runspec, loaded: LoadedConfig) -> None:
    """A config of another family states every number of its own, or lies over a config of the script's family.

    The defaults that a script's schema file states are those of the script's family. Those of the classes that it
    imports hold for all.
    """
    if any(_is_config_of(spec, base) for base in loaded.bases):
        return
    own = {dotted(path): value for path, value in _own_defaults(model, type(model).__module__, ()) if path[0] != "run"}
    if own:
        stated = ", ".join(f"{key}={spelled(value)}" for key, value in own.items())
        raise UserError(
            f"{shown(loaded.path)}: {next(iter(own))} is missing: its default is that of {spec.family}",
            f"state it for this family; {len(own)} are missing, in {spec.family} they are {stated}",
        )


def _is_config_of(spec: Runspec, file: Path) -> bool:
    """Whether a config file is one of the script's own family: beside the script, and itself names it."""
    if not file.resolve().is_relative_to(spec.script_path.parent.resolve()):
        return False
    values = read_yaml(file.read_text(encoding="utf-8"), shown(file))[0]
    run = values.get("run") if isinstance(values, dict) else None
    script = run.get("script") if isinstance(run, dict) else None
    return isinstance(script, str) and spec.is_named(script)


def _own_defaults(group: BaseModel, module: str, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The keys that have their default, with it, where a class of `module` states it.

    A default that is computed, such as a version filled in from this machine, is nobody's number; neither is null. A
    group that a factory makes is entered, as its keys are what the config has to state; a default that is an instance
    is one value.
    """
    for name, field_info in type(group).model_fields.items():
        value, computed = getattr(group, name), field_info.default_factory is not None
        if hasattr(value, "model_fields_set") and (computed or name in group.model_fields_set):
            yield from _own_defaults(value, module, (*path, name))
        elif name not in group.model_fields_set and not computed and value is not None:
            stating = next(cls for cls in type(group).__mro__ if name in inspect.get_annotations(cls))
            if stating.__module__ == module:
                yield (*path, name), value


def _without_unread_inputs(loaded: LoadedConfig) -> dict[str, Any]:
    """The values of a config without the inputs that no `${art:…}` reads, since the command line gives a path instead.

    Raises:
        UserError: the command line names an input that nothing reads.
    """
    read = sorted({match[1] for match in _ART.finditer(json.dumps(loaded.data))})
    run = dict(loaded.data.get("run") or {})
    for key in [key for key in run if key not in (*RESERVED_RUN_KEYS, *read)]:
        value = run.pop(key)
        if value is not None and loaded.on_command_line(("run", key)):
            raise UserError(
                f"command line: run.{key} = {value!r}: no key of the config reads this input",
                did_you_mean(f"run.{key}", [f"run.{name}" for name in read], "input artifacts"),
            )
    return {**loaded.data, "run": run}


def _identity(loaded: LoadedConfig, spec: Runspec) -> dict[str, str]:
    """The keys of `run` that follow from script and config, where the config leaves them open."""
    run = vars(loaded.run)
    config = run.get("config") or loaded.name
    identity = {
        "script": spec.script_path.name,
        "config": config,
        "family": spec.family,
        "stage": spec.stage,
        "name": f"{recipe_name(run, spec).replace('/', '-')}-{config}",
    }
    return {key: value for key, value in identity.items() if not run.get(key)}


def _check_run(run: Mapping[str, Any], loaded: LoadedConfig, spec: Runspec) -> None:
    """Refuse values of `run` of the wrong kind, and names that cannot be published: now, not after the training."""
    for key, value in run.items():
        at = f"{loaded.origin(('run', key))}: run.{key}"
        if key == "env":  # checked by `run_env`
            continue
        if key == "processes":
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{at} = {value!r}: must be an integer from 1 on")
            if value not in (None, 1) and spec.run.launch != "torchrun":
                hint = 'launch = "torchrun" in the [tool.runspec.run] of its block'
                raise UserError(f"{at} = {value}: {spec.script_path.name} is started as one process", hint)
            continue
        if isinstance(value, list) and key not in RESERVED_RUN_KEYS and all(isinstance(item, str) for item in value):
            continue  # whether the key takes several, its schema says
        if value is not None and not isinstance(value, str):
            kind = "text" if key in RESERVED_RUN_KEYS else "the name of an artifact (name, name:3) or null"
            raise UserError(f"{at} = {value!r}: must be {kind}")
        if key in ("family", "stage") and not re.fullmatch(NAME, value or ""):
            raise UserError(f"{at} = {value!r}: must be words of letters, digits, '.', '_', '-', joined by '/'")
        if key == "config" and value and Path(value).name != value:
            raise UserError(f"{at} = {value!r}: must be one word, which names the run's folder")
        if key == "root" and value and "://" in value:
            raise UserError(f"{at} = {value!r}: must be a folder")
        if key in ("output", "results") and value:
            try:
                check_name(value)
            except UserError as error:
                raise error.at(at) from None


def _processes_here(processes: int) -> int:
    """`run.processes` in the job itself: started by hand it may run in another number, and is then another run.

    With GPUs and on a cluster the number is not the config's, which counts into the fingerprint as it is.
    """
    if JOB_DIR in os.environ or visible_gpus():
        return processes
    return int(os.environ.get("WORLD_SIZE", "1"))


def _artifact_names(
    registry: Registry | None, produced: Mapping[str, str | None], look_up: bool
) -> Callable[[str], bool]:
    """Whether a value that may be a path or an address is the name of an artifact: there is one, and no such file."""

    def is_artifact(value: str) -> bool:
        if value.startswith(SCHEME):
            return True
        if "${" in value or "://" in value or is_place(value) or Path(value).exists():
            return False
        name = re.split("[:@]", value)[0]
        try:
            check_name(name)
        except UserError:
            return False
        if name in produced or name != value:
            return True
        return look_up and bool((registry or Registry.default()).versions(name))

    return is_artifact


@dataclass(frozen=True)
class _Finder:
    """Looks up what a key of `run` names, in the registry or where the schema says how to adopt it."""

    registry: Registry | None
    marks: Mapping[str, ArtifactInput]
    publish: bool

    def find(self, key: str, reference: str) -> Version | None:
        """The version; None for what is adopted only when something may be published. UserError names the key."""
        registry = self.registry or Registry.default()
        mark = self.marks.get(key.partition(".")[0])
        try:
            if is_place(reference):
                version = self.adopting(key)(reference, registry, self.publish)
            else:
                version = registry.resolve(reference)
            if mark is not None and version is not None:
                mark.check_type(version)
        except UserError as error:
            error.message = error.message.removeprefix(f"{reference}: ")  # said once
            raise error.at(f"run.{key} = {reference}") from None
        return version

    def adopting(self, key: str) -> Adopt:
        """How a directory or an address of a key becomes an artifact. UserError: it takes references alone."""
        mark = self.marks.get(key.partition(".")[0])
        if mark is None or mark.adopt is None:
            raise UserError("the name of an artifact expected, not a directory or an address")
        return mark.adopt


def _local_places(run: Mapping[str, Any], finder: _Finder, loaded: LoadedConfig) -> list[UserLocation]:
    """The paths in `run`, which the job adopts. UserError: a path or an address of a key that takes neither."""
    places = {key: reference for key, reference in references_of(run).items() if is_place(reference)}
    for key, place in places.items():
        try:
            finder.adopting(key)
        except UserError as error:
            raise error.at(f"run.{key} = {place}") from None
    return [
        UserLocation(place, f"{loaded.origin(('run', key))}: run.{key}", UserFiles())
        for key, place in places.items()
        if not is_elsewhere(place)
    ]


def _look_up_inputs(
    run: Mapping[str, Any], finder: _Finder, produced: Mapping[str, str | None], *, look_up: bool, at_start: bool
) -> tuple[dict[str, Version | None], UserError | None]:
    """For each input in `run` its version, None for what is still to come; and the first that is missing, if any.

    A name without a version is what an earlier step of the same pipeline made, else the latest: in a job, the one that
    is the latest for all its processes.
    """
    names = {
        key: reference if is_place(reference) else _bare(reference) for key, reference in references_of(run).items()
    }
    inputs: dict[str, Version | None] = dict.fromkeys(names)
    if not look_up:
        return inputs, None
    made = dict(produced)
    if at_start:
        key_of = {name: key for key, name in reversed(names.items()) if is_place(name) or not re.search("[:@]", name)}

        def pin(name: str) -> str:
            version = finder.find(key_of[name], name)
            assert version is not None  # a job publishes
            return version.pinned

        try:
            made |= agree(list(key_of), pin) if key_of else {}
        except UserError as error:
            return inputs, error
    missing: UserError | None = None
    for key, name in names.items():
        reference = made.get(name, name)
        try:
            inputs[key] = None if reference is None else finder.find(key, reference)
        except UserError as error:
            missing = missing or error
    return inputs, missing


def _bare(reference: str) -> str:
    """A reference to the latest version as the name alone; another one stays as it is."""
    return reference.removeprefix(SCHEME).removesuffix(":latest")


def _latest(reference: str) -> str:
    """A reference that names no version as `name:latest`."""
    if is_place(reference):
        return reference
    name = _bare(reference)
    return name if ":" in name else f"{name}:latest"


def _field_of(inputs: Mapping[str, Version | None], key: str, what: str) -> Any:
    """`${art:key,what}`: a field of the artifact that `run.key` names."""
    if key not in inputs:
        raise UserError(f"${{art:{key},{what}}}: run.{key} names no artifact", did_you_mean(key, inputs, "inputs"))
    version = inputs[key]
    if version is None:
        return to_come(key, what)
    if what in _VERSION_FIELDS:
        value = getattr(version, what)
        return value if isinstance(value, (str, int)) else str(value)
    fields = version.record.get("fields", {})
    fields = fields if isinstance(fields, dict) else {}
    if what not in fields:
        choices = [*_VERSION_FIELDS, *fields]
        raise UserError(
            f"${{art:{key},{what}}}: {version.ref} has no field {what!r}", did_you_mean(what, choices, "fields")
        )
    return fields[what]


def _values(loaded: LoadedConfig, run: Mapping[str, Any], field_of: _FieldOf) -> dict[str, Any]:
    """The config's values with `run` as its run group and every interpolation replaced."""
    tree = {key: _put_fields(value, (key,), loaded, field_of) for key, value in loaded.data.items()}
    return interpolate({**tree, "run": escape_interpolation(dict(run))}, loaded.origin)


def _put_fields(value: Any, path: KeyPath, loaded: LoadedConfig, field_of: _FieldOf) -> Any:
    """`value` with every `${art:…}` in it replaced."""
    if isinstance(value, dict):
        return {key: _put_fields(item, (*path, key), loaded, field_of) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_fields(item, (*path, index), loaded, field_of) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${art:" not in value:
        return value
    try:
        if match := _ART.fullmatch(value):
            return escape_interpolation(field_of(match[1], match[2] or "path"))
        return _ART.sub(lambda match: _field_in_text(match, field_of), value)
    except UserError as error:
        raise error.at(f"{loaded.origin(path)}: {dotted(path)}") from None


def _field_in_text(match: re.Match[str], field_of: _FieldOf) -> str:
    r"""The value of one `${art:…}` as it may stand in a text; quoted, where it is an argument of another `${…}`."""
    before, depth = match.string[: match.start()], 0
    if (len(before) - len(before.rstrip("\\"))) % 2:
        return match[0]  # `\${art:…}` is text
    for token in re.findall(r"\\*\$\{|\}", before):
        if token == "}":
            depth = max(depth - 1, 0)
        elif token.count("\\") % 2 == 0:
            depth += 1
    value = field_of(match[1], match[2] or "path")
    if depth and not isinstance(value, str):
        return json.dumps(value)
    text = str(escape_interpolation(value))
    return "'" + text.replace("'", "\\'") + "'" if depth else text
