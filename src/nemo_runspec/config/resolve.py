"""A loaded config -> resolved values: `run` group filled in, artifacts pinned to versions, interpolations replaced.

`resolve_config` is what both a dry run and a run go through, so that they refuse the same configs.

Interpolations: `${key.of.this.config}`, `${run.…}`, `${oc.env:VAR,default}`, `${mul:a,b}`, and `${art:data,path}`: the
payload directory (`path`), or any other field, of the artifact that `run.data` names.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import validate
from nemo_runspec.config.loader import LoadedConfig, split_key
from nemo_runspec.config.validate import RESERVED_RUN_KEYS as RESERVED_RUN_KEYS
from nemo_runspec.config.yaml_text import KeyPath, dump_yaml, escape_interpolation, shown
from nemo_runspec.env import run_env
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.runspec import Runspec
from nemo_runspec.secrets import looks_secret

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pydantic import BaseModel

    from nemo_runspec.artifacts import Registry, Version

# What `${art:…}` may ask for besides the fields of the record.
_VERSION_FIELDS = ("path", "ref", "uri", "digest", "name", "version")

# The inputs of the config being resolved, for `${art:…}`. None: an earlier step will publish it.
_INPUTS: ContextVar[dict[str, Version | None] | None] = ContextVar("runspec_inputs", default=None)
# True: `${art:…}`, and what is computed from it, stays as it stands, between two characters that no config has.
_KEEP_ART: ContextVar[bool] = ContextVar("runspec_keep_art", default=False)
_OPEN, _CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True)
class ResolvedConfig:
    """A config after all checks.

    `data` are plain values with every default filled in (what train.yaml holds); `model` is the instance of the schema
    class, None where a script declares no schema or a value is still to come; `inputs` maps the keys of `run` to the
    versions they are pinned to, None for one that an earlier step of the same pipeline is going to publish.
    """

    spec: Runspec
    loaded: LoadedConfig
    data: dict[str, Any]
    model: BaseModel | None
    inputs: dict[str, Version | None] = field(default_factory=dict)

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

    Raises:
        UserError: the config is for another script; an unknown, ill-typed or missing key; a value out of range; an
            interpolation that leads nowhere; a missing artifact (the hint is the command that makes it).
    """
    _check_script(loaded, spec)
    schema = validate.load_schema(spec)
    if schema is not None:
        validate.check_keys(loaded, schema)
    run_env(loaded)
    cfg = _tree(loaded)
    if schema is not None:
        cfg["run"] = {**validate.run_defaults(schema), **loaded.data["run"]}
    run = {**_resolve(cfg, loaded, ("run",)), **_identity(loaded, spec)}
    cfg["run"] = escape_interpolation(run)
    produced = dict(produced or {})
    try:
        if at_start:
            produced |= _agree(run, registry)
        inputs = _pin(run, loaded, produced, look_up, registry)
    except UserError:
        # A fault of the config comes first: it is found before somebody goes and makes the missing artifact.
        if look_up:
            resolve_config(loaded, spec, produced=produced, look_up=False)
        raise
    cfg["run"] = escape_interpolation(run)
    token = _INPUTS.set(inputs)
    try:
        data = _resolve(cfg, loaded, ())
    finally:
        _INPUTS.reset(token)
    if schema is None:
        return ResolvedConfig(spec, loaded, data, None, inputs)
    model = validate.validate(data, loaded, schema)
    if model is None:
        return ResolvedConfig(spec, loaded, data, None, inputs)
    # Every default becomes visible, and two configs that mean the same get the same fingerprint.
    return ResolvedConfig(spec, loaded, model.model_dump(mode="json"), model, inputs)


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
            data["run"][key] = f"{version.ref}@{version.digest[:12]}"
    if spec.config.format == "json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if spec.config.format == "omegaconf":
        cfg = _tree(resolved.loaded)
        cfg["run"] = escape_interpolation(resolved.run)
        token = _KEEP_ART.set(True)
        try:
            kept = _resolve(cfg, resolved.loaded, ())
        finally:
            _KEEP_ART.reset(token)
        _put_kept(kept, data)
        data = _unkeep(escape_interpolation(data))
    return f"# The resolved config of {spec.name}; where it comes from: job.yaml\n" + dump_yaml(data, escape=False)


def _put_kept(kept: Any, data: Any) -> None:
    """Replace each value of `data` by the one of `kept` at the same place, where that asks for an artifact."""
    for key, value in kept.items() if isinstance(kept, dict) else enumerate(kept):
        if isinstance(value, (dict, list)):
            below = data.get(key) if isinstance(data, dict) else data[key] if key < len(data) else None
            if isinstance(below, (dict, list)):
                _put_kept(value, below)
        elif isinstance(value, str) and _OPEN in value:
            data[key] = value


def _unkeep(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unkeep(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unkeep(item) for item in value]
    return value.replace(_OPEN, "${").replace(_CLOSE, "}") if isinstance(value, str) else value


def run_group(loaded: LoadedConfig) -> dict[str, Any]:
    """The `run` group of a config, interpolated, before anything is validated or looked up."""
    return _resolve(_tree(loaded), loaded, ("run",))


def _check_script(loaded: LoadedConfig, spec: Runspec) -> None:
    script = run_group(loaded).get("script")
    if script not in (None, "", spec.script_path.name):
        at = loaded.origin(("run", "script"))
        raise UserError(
            f"{at}: run.script = {script!r}: this config is not for {spec.script_path.name}",
            f"configs of {spec.name}: {shown(spec.config_dir)}",
        )


def _identity(loaded: LoadedConfig, spec: Runspec) -> dict[str, str]:
    """The keys of `run` that follow from script and config, where the config leaves them open."""
    given = loaded.data["run"]
    config = given.get("config") or loaded.name
    own = {
        "script": spec.script_path.name,
        "config": config,
        "family": spec.family,
        "stage": spec.stage,
        "name": f"{spec.name.replace('/', '-')}-{config}",
    }
    return {key: value for key, value in own.items() if not given.get(key)}


def _tree(loaded: LoadedConfig) -> DictConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_resolvers()
    try:
        tree = OmegaConf.create(loaded.data)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        at = loaded.origin(split_key(key))
        raise UserError(f"{at}: {key}: bad interpolation: {_first_line(error)}") from None
    return tree


def _resolve(cfg: DictConfig, loaded: LoadedConfig, group: KeyPath) -> dict[str, Any]:
    """Plain values of a group of `cfg` (of all of it when `group` is empty), with interpolations replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        node = cfg if not group else cfg[group[0]]
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or ""
        raise UserError(f"{loaded.origin(split_key(key))}: {key} has no value", f"give one: {key}=…") from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        at = f"{loaded.origin(split_key(key))}: {key}"
        cause: BaseException | None = error
        while cause is not None:  # an error of a resolver of ours arrives wrapped, and is the clearer one
            if isinstance(cause, UserError):
                raise UserError(f"{at}: {cause.message}", cause.hint) from None
            cause = cause.__cause__ or cause.__context__
        raise UserError(f"{at}: {_first_line(error)}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _first_line(error: Exception) -> str:
    """OmegaConf's message without the lines on its own types, and without the name of a wrapped exception."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", text[0]).strip("\"'")


def _agree(run: dict[str, Any], registry: Registry | None) -> dict[str, str]:
    """What the references without a version mean, for every process of this job; by name of the artifact."""
    from nemo_runspec.artifacts.pins import agree

    open_keys: dict[str, str] = {}
    for key, value in run.items():
        if key not in RESERVED_RUN_KEYS and isinstance(value, str) and value:
            name = _bare(value)
            if ":" not in name and "@" not in name:
                open_keys.setdefault(name, key)
    if not open_keys:
        return {}
    return agree(list(open_keys), lambda name: _look_up(name, f"run.{open_keys[name]}", registry).pinned)


def _bare(reference: str) -> str:
    """A reference to the latest version as the name alone; another one stays as it is."""
    return reference.removeprefix("art://").removesuffix(":latest")


def _pin(
    run: dict[str, Any],
    loaded: LoadedConfig,
    produced: Mapping[str, str | None],
    look_up: bool,
    registry: Registry | None,
) -> dict[str, Version | None]:
    """Replace the references in `run` by `name:N`, in place, and return the versions."""
    inputs: dict[str, Version | None] = {}
    for key, value in run.items():
        at = loaded.origin(("run", key))
        if key == "env":  # checked by `run_env`
            continue
        if value is not None and not isinstance(value, str):
            kind = "text" if key in RESERVED_RUN_KEYS else "the name of an artifact (name, name:3) or null"
            raise UserError(f"{at}: run.{key} = {value!r}: must be {kind}")
        if key in ("output", "results") and value:  # now, not after the training whose result cannot be published
            from nemo_runspec.artifacts.naming import check_name

            try:
                check_name(value)
            except UserError as error:
                raise UserError(f"{at}: run.{key}: {error.message}", error.hint) from None
        if key in RESERVED_RUN_KEYS or not value:
            continue
        # A bare name, or its latest version, is what an earlier step of the same pipeline made.
        name = _bare(value)
        if not look_up or (name in produced and produced[name] is None):
            inputs[key], run[key] = None, f"{name}:latest" if ":" not in name else name
            continue
        version = _look_up(produced.get(name) or value, f"run.{key}", registry)
        inputs[key], run[key] = version, version.ref
    return inputs


def _look_up(reference: str, key: str, registry: Registry | None) -> Version:
    from nemo_runspec.artifacts import Registry

    try:
        return (registry or Registry.default()).resolve(reference)
    except UserError as error:
        raise UserError(f"{key} = {reference}: {error.message}", error.hint) from None


@functools.cache
def register_resolvers() -> None:
    """Make `${art:…}` and `${mul:…}` known to OmegaConf, and keep secrets out of `${oc.env:…}` (once a process)."""
    from omegaconf import OmegaConf

    # OmegaConf 2.4 renamed the function, and warns about the old name.
    register: Callable[..., None] = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("art", _art, replace=True)
    register("mul", _mul, replace=True)
    register("oc.env", _env, replace=True)


def _env(name: str, *default: Any) -> str | None:
    """`${oc.env:NAME,default}`, as OmegaConf has it, except that what looks like a secret is refused."""
    from omegaconf.resolvers import oc

    if looks_secret(str(name)):
        raise UserError(
            f"${{oc.env:{name}}}: configs are written to files, and {name} looks like a secret: list it by name under"
            " secrets in a profile of env.toml instead; the script finds it in its environment"
        )
    value: str | None = oc.env(name, *default)
    return value


def _mul(*factors: Any) -> int | float | str:
    """`${mul:a,b,…}`: the product; whole when all factors are."""
    if any(isinstance(factor, str) and _OPEN in factor for factor in factors):
        return f"{_OPEN}mul:{','.join(map(str, factors))}{_CLOSE}"
    if any(isinstance(factor, str) and "(resolved at start)>" in factor for factor in factors):
        return " * ".join(map(str, factors))
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise UserError(f"${{mul:…}}: {factor!r} is not a number")
    product: int | float = math.prod(factors)
    return product


def _art(key: str, what: str = "path") -> Any:
    """`${art:key,what}`: a field of the artifact that `run.key` names."""
    if _KEEP_ART.get():
        return f"{_OPEN}art:{key},{what}{_CLOSE}"
    inputs = _INPUTS.get()
    if inputs is None:
        raise UserError(f"${{art:{key},{what}}}: the run group itself cannot ask for an artifact")
    if key not in inputs:
        raise UserError(f"${{art:{key},{what}}}: run.{key} names no artifact", did_you_mean(key, inputs, "inputs"))
    version = inputs[key]
    if version is None:
        return validate.to_come(key, what)
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
