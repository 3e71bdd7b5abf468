"""Names and references of artifacts: `name`, `name:latest`, `name:3`, `name:3@digest`, each also after `art://`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_runspec.errors import UserError

SCHEME = "art://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]*")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
# <family>-<stage>-<data|model|results>-<config>; stage and config may have parts (rl-rlvr, my-test).
_RULE = re.compile(
    r"(?P<family>[a-z0-9]+)-(?P<stage>[a-z0-9_-]+?)-(?P<kind>data|model|results)-(?P<config>[A-Za-z0-9._-]+)"
)

# nemotron_cc-<step>-data-<config>: the steps of a curation have one command; the last one's artifact names no step.
_CURATION = re.compile(r"nemotron_cc-(?:(?P<step>[a-z0-9_]+)-)?data-(?P<config>[A-Za-z0-9._-]+)")
# <pack|tokenize>-data-<config>: commands of the group data, which belong to no family.
_DATA = re.compile(r"(?P<command>pack|tokenize)-data-(?P<config>[A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class Reference:
    """A parsed artifact reference. `version` None means the latest; `digest` is a sha256 or its first 8+ digits."""

    name: str
    version: int | None = None
    digest: str | None = None

    def __str__(self) -> str:
        version = "" if self.version is None else f":{self.version}"
        return f"{self.name}{version}" + (f"@{self.digest}" if self.digest else "")


def check_name(name: str) -> str:
    """Return `name` if an artifact may be called so, else raise UserError."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"bad artifact name '{name}'",
            "a name has 1 to 128 letters, digits, '.', '_' or '-', and starts with a letter or a digit",
        )
    return name


def parse_reference(text: str) -> Reference:
    """Parse `[art://]name[:N|:latest][@digest]`; raise UserError on anything else."""
    body, _, digest = text.removeprefix(SCHEME).partition("@")
    name, _, version = body.partition(":")
    bad_version = ":" in body and version != "latest" and not _VERSION.fullmatch(version)
    bad_digest = "@" in text and not _DIGEST.fullmatch(digest)
    if not _NAME.fullmatch(name) or bad_version or bad_digest:
        raise UserError(
            f"bad artifact reference '{text}'",
            "write name, name:latest, name:3 or name:3@<sha256, 8 digits or more>, with or without art:// before it",
        )
    return Reference(name, int(version) if version and version != "latest" else None, digest or None)


def hint_for(name: str) -> str | None:
    """The command that makes the artifact `name`, derived from `<family>-<stage>-<data|model|results>-<config>`.

    `nano3-sft-data-tiny` -> `nemotron nano3 data prep sft -c tiny`; `nano3-sft-model-tiny` and `nano3-sft-results-tiny`
    -> `nemotron nano3 sft -c tiny`; `nemotron_cc-pii-data-tiny` -> `nemotron data curate pii -c tiny`;
    `pack-data-own` -> `nemotron data pack -c own`; None for a name that does not follow the rule.
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
