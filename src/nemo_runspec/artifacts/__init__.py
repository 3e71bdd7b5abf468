"""Artifacts: what runs publish and read. A name has numbered versions, each immutable, with a record and checksums."""

from nemo_runspec.artifacts.naming import Reference, parse_reference
from nemo_runspec.artifacts.registry import Registry, Version

__all__ = ["Reference", "Registry", "Version", "parse_reference"]
