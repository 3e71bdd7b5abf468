"""How a script publishes what its config names: one call at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.config.yaml_text import dump_yaml
from nemo_runspec.errors import UserError
from nemo_runspec.fingerprint import config_fingerprint, inputs_of, plain
from nemo_runspec.git import git_commit
from nemo_runspec.runspec import parse, recipe_name


def publish(
    config: Any,
    script: str | Path,
    payload: str | Path,
    record: Mapping[str, Any] | None = None,
    *,
    key: str = "output",
) -> Version:
    """Publish a file or a folder as the artifact that `run.output` of the config names.

    The record gets the run as its producer and the pinned inputs, so that a pipeline knows what is published already.
    The resolved config stands beside the payload, for `artifacts show --config` and `artifacts diff`.

    Args:
        config: what `load_script_config` returned.
        script: `__file__` of the caller.
        payload: what is copied into the registry.
        record: more content of the record, such as `type`, `fields` and `metrics`.
        key: `results`, to publish those.

    Raises:
        UserError: the config names no such artifact; whatever `Registry.publish` refuses.
    """
    spec, values = parse(script), plain(config)
    run = values["run"]
    if not run.get(key):
        raise UserError(f"run.{key} names no artifact to publish", f"as in run.{key}=my-{key}")
    inputs = inputs_of(config)
    producer = {
        "name": recipe_name(run, spec),
        "script": spec.script_path.name,
        "fingerprint": config_fingerprint(config, spec, inputs),
        "git_commit": git_commit(spec.script_path.parent),
    }
    facts = {"producer": producer, "inputs": {role: version.pinned for role, version in inputs.items()}}
    run_files = {"config.yaml": dump_yaml(values, escape=True).encode()}
    return Registry.default().publish(run[key], payload, {**facts, **(record or {})}, run_files=run_files)
