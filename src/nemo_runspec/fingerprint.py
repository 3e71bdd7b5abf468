"""The identity of a run: what it would compute, in ten hex digits.

Two runs have the same fingerprint when the resolved config, the script, the project code that it imports and the
contents of the inputs are the same. Where things lie (paths, version numbers, the run's own name) does not count: an
input is its payload digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.code import code_of
from nemo_runspec.env import output_root
from nemo_runspec.runspec import Runspec
from nemo_runspec.user_files import expanded

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Version

LENGTH = 10
# Of the `run` group: names, places and what the job asks its executor for, not content.
NOT_CONTENT_OF_RUN = ("name", "root", "env")


def fingerprint(
    config: Mapping[str, Any],
    script: Path,
    input_digests: Mapping[str, str],
    input_paths: Mapping[str, str] | None = None,
    code: Mapping[str, str] | None = None,
) -> str:
    """Ten hex digits over config, script, code and inputs.

    Args:
        config: what counts of the resolved config (`content_of`). `run.name`, `run.root` and `run.env` do not count.
        script: the script; its bytes count.
        input_digests: payload digest of each input, by its key in `run`; it takes the place of the reference there.
        input_paths: payload directory of each input, by the same keys; where a value of the config is a path in one of
            them (`${art:data,path}`), the digest takes the directory's place.
        code: sha256 of the modules that the script needs, by name (`code_of`).
    """
    from nemo_runspec.config.inputs import put_reference, references_of

    canonical = dict(config)
    for key, path in (input_paths or {}).items():
        canonical = _replace_path(canonical, path, f"art:{input_digests[key]}")
    run = {key: value for key, value in canonical.get("run", {}).items() if key not in NOT_CONTENT_OF_RUN}
    for key in references_of(run).keys() & input_digests.keys():
        put_reference(run, key, input_digests[key])
    canonical["run"] = run
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    digest = hashlib.sha256(text.encode())
    digest.update(b"\0" + script.read_bytes())
    digest.update(b"\0" + json.dumps(code or {}, sort_keys=True).encode())
    return digest.hexdigest()[:LENGTH]


def _replace_path(value: Any, path: str, by: str, but: tuple[str, ...] = ()) -> Any:
    """`value` with `by` in place of `path`, where a string is that path or one below it; those below `but` stay."""
    if isinstance(value, dict):
        return {key: _replace_path(item, path, by, but) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_path(item, path, by, but) for item in value]
    if isinstance(value, str) and any(value == kept or value.startswith(kept + "/") for kept in but):
        return value
    if isinstance(value, str) and (value == path or value.startswith(path + "/")):
        return by + value[len(path) :]
    return value


def plain(config: Any) -> dict[str, Any]:
    """Plain values of a pydantic model, an omegaconf config or a mapping."""
    if hasattr(config, "model_dump"):
        values = config.model_dump(mode="json")
    elif hasattr(config, "_metadata"):  # an omegaconf node, recognised without importing omegaconf
        from omegaconf import OmegaConf

        values = OmegaConf.to_container(config, resolve=True)
    else:
        values = dict(config)
    return dict(values)


def content_of(config: Any, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plain values of a config without those that change nothing of what a run computes.

    These are `resume` (which run to go on from) and what the schema class of `config` lists in `neutral_keys`: dotted
    keys, each of a value or of a whole group.

    Args:
        values: take these instead of those of `config`: an earlier state of the same config.
    """
    values = plain(config) if values is None else values
    for key in ("resume", *getattr(config, "neutral_keys", ())):
        values = _without(values, key.split("."))
    return dict(values)


def _without(values: Mapping[str, Any], key: list[str]) -> dict[str, Any]:
    below = values.get(key[0])
    if len(key) > 1 and isinstance(below, Mapping):
        return {**values, key[0]: _without(below, key[1:])}
    return {name: value for name, value in values.items() if [name] != key}


def inputs_of(config: Any) -> dict[str, Version]:
    """The input artifacts that a config's `run` group names, by key.

    Raises:
        UserError: one of them does not exist.
    """
    from nemo_runspec.artifacts import Registry
    from nemo_runspec.config.inputs import references_of

    registry = Registry.default()
    references = references_of(plain(config).get("run") or {})
    return {key: registry.resolve(value) for key, value in references.items()}


def config_fingerprint(config: Any, spec: Runspec, inputs: Mapping[str, Version] | None = None) -> str:
    """The fingerprint of a run of `spec`'s script with a validated `config`; `inputs` are looked up unless given.

    `config` is an instance of the script's schema where it has one: the class says what does not count (`content_of`).
    """
    inputs = inputs_of(config) if inputs is None else inputs
    digests = {key: version.digest for key, version in inputs.items()}
    paths = {key: str(version.path) for key, version in inputs.items()}
    values = content_of(config)
    for root in {version.registry.local_root for version in inputs.values()}:
        # What lies in yet another payload: the mirror of a registry is elsewhere on another machine.
        values = _replace_path(values, str(root), "art:", but=tuple(paths.values()))
    return fingerprint(values, spec.script_path, digests, paths, run_code(config, spec))


def run_code(config: Any, spec: Runspec) -> dict[str, str]:
    """The sha256 of the modules that a run of `spec`'s script with this config needs, by name; see `code_of`."""
    return code_of(spec.script_path, content_of(config), spec.schema_path)


def run_dir_for(config: Any, spec: Runspec, digits: str | None = None, root: str | Path | None = None) -> Path:
    """`<output root>/<family>/<stage>/<config>-<fingerprint>`, absolute; nothing is created.

    Args:
        config: a validated config, model or plain values; `run.root`, where set, is the output root.
        digits: the fingerprint, where it is known already.
        root: the output root of a config that names none; that of this process when None.
    """
    run = plain(config).get("run") or {}
    root = expanded(run["root"]).absolute() if run.get("root") else Path(root or output_root())
    digits = digits or config_fingerprint(config, spec)
    family, stage = run.get("family") or spec.family, run.get("stage") or spec.stage
    return root / family / stage / f"{run.get('config') or 'config'}-{digits}"
