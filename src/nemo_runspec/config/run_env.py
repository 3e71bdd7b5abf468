"""`run.env` of a config: keys of an executor that a recipe, or the command line, sets."""

from __future__ import annotations

from typing import Any

from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.yaml_text import read_scalar
from nemo_runspec.env.keys import EXECUTOR_KEYS, GENERAL
from nemo_runspec.errors import UserError, nearest
from nemo_runspec.rules import Rule, near_choice, shown_value


def run_env(loaded: LoadedConfig) -> dict[str, Any]:
    """The keys of `run.env` of a config, interpolated and checked as those of a profile are; {} where it has none.

    None stands for "none": no container, no time limit; for a number of nodes or GPUs, that of the script's block.

    Raises:
        UserError: `run.env` is no mapping, or has an unknown key, a key that belongs in env.toml, or a wrong value.
    """
    group = loaded.data.get("run", {}).get("env")
    if group is None:
        return {}
    at = loaded.origin(("run", "env"))
    if not isinstance(group, dict):
        raise UserError(f"{at}: run.env = {shown_value(group)}: must be a group of keys", "as in run.env.nodes=2")
    rules = {key: rule for keys in EXECUTOR_KEYS.values() for key, rule in keys.items()}
    values: dict[str, Any] = {}
    for key, value in (vars(loaded.run)["env"] if group else {}).items():
        at = loaded.origin(("run", "env", key))
        if key in GENERAL:
            raise UserError(f"{at}: run.env.{key}: belongs in a profile of env.toml, not in a config")
        if key not in rules:
            near = nearest(str(key), rules)
            hint = f"did you mean run.env.{near}?" if near else f"known keys: {', '.join(rules)}"
            raise UserError(f"{at}: unknown key run.env.{key}", hint)
        values[key] = _typed(
            value, group[key], rules[key], f"{at}: run.env.{key}", loaded.on_command_line(("run", "env", key))
        )
    return values


def _typed(value: Any, raw: Any, rule: Rule, at: str, on_command_line: bool) -> Any:
    """`value` in the type of `rule`.

    Two readings are allowed: the text of an interpolation for the number that it spells, and a number of the command
    line (`run.env.time=30`) for text. `raw` is the value before interpolation.
    """
    if value is None:
        return None
    if isinstance(value, str) and isinstance(raw, str) and "${" in raw and rule.kind in (int, bool):
        value = read_scalar(value, at)
    if on_command_line and rule.kind is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not rule.allows(value):
        raise UserError(f"{at} = {shown_value(value)}: must be {rule.text}", near_choice(value, rule))
    return value
