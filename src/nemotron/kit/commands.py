"""Which `nemotron` command makes an artifact: what an error about a missing or corrupt one says to its reader."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NoReturn

from nemo_runspec.errors import ArtifactError, RunspecError, run_main
from nemotron.kit.stop import stop_at_once

# <family>-<stage>-<data|model|results>-<config>; stage and config may have parts (rl-rlvr, my-test).
_RULE = re.compile(
    r"(?P<family>[a-z0-9]+)-(?P<stage>[a-z0-9_-]+?)-(?P<kind>data|model|results)-(?P<config>[A-Za-z0-9._-]+)"
)

# nemotron_cc-<step>-data-<config>: the steps of a curation have one command; the last one's artifact names no step.
_CURATION = re.compile(r"nemotron_cc-(?:(?P<step>[a-z0-9_]+)-)?data-(?P<config>[A-Za-z0-9._-]+)")
# <pack|tokenize>-data-<config>: commands of the group data, which belong to no family.
_DATA = re.compile(r"(?P<command>pack|tokenize)-data-(?P<config>[A-Za-z0-9._-]+)")


def command_hint(error: RunspecError) -> str | None:
    """For `run_main`: the hint of an artifact's error with the command that makes it; None where none is known."""
    command = command_for(error.name) if isinstance(error, ArtifactError) else None
    if command is None or not isinstance(error, ArtifactError):
        return None
    if error.corrupt:
        return f"make it again: {command} --force"
    return f"{error.hint} if not, make it: {command}" if error.hint else f"make it: {command}"


def run_data_script(main: Callable[[], None]) -> NoReturn:
    """Run the main of a data preparation and leave with its exit code. A signal ends it at once: see `stop_at_once`."""
    stop_at_once()
    sys.exit(run_main(main, command_hint))


def command_for(name: str) -> str | None:
    """The command that makes the artifact `name`, derived from `<family>-<stage>-<data|model|results>-<config>`.

    `nano3-sft-data-tiny` -> `nemotron nano3 data prep sft -c tiny`; `nano3-sft-model-tiny` and `nano3-sft-results-tiny`
    -> `nemotron nano3 sft -c tiny`; `nemotron_cc-pii-data-tiny` -> `nemotron data curate pii -c tiny`;
    `tokenize-data-tiny` -> `nemotron data tokenize -c tiny`; None for a name that does not follow the rule.
    """
    data = _DATA.fullmatch(name)
    if data is not None:
        return f"nemotron data {data['command']} -c {data['config']}"
    curation = _CURATION.fullmatch(name)
    if curation is not None:
        step = f" {curation['step']}" if curation["step"] else ""
        return f"nemotron data curate{step} -c {curation['config']}"
    match = _RULE.fullmatch(name)
    if match is None:
        return None
    command = match["stage"].replace("-", " ")
    if match["kind"] == "data":
        command = f"data prep {command}"
    return f"nemotron {match['family']} {command} -c {match['config']}"
