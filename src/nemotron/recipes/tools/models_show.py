"""What a model is made of and what it costs, for `nemotron models show`, which starts this script.

The model is a preset, a directory with config.json, or a published artifact. Layers, parameters, memory and FLOPs
follow from the config in closed form: no weights are read, and torch is not loaded. This is a tool and no step of a
recipe: it publishes nothing and carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import dataclasses
import json
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.artifacts.naming import SCHEME
from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.errors import UserError, nearest
from nemotron.kit.commands import command_for
from nemotron.kit.tables import aligned
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.models.config import BLOCK_NAMES, NemotronHConfig
from nemotron.stack.models.published.config_json import CONFIG_FILE, load_config
from nemotron.stack.models.published.memory import (
    BITS_PER_WEIGHT,
    TRAINING_BYTES,
    conv_state_bytes,
    kv_cache_bytes_per_token,
    ssm_state_bytes,
    training_bytes,
    weight_bytes,
)
from nemotron.stack.models.published.parameters import Parameters, count_mtp_parameters, count_parameters
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.training.flops import forward_flops_per_token, mtp_flops_per_token, training_flops_per_token

Row = tuple[str, ...]
COLUMNS = 80


@dataclasses.dataclass(frozen=True)
class Options:
    """Of `nemotron models show`."""

    name: str | None
    seq_length: int
    as_json: bool


def find_model(name: str | None) -> tuple[str, NemotronHConfig]:
    """What the model called `name` is (preset, directory or artifact version), and its config.

    Raises:
        UserError: there is none of that name; the directory or the artifact holds no Nemotron-H model.
    """
    presets = f"presets: {', '.join(PRESETS)}"
    if name is None:
        raise UserError("which model? give a preset, a directory with config.json, or an artifact", presets)
    if name in PRESETS:
        return f"preset {name}", PRESETS[name]
    path = Path(name)
    if path.is_dir() or ("/" in name and not name.startswith(SCHEME)):
        return str(path), load_config(path)
    registry = Registry.default()
    artifact, artifacts = re.split("[:@]", name.removeprefix(SCHEME))[0], registry.names()
    if name.startswith(SCHEME) or artifact in artifacts or command_for(artifact):
        version = registry.resolve(name)
        if not (version.fetch(CONFIG_FILE) / CONFIG_FILE).is_file():
            raise UserError(f"artifact {version.ref} is no model: a {version.record['type']} has no {CONFIG_FILE}")
        return f"artifact {version.ref}", load_config(version.path)
    near = nearest(name, [*PRESETS, *artifacts])
    raise UserError(
        f"no preset, directory or artifact '{name}'", presets if near is None else f"did you mean {near}? {presets}"
    )


def numbers(name: str, config: NemotronHConfig, seq_len: int) -> dict[str, Any]:
    """Every number, exact: what `--json` prints."""
    model, mtp = count_parameters(config), count_mtp_parameters(config)
    return {
        "model": name,
        "config": config.to_dict(),
        "blocks": {symbol: config.hybrid_override_pattern.count(symbol) for symbol in BLOCK_NAMES},
        "parameters": with_sums(model),
        "mtp_parameters": with_sums(mtp) if mtp.total else None,
        "weight_bytes": {p: weight_bytes(model.total, p) for p in BITS_PER_WEIGHT},
        "mtp_weight_bytes": {p: weight_bytes(mtp.total, p) for p in BITS_PER_WEIGHT} if mtp.total else None,
        "training_bytes_per_parameter": TRAINING_BYTES,
        "training_bytes": training_bytes(model.total + mtp.total),
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config),
        "ssm_state_bytes_per_sequence": ssm_state_bytes(config),
        "conv_state_bytes_per_sequence": conv_state_bytes(config),
        "seq_length": seq_len,
        "forward_flops_per_token": forward_flops_per_token(config, seq_len),
        "mtp_flops_per_token": mtp_flops_per_token(config, seq_len),
        "training_flops_per_token": training_flops_per_token(config, seq_len),
    }


def with_sums(count: Parameters) -> dict[str, int]:
    """The parts of a count and its sums."""
    sums = {"total": count.total, "active": count.active, "active_without_embedding": count.active_without_embedding}
    return dataclasses.asdict(count) | sums


def page(name: str, config: NemotronHConfig, seq_len: int) -> str:
    """The numbers as a page that fits COLUMNS."""
    pattern = config.hybrid_override_pattern
    even = math.ceil(len(pattern) / math.ceil(len(pattern) / COLUMNS))  # lines of a long pattern are equally long
    head = [name, *textwrap.wrap(pattern, even, break_on_hyphens=False)]
    head.append(f"{len(pattern)} blocks, hidden size {config.hidden_size:,}, vocabulary {config.vocab_size:,}")
    tables = [
        aligned(layer_rows(config), "<><<>>"),
        aligned(weight_rows(config), "<>>>>"),
        aligned(cost_rows(config, seq_len), "<><"),
    ]
    return "\n\n".join("\n".join(lines) for lines in [head, *tables])


def layer_rows(config: NemotronHConfig) -> list[Row]:
    """Symbol, number of blocks, name, dimensions, parameters, active parameters of each part, and their sums."""
    model, mtp = count_parameters(config), count_mtp_parameters(config)
    mamba, attention, moe, mlp = (str(config.hybrid_override_pattern.count(symbol)) for symbol in "M*E-")
    mamba_heads = f"{config.mamba_num_heads} heads of {config.mamba_head_dim}, state {config.ssm_state_size}"
    heads = f"{config.num_attention_heads} query, {config.num_key_value_heads} KV heads of {config.head_dim}"
    chosen = f"{config.num_experts_per_tok} of {config.n_routed_experts}, width {config.moe_intermediate_size:,}"
    latent = f"{config.hidden_size:,} to {config.routed_size:,} and back"
    parts: list[tuple[str, str, str, str, int, int]] = [
        ("M", mamba, "Mamba-2", mamba_heads, model.mamba, model.mamba),
        ("*", attention, "attention", heads, model.attention, model.attention),
        ("-", mlp, "dense MLP", f"width {config.intermediate_size:,}", model.mlp, model.mlp),
        ("E", moe, "router", f"{config.n_routed_experts} scores", model.router, model.router),
        ("", "", "routed experts", chosen, model.routed_experts, model.visited_experts),
        ("", "", "latent projections", latent, model.latent_projections, model.latent_projections),
        ("", "", "shared expert", f"width {config.moe_shared_expert_intermediate_size:,}", model.shared_experts,
         model.shared_experts),
        ("", "", "norms", "", model.norms, model.norms),
        ("", "", "output head", "", model.head, model.head),
        ("", "", "input embedding", "", model.embedding, model.embedding),
    ]  # fmt: skip
    rows: list[Row] = [("", "", "", "", "parameters", "active")]
    rows += [(*words, quantity(total), quantity(active)) for *words, total, active in parts if total]
    rows.append(("", "", "all", "with input embedding", quantity(model.total), quantity(model.active)))
    rows.append(("", "", "", "without", "", quantity(model.active_without_embedding)))
    if mtp.total:
        trained = f"{config.mtp_hybrid_override_pattern}, each of {config.mtp_num_layers} applications"
        rows.append(("", "", "MTP block", trained, quantity(mtp.total), quantity(mtp.active)))
        rows.append(("", "", "all with MTP", "", quantity(model.total + mtp.total), ""))
    return rows


def weight_rows(config: NemotronHConfig) -> list[Row]:
    """Bytes of all weights in each precision."""
    model, mtp = count_parameters(config).total, count_mtp_parameters(config).total
    rows: list[Row] = [("weights", *BITS_PER_WEIGHT)]
    for name, total in [("model", model), ("with MTP", model + mtp)] if mtp else [("model", model)]:
        rows.append((f"  {name}", *(human_size(weight_bytes(total, precision)) for precision in BITS_PER_WEIGHT)))
    return rows


def cost_rows(config: NemotronHConfig, seq_len: int) -> list[Row]:
    """What training and decoding need: name, amount, what it is of."""
    stored = count_parameters(config).total + count_mtp_parameters(config).total
    of = TRAINING_BYTES
    state = (
        f"bf16 weight {of['weights']} and gradient {of['gradients']}",
        f"fp32 master copy {of['master']} and Adam moments {of['moments']}",
    )
    kv = kv_cache_bytes_per_token(config)
    mtp = f"; {config.mtp_num_layers} MTP applications included" if config.num_nextn_predict_layers else ""
    return [
        ("training state", human_size(training_bytes(stored)), f"{sum(of.values())} B a parameter: {state[0]},"),
        ("", "", state[1]),
        ("KV cache", f"{kv:,} B", f"a token, bf16; {human_size(kv * seq_len)} for {seq_len:,} tokens"),
        ("SSM state", human_size(ssm_state_bytes(config)), "a sequence, fp32"),
        ("conv state", human_size(conv_state_bytes(config)), "a sequence, bf16"),
        ("forward", flop(forward_flops_per_token(config, seq_len)), f"a token, in sequences of {seq_len:,}"),
        ("with backward", flop(training_flops_per_token(config, seq_len)), f"a token{mtp}"),
    ]


def quantity(number: int) -> str:
    """A number of parameters to four or more digits: 31577937344 -> '31.578 B'."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return f"{number:,}  "


def flop(number: float) -> str:
    """A number of FLOPs to three digits: 7.5e9 -> '7.5 GFLOP'."""
    for size, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f} FLOP"


def main(options: Options) -> None:
    """Find the model, print."""
    name, config = find_model(options.name)
    if options.as_json:
        print(json.dumps(numbers(name, config, options.seq_length), indent=2))
    else:
        print(page(name, config, options.seq_length))


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
