"""The models that the speed benchmarks measure, and Hugging Face's NemotronH with the same weights beside each."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import nn

from nemotron.kit.environment import describe_environment
from nemotron.stack.models import NemotronH, NemotronHConfig

MODELS = {
    # 1.914 M parameters: the hybrid of nano3 at laptop size.
    "1.9M": NemotronHConfig("MEM*EME", n_routed_experts=8),
    # 14.1 M parameters: twice as wide, half as deep again, twice the state and the experts.
    "14M": NemotronHConfig(
        "MEM*EMEMEME", vocab_size=4096, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=64, n_groups=2, chunk_size=64, n_routed_experts=16,
        num_experts_per_tok=2, moe_intermediate_size=208, moe_shared_expert_intermediate_size=416,
    ),
    # For a GPU: 0.29 B parameters (0.13 B active) and 1.05 B (0.30 B active).
    "300M": NemotronHConfig(
        "MEM*EMEMEM*EMEME", vocab_size=32768, hidden_size=768, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, mamba_num_heads=24, mamba_head_dim=64, ssm_state_size=128, n_groups=8, chunk_size=128,
        n_routed_experts=16, num_experts_per_tok=2, moe_intermediate_size=1024,
        moe_shared_expert_intermediate_size=2048,
    ),
    "1B": NemotronHConfig(
        "MEMEM*EMEMEM*EMEMEM*EMEME", vocab_size=32768, hidden_size=1024, num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, mamba_num_heads=32, mamba_head_dim=64, ssm_state_size=128, n_groups=8, chunk_size=128,
        n_routed_experts=32, num_experts_per_tok=3, moe_intermediate_size=1152,
        moe_shared_expert_intermediate_size=2304,
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> NemotronH:
    """The model `name` with random weights, on the CPU in fp32."""
    torch.manual_seed(seed)
    return NemotronH(MODELS[name])


def huggingface_twin(model: NemotronH, **settings: Any) -> nn.Module:
    """transformers' NemotronHForCausalLM with the weights of `model`; `settings` go into its config.

    Its clamp of dt from below is switched off (the published configs leave it at (0, inf)), so that both compute the
    same function.
    """
    import transformers

    unlimited = (0.0, math.inf)
    config = transformers.NemotronHConfig(**model.config.to_dict(), time_step_limit=unlimited, **settings)
    twin: Any = transformers.NemotronHForCausalLM(config)
    for layer in twin.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = unlimited
    twin.load_state_dict({name.replace("backbone.", "model."): value for name, value in model.state_dict().items()})
    with_weights: nn.Module = twin
    return with_weights


def machine() -> str:
    """One line: processor, cores, threads and the versions that matter."""
    import transformers

    here = describe_environment()
    settings = [f"{key}={os.environ[key]}" for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if key in os.environ]
    return (
        f"{here['cpu']} ({here['torch']['instructions']}), {here['cpu_count']} cores, "
        f"{torch.get_num_threads()} threads; "
        f"Python {here['python']}, torch {torch.__version__}, transformers {transformers.__version__}; "
        + " ".join(settings)
    )
