"""The model card (README.md) of an exported model: what its record says, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.errors import UserError
from nemotron.kit.lineage import LineageNode, format_lineage, raw_sources
from nemotron.stack.models.config import BLOCK_NAMES, NemotronHConfig
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters


def model_card(version: Version, lineage: LineageNode, registry: Registry, config: NemotronHConfig, dtype: str) -> str:
    """The card of a model artifact, as Markdown with the front matter that the Hub reads.

    Args:
        lineage: of this version, from `kit.lineage.walk`.
        registry: searched for results that measured this version.
        dtype: of the exported weights.
    """
    record = version.record
    producer = record.get("producer") or {}
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["nemotron_h", version.name]}
    made_by = producer.get("name") or producer.get("script")
    parts = [
        # JSON is YAML, and quotes what needs quoting.
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()) + "---\n",
        f"# {version.ref}\n",
        (
            f"A Nemotron-H language model: the artifact `{version.pinned}`, published at {record.get('created_at')} by "
            f"`{made_by}`. Everything below is from its record, and from the records of its inputs and of the results "
            "that measured it.\n"
        ),
        "## Use\n",
        _usage(version),
        "## Architecture\n",
        _table(["", ""], _architecture(config, dtype)),
        "## Training\n",
        _table(["", ""], _training(record)),
        "## Measured\n",
        *_measured(version, registry),
        "## Lineage\n",
        "```text\n" + "\n".join(format_lineage(lineage)) + "\n```\n",
        *_sources(lineage),
    ]
    return "\n".join(parts)


def _usage(version: Version) -> str:
    base = str((version.record.get("producer") or {}).get("name", "")).endswith("/pretrain")
    if base:
        call = 'inputs = tokenizer("def main(", return_tensors="pt")'
    else:
        call = (
            'messages = [{"role": "user", "content": "What is 728+654?"}]\n'
            "inputs = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
            ")"
        )
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this directory\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        f"{call}\n"
        "output = model.generate(**inputs, max_new_tokens=256)\n"
        "print(tokenizer.decode(output[0]))\n"
        "```\n"
    )


def _architecture(config: NemotronHConfig, dtype: str) -> Iterator[list[str]]:
    pattern, count, mtp = config.hybrid_override_pattern, count_parameters(config), count_mtp_parameters(config)
    blocks = ", ".join(f"{pattern.count(s)} {name} ({s})" for s, name in BLOCK_NAMES.items() if s in pattern)
    yield ["pattern", f"`{pattern}`"]
    yield ["blocks", blocks.replace("*", r"\*")]
    yield ["parameters", f"{count.total + mtp.total:,}"]
    yield ["active parameters a token", f"{count.active:,}"]
    if mtp.total:
        yield ["multi-token prediction", f"{mtp.total:,} parameters, `{config.mtp_hybrid_override_pattern}`"]
    yield ["hidden size", f"{config.hidden_size:,}"]
    yield ["vocabulary", f"{config.vocab_size:,}"]
    yield ["weights", dtype]


def _training(record: Mapping[str, Any]) -> Iterator[list[str]]:
    fields, producer = record.get("fields") or {}, record.get("producer") or {}
    if fields.get("step"):
        yield ["optimizer steps", f"{fields['step']:,}"]
    if fields.get("tokens"):
        yield ["tokens", f"{fields['tokens']:,}"]
    if producer.get("argv"):
        yield ["command", f"`{' '.join(producer['argv'])}`"]
    yield ["script", f"`{producer.get('script')}`"]
    if producer.get("git_commit"):
        yield ["git commit", f"`{producer['git_commit']}`"]
    if producer.get("fingerprint"):
        yield ["config fingerprint", f"`{producer['fingerprint']}`"]
    for role, pinned in (record.get("inputs") or {}).items():
        yield [f"input: {role}", f"`{pinned}`"]


def _measured(version: Version, registry: Registry) -> Iterator[str]:
    numbers = list(_scalars(version.record.get("metrics") or {}))
    if numbers:
        yield "In the model's own record:\n"
        yield _table(["metric", "value"], [[f"`{key}`", _number(value)] for key, value in numbers])
    is_evaluated = False
    for results, role, scores in _evaluations(version, registry):
        is_evaluated = True
        yield (
            f"`{results.pinned}`" + (f", as `{role}`" if role else "") + f": pass@1 on held-out tasks, prompt format "
            f"{scores.get('prompt_format')}, 95 % intervals in brackets.\n"
        )
        rows = [
            [family, str(entry.get("tasks")), _interval(entry, "greedy"), _interval(entry, "sampled")]
            for family, entry in [*scores["families"].items(), ("mean", scores.get("mean") or {})]
        ]
        yield _table(["family", "tasks", "greedy", "sampled"], rows)
    if not is_evaluated:
        yield "No evaluation of this version is in the registry.\n"


def _evaluations(version: Version, registry: Registry) -> Iterator[tuple[Version, str | None, dict[str, Any]]]:
    """The newest results of each name that measured this very version, and its role in them.

    They are those that read it, and those of the run that made it (role None).
    """
    fingerprint = (version.record.get("producer") or {}).get("fingerprint")
    for name in registry.names():
        for number in reversed(registry.versions(name)):
            try:
                results = registry.resolve(f"{name}:{number}")
            except UserError:
                continue  # a damaged record is no evidence
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


def _sources(lineage: LineageNode) -> Iterator[str]:
    sources = raw_sources(lineage)
    if sources:
        yield "Raw sources (the records name no licences):\n"
        rows = [
            [_cell(source.name), f"`{source.sha256}`" if source.sha256 else "", _cell(source.detail or "")]
            for source in sources
        ]
        yield _table(["source", "sha256", "detail"], rows)
    else:
        yield "The records name no raw source.\n"


def _scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers in nested metrics with their dotted path; lists and texts are left to the record."""
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _interval(entry: Mapping[str, Any], which: str) -> str:
    value, bounds = entry.get(which), entry.get(f"{which}_95")
    if value is None:
        return ""
    return f"{value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) or (math.isfinite(value) and value == int(value)) else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _table(head: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"
