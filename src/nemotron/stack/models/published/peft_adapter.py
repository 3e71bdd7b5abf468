"""Adapters of a model on disk as PEFT reads them, for transformers' NemotronH and for inference engines.

    adapter_config.json          rank, alpha, which modules, the model that they belong to
    adapter_model.safetensors    base_model.model.model.layers.N.mixer.….lora_A.weight [dim, K], lora_B.weight [N, dim]

Mamba's `out_proj` is there as a whole matrix, with its adapter merged (`modules_to_save`): PEFT refuses an adapter on
it for `nemotron_h`, since the fused kernel of transformers reads the weight without calling the module.

Module names are those of transformers >= 5.8, `model.layers` for the `backbone.layers` of the published checkpoints.
Adapters of multi-token prediction keep their name, `mtp.layers`; transformers leaves that block out, and PEFT then
passes them over. Shapes: N outputs, K inputs of the layer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor, nn

from nemotron.stack.models.lora_linear import lora_layers

if TYPE_CHECKING:
    from nemotron.kit import Checkpoint
    from nemotron.kit.schemas.peft import PeftConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
OUT_PROJ = "mixer.out_proj"


def save_adapter(folder: Path, model: nn.Module, peft: PeftConfig, base: Checkpoint) -> None:
    """Write the adapters of `model`, whole tensors on any device, into `folder`, which is made.

    `base`: the frozen model, which the config names by its address in the Hub where it comes from there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    targets = set()
    for path, layer in lora_layers(model):
        name, kind = (
            f"base_model.model.{path.replace('backbone.', 'model.', 1)}",
            "mixer" + path.rpartition(".mixer")[2],
        )
        if kind == OUT_PROJ:
            tensors[f"{name}.weight"] = layer.merged_weight().cpu().contiguous()
            continue
        for part, tensor in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensors[f"{name}.{part}.weight"] = tensor.detach().cpu().contiguous()
        targets.add(kind)
    alpha = int(peft.alpha) if peft.alpha == int(peft.alpha) else peft.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _address(base),
        "inference_mode": True,
        "r": peft.dim,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "modules_to_save": [OUT_PROJ] if any(name.endswith(f"{OUT_PROJ}.weight") for name in tensors) else None,
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _address(base: Checkpoint) -> str:
    """ORG/NAME of a model of the Hub, else the artifact's name and version."""
    for source in base.sources:
        if match := re.match(r"https://huggingface\.co/([^/]+/[^/]+)/tree/", source.name):
            return match[1]
    return base.ref
