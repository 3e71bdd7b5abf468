"""Configs: YAML + `defaults:` + overrides, interpolated, artifacts pinned, validated against a script's schema."""

from nemo_runspec.config.loader import LoadedConfig, list_configs, load_config
from nemo_runspec.config.resolve import ResolvedConfig, resolve_config
from nemo_runspec.config.script import load_script_config

__all__ = ["LoadedConfig", "ResolvedConfig", "list_configs", "load_config", "load_script_config", "resolve_config"]
