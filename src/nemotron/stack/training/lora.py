"""Low-rank adapters on a frozen model (LoRA; `models/lora_linear.py` has the layer): where they are, and merging them.

Which matrices have one is said in the names of Megatron-Bridge (`target_modules`), whose numbers the defaults of
`PeftConfig` are; `MODULES` has what they are called here and in transformers.

Routed experts have none. They are stacked weights here and in transformers, of which PEFT adapts none unless asked to
(it takes linear modules); Megatron-Bridge gives all experts of one rank a common adapter, which then depends on how
many ranks there were. `linear_fc1` and `linear_fc2` are the shared expert and the MLP of `-` blocks. Projections into
and out of the latent space, router, embedding and head are not among the published modules either.
"""

from __future__ import annotations

import torch
from torch import nn

from nemotron.kit.schemas.peft import PeftConfig
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.attention import Attention
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.models.layers import MLP
from nemotron.stack.models.lora_linear import LoraLinear, lora_layers
from nemotron.stack.models.mamba2 import Mamba2

# Megatron-Bridge's name of a module -> the kind of module that it lies in here, and its names there.
MODULES: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "linear_qkv": (Attention, ("q_proj", "k_proj", "v_proj")),
    "linear_proj": (Attention, ("o_proj",)),
    "linear_fc1": (MLP, ("up_proj",)),
    "linear_fc2": (MLP, ("down_proj",)),
    "in_proj": (Mamba2, ("in_proj",)),
    "out_proj": (Mamba2, ("out_proj",)),
}


def add_lora(model: NemotronH, peft: PeftConfig) -> None:
    """Freeze `model`, in place, and give the modules that `peft` names an adapter, in fp32 or wider.

    The multi-token prediction block has them too, so that it follows the trunk. Call it before `place_model` and before
    the optimiser is built, on all ranks with the same random state. ValueError: no block has one of these modules.
    """
    model.requires_grad_(False)
    kinds = [MODULES[name] for name in peft.target_modules]
    targets = [
        (module, name) for module in model.modules() for kind, names in kinds if type(module) is kind for name in names
    ]
    if not targets:
        raise ValueError(f"no block of {model.config.hybrid_override_pattern} has one of {peft.target_modules}")
    for module, name in targets:
        setattr(module, name, LoraLinear(getattr(module, name), peft.dim, peft.alpha))


def add_lora_like(model: NemotronH, other: nn.Module) -> None:
    """Adapters where `other`, of the same architecture, has them; values are not copied."""
    for path, layer in lora_layers(other):
        parent, _, name = path.rpartition(".")
        module, dim = model.get_submodule(parent), layer.lora_A.shape[0]
        setattr(module, name, LoraLinear(getattr(module, name), dim, layer.scale * dim))


def merge_lora(model: NemotronH) -> None:
    """Put every adapter into its weight, in place: afterwards the model is one without adapters, and not frozen."""
    for path, layer in list(lora_layers(model)):
        parent, _, name = path.rpartition(".")
        with torch.device("meta"):  # else it would draw weights, which are replaced
            merged = Linear(layer.in_features, layer.out_features)
        merged.weight = nn.Parameter(layer.merged_weight())
        setattr(model.get_submodule(parent), name, merged)
    model.requires_grad_(True)


def count_lora_parameters(config: NemotronHConfig, peft: PeftConfig) -> int:
    """Values in all adapters of a model that is yet to be made."""
    with torch.device("meta"):
        model = NemotronH(config)
        add_lora(model, peft)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
