"""The model card (README.md) of an exported model: what its record says, and nothing else.

`model_card.md.jinja` is its text.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.errors import UserError
from nemotron.kit.lineage import LineageNode, format_lineage, raw_sources
from nemotron.kit.metrics import numbers_in
from nemotron.kit.model_folder import ADAPTER_CONFIG
from nemotron.stack.models.config import BLOCK_NAMES, NemotronHConfig
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters


def model_card(version: Version, lineage: LineageNode, registry: Registry, config: NemotronHConfig, dtype: str) -> str:
    """The card of a model artifact, as Markdown with the front matter that the Hub reads.

    Args:
        lineage: of this version, from `kit.lineage.walk`.
        registry: searched for results that measured this version.
        dtype: of the exported weights.
    """
    record, pattern = version.record, config.hybrid_override_pattern
    # The windows that pretraining has read say where its next phase goes on, nothing of the model.
    measured = {name: value for name, value in (record.get("metrics") or {}).items() if name != "drawn"}
    producer = record.get("producer") or {}
    blocks = [f"{pattern.count(symbol)} {name} ({symbol})" for symbol, name in BLOCK_NAMES.items() if symbol in pattern]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "interval": _interval, "cell": _cell}
    return environment.get_template("model_card.md.jinja").render(
        version=version,
        created_at=record.get("created_at"),
        fields=record.get("fields") or {},
        inputs=record.get("inputs") or {},
        producer=producer,
        command=shlex.join(producer.get("argv") or []),
        is_base=(record.get("fields") or {}).get("chat_template") is None,
        adapter_base=_adapter_base(version.path / ADAPTER_CONFIG),
        config=config,
        blocks=", ".join(blocks).replace("*", r"\*"),
        count=count_parameters(config),
        mtp=count_mtp_parameters(config),
        dtype=dtype,
        numbers=numbers_in(measured),
        evaluations=list(_evaluations(version, registry)),
        lineage="\n".join(format_lineage(lineage)),
        sources=raw_sources(lineage),
    )


def _adapter_base(file: Path) -> str | None:
    """The model that the adapters beside the weights are for, as their config says; None without any."""
    return str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]) if file.is_file() else None


def _evaluations(version: Version, registry: Registry) -> Iterator[tuple[Version, str | None, dict[str, Any]]]:
    """The newest results of each name that measured this very version, and its role in them.

    They are those that read it, and those of the run that made it (role None).
    """
    fingerprint = (version.record.get("producer") or {}).get("fingerprint")
    for name in registry.names():
        with contextlib.suppress(UserError):  # a folder that may not be read is no evidence, nor a damaged record
            for results in registry.readable(name):
                tasks = (results.record.get("metrics") or {}).get("tasks")
                if results.record.get("type") != "Results" or not isinstance(tasks, dict):
                    break
                inputs, producer = results.record.get("inputs") or {}, results.record.get("producer") or {}
                roles = [
                    role
                    for role, pinned in inputs.items()
                    if pinned == version.pinned and "families" in tasks.get(role, {})
                ]
                for role in roles:
                    yield results, role, tasks[role]
                own_run = fingerprint is not None and producer.get("fingerprint") == fingerprint and "families" in tasks
                if own_run:
                    yield results, None, tasks
                if roles or own_run:
                    break


def _interval(entry: Mapping[str, Any], which: str) -> str:
    value, bounds = entry.get(which), entry.get(f"{which}_95")
    if value is None:
        return ""
    return f"{value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and value == int(value) else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
