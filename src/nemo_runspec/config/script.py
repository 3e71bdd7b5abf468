"""What a script calls first: its command line -> its validated config.

`python train.py --config tiny optimizer.lr=1e-3` works on its own, from anywhere; a launched job passes the path of
its train.yaml instead of a name. Both go through the same checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_runspec.config.help import script_help
from nemo_runspec.config.loader import COMMAND_LINE, LoadedConfig, chosen_config, load_config
from nemo_runspec.config.resolve import resolve_config
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, load_schema, run_group
from nemo_runspec.config.yaml_text import escape_interpolation
from nemo_runspec.options import Options, parse_words
from nemo_runspec.runspec import Runspec, parse

_VALUED = {"-c": "config", "--config": "config"}
_FLAGS = {"--debug": "debug", "-h": "help", "--help": "help"}


def load_script_config(
    script: str | Path,
    argv: Sequence[str] | None = None,
    *,
    inputs: Callable[[], Mapping[str, str | None]] | None = None,
) -> Any:
    """The validated config of the script that calls this.

    Args:
        script: `__file__` of the caller.
        argv: words after the script's name; those of this process by default. `--config NAME|PATH`, `key=value`,
            `--debug`, `--help`.
        inputs: gives references of artifacts by key of `run` (`{"data": "art://…:3"}`), as `read_pipe` does. It is
            called only where the command line names no input, and its references replace those of the config. Keys
            that are no inputs of this script are passed over (the results of the script before it, say), and None is.

    Returns:
        An instance of the script's schema class; where it declares none, an omegaconf `DictConfig`. References in
        `run` are pinned to versions, the same ones on all ranks and nodes of a job.

    Raises:
        UserError: whatever `load_config` and `resolve_config` refuse, an unknown option, an option without its value.
        SystemExit: 0, after `--help`.
    """
    spec = parse(script)
    options = parse_words(sys.argv[1:] if argv is None else argv, valued=_VALUED, flags=_FLAGS)
    if "help" in options.flags:
        print(script_help(spec, f"python {Path(sys.argv[0]).name if argv is None else spec.script_path.name}"))
        raise SystemExit(0)
    resolved = resolve_config(_load(spec, options, inputs), spec, at_start=True)
    if resolved.model is not None:
        return resolved.model
    from omegaconf import OmegaConf

    return OmegaConf.create(escape_interpolation(resolved.data))


def _load(spec: Runspec, options: Options, inputs: Callable[[], Mapping[str, str | None]] | None) -> LoadedConfig:
    name, fmt = chosen_config(spec, options.values.get("config")), spec.config.format
    loaded = load_config(spec.config_dir, name, options.overrides, fmt)
    if inputs is None:
        return loaded
    schema = load_schema(spec)
    declared = [
        key
        for key in (run_group(schema).model_fields if schema else loaded.data["run"])
        if key not in RESERVED_RUN_KEYS
    ]
    if any(loaded.origins.get(("run", key)) == COMMAND_LINE for key in declared):
        return loaded
    piped = [f"run.{key}={reference}" for key, reference in inputs().items() if reference and key in declared]
    return load_config(spec.config_dir, name, (*piped, *options.overrides), fmt) if piped else loaded
